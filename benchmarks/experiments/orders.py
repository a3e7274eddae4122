"""Adam's largest step where gradients span orders of magnitude within each group of a coded slot.

    KERAS_BACKEND=jax python benchmarks/experiments/orders.py

64 x 256 independent quadratics with gradient noise, whose steepness is log-uniform over D orders;
2000 steps at 1e-3. A row is the largest step in learning rates, and the mean distance that is left,
with slots in float32, in kmp's codes, and in squares and fourth powers.
"""

import jax
import numpy as np
from jax import numpy as jnp

from kmp.half_memory.codes import NON_NEGATIVE, SIGNED, Code, Groups, decode, encode, scales_of

GROUPS = Groups(0, 32)
CODES = {
    "float32": None,
    "kmp's codes": (SIGNED, NON_NEGATIVE),
    "squares and fourth powers": (Code("int8", 2, 0, True), Code("uint8", 4, 0, False)),
}


def coded(x, code, uniform):
    """What a slot is once it is encoded and decoded."""
    scales = scales_of(GROUPS.largest(x))
    return decode(encode(x, scales, code, GROUPS, uniform), scales, code, GROUPS)


def train(orders, codes, steps=2000):
    """The largest step in learning rates, and the mean distance from the minimum at the end."""
    steepness = 10.0 ** (-orders * jax.random.uniform(jax.random.key(0), (64, 256)))

    def stored(slots, keys):
        if codes is None:
            return slots
        parts = zip(slots, codes, keys, strict=True)
        return tuple(coded(x, c, jax.random.uniform(k, x.shape)) for x, c, k in parts)

    def step(t, state):
        weight, momentum, velocity, largest = state
        noise, *keys = jax.random.split(jax.random.fold_in(jax.random.key(1), t), 3)
        gradient = steepness * (weight - 1 + 0.5 * jax.random.normal(noise, weight.shape))
        momentum = momentum + 0.1 * (gradient - momentum)
        velocity = velocity + 0.001 * (gradient * gradient - velocity)
        correction = jnp.sqrt(1 - 0.999 ** (t + 1.0)) / (1 - 0.9 ** (t + 1.0))
        change = correction * momentum / (jnp.sqrt(velocity) + 1e-30)
        largest = jnp.maximum(largest, jnp.max(jnp.abs(change)))
        return weight - 1e-3 * change, *stored((momentum, velocity), keys), largest

    zeros = jnp.zeros_like(steepness)
    weight, *_, largest = jax.lax.fori_loop(0, steps, step, (zeros, zeros, zeros, 0.0))
    return largest, jnp.mean(jnp.abs(weight - 1))


def main() -> None:
    """Print a row for each code and number of orders."""
    for name, codes in CODES.items():
        for orders in (1, 3, 6):
            largest, distance = map(np.asarray, jax.jit(lambda d, c=codes: train(d, c))(orders))
            print(f"{name:26} D={orders}  {largest:6.2f}  {distance:.3f}", flush=True)


if __name__ == "__main__":
    main()
