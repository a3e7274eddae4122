"""Whether a transformer's training step fits on an H100 of 80 GB, by XLA's own count.

    python benchmarks/fits.py --policy mixed_bfloat16
    python benchmarks/fits.py --policy bfloat16

XLA's compiler plans the memory of the whole step: weights, slots, gradients, activations. The model
has shapes and no weights, so any machine can ask. Needs the extras `jax` and `h100`.
"""

import argparse
import functools
from collections.abc import Callable

import compiled_counts  # first: it sets the environment
import jax
import keras
import models
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from keras.src.backend.common import global_state

import kmp

WORDS, LENGTH, MEMORY = 20_000, 512, 80e9


def build(blocks: int, width: int, heads: int, words: int, length: int, wrap: Callable):
    """A decoder-only transformer and Adam, whose variables have shapes and no values."""
    optimizer = wrap(keras.optimizers.Adam())
    with keras.StatelessScope():
        model = models.decoder(blocks, width, heads, words, length)
        optimizer.build(model.trainable_variables)
        # Keras would make the values when the scope ends.
        global_state.set_global_attribute("uninitialized_variables", [])
    return model, optimizer


def step_of(model, optimizer):
    """One training step as a pure function."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def scaled_loss(weights, others, state, x, y):
        logits, others = model.stateless_call(weights, others, x, training=True)
        if not hasattr(optimizer, "inner_optimizer"):
            return loss(y, logits), others
        mapping = list(zip(optimizer.variables, state, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return optimizer.scale_loss(loss(y, logits)), others

    def step(weights, others, state, x, y):
        gradients, others = jax.grad(scaled_loss, has_aux=True)(weights, others, state, x, y)
        return *optimizer.stateless_apply(state, gradients, weights), others

    return step


def main() -> None:
    """Compile, and print what the step holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="bfloat16")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4)
    arguments = parser.parse_args()
    keras.config.set_dtype_policy(arguments.policy)
    width, no_scale = arguments.width, functools.partial(kmp.scaled, loss_scale="none")
    model, optimizer = build(arguments.blocks, width, width // 128, WORDS, LENGTH, no_scale)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=compiled_counts.H100, topology="1x1x1"
    )
    mesh = Mesh(np.array(topology.devices), ["batch"])
    here = NamedSharding(mesh, PartitionSpec())

    def described(shape, dtype):
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=here)

    state = [
        [described(v.shape, v.dtype) for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]
    batch = [described((arguments.batch, LENGTH), "int32")] * 2
    compiled = jax.jit(step_of(model, optimizer), donate_argnums=(0, 1, 2)).lower(*state, *batch)
    memory = compiled.compile().memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    held += memory.output_size_in_bytes - memory.alias_size_in_bytes
    parameters = model.count_params()
    print(
        f"{parameters / 1e9:.2f} billion parameters, {arguments.policy}: weights and slots "
        f"{memory.argument_size_in_bytes / 1e9:.1f} GB "
        f"({memory.argument_size_in_bytes / parameters:.2f} bytes a parameter), the whole step "
        f"{held / 1e9:.1f} GB: {'fits' if held < MEMORY else 'does not fit'} on an H100 of 80 GB."
    )


if __name__ == "__main__":
    main()
