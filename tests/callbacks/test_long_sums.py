"""Sums of half precision in a watched `fit` on JAX are rounded once, at their end.

XLA's CPU compiler rounds them after each number, so that a sum of ones stalls. The oracle is the
number of ones, or the float32 model.
"""

import functools

import jax
import keras
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from keras import layers, ops

import kmp
from kmp._backend.jax.sums import sums_in_float32

pytestmark = pytest.mark.only("jax")
ONES = 4096


def convolution():
    return layers.Conv2D(4, 3, kernel_initializer="zeros", padding="same"), (64, 64, 1)


def dense():
    return layers.Dense(4, kernel_initializer="zeros"), (32, 128, 1)


class Own(layers.Layer):
    """What code of one's own may do: multiply by a vector, and look up."""

    def __init__(self, call, shape, **kwargs):
        super().__init__(**kwargs)
        self.compute, self.of = call, shape

    def build(self, shape):
        self.weight = self.add_weight(shape=self.of, initializer="zeros", name="weight")

    def call(self, x):
        return self.compute(x, self.weight)


def gain():
    return Own(lambda x, gain: (x + 1) * gain, (4,)), (32, 128, 4)


def table():
    look_up = lambda x, table: ops.take(table, ops.cast(x, "int32"), axis=0)  # noqa: E731
    return Own(look_up, (2, 4)), (ONES,)


def in_a_scan():
    def scan(x, gain):
        return ops.scan(lambda carry, each: (carry, (each + 1) * gain), 0.0, x)[1]

    return Own(scan, (4,)), (32, 128, 4)


def in_a_recomputed_block():
    block = keras.Sequential([layers.Dense(4, kernel_initializer="zeros")])
    block.build((None, 32, 128, 1))
    return block, (32, 128, 1)


MADE = [convolution, dense, gain, table, in_a_scan, in_a_recomputed_block]


def scaled_by_1(optimizer):
    return kmp.scaled(optimizer, kmp.DynamicLossScale(initial_scale=1.0))


def moved(make, policy="mixed_bfloat16", callbacks=True, scaled=scaled_by_1, **compiled):
    """How far one step of SGD moves each weight, in ones: 4096 for each position."""
    keras.config.set_dtype_policy(policy)
    layer, shape = make()
    model = keras.Sequential([keras.Input(shape), layer])
    if make is in_a_recomputed_block:
        kmp.recompute(model, lambda each, path: each is layer)
    model.add(layers.Activation("linear", dtype="float32"))
    optimizer = scaled(keras.optimizers.SGD(1.0))
    model.compile(optimizer, lambda _, y: ops.sum(y), jit_compile=True, **compiled)
    callbacks = [kmp.callbacks.TerminateOnNaN()] if callbacks else []
    x = np.zeros((1, *shape), "float32")
    model.fit(x, np.zeros((1, 1)), verbose=0, callbacks=callbacks)
    return [float(-ops.convert_to_numpy(v).min()) for v in layer.trainable_variables]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("make", MADE)
def test_all_positions_count(make, policy):
    assert moved(make, policy)[-1] == ONES


@pytest.mark.parametrize("make", [convolution, dense, table])
def test_keras_still_loses_most(make):
    assert moved(make, callbacks=False)[-1] <= ONES / 4


def test_an_optimizer_that_scales_nothing_has_them_too():
    assert moved(convolution, scaled=lambda optimizer: optimizer)[-1] == ONES


def test_several_steps_of_one_program():
    assert moved(convolution, steps_per_execution=2)[-1] == ONES


def nested(x):
    """A sum in each kind of program that JAX has within another."""

    def total(x):
        return lax.reduce(x, np.zeros((), x.dtype), lax.add, (0, 1))

    @jax.custom_jvp
    def own(x):
        return total(x)

    own.defjvps(None)
    return {
        "jit": jax.jit(total)(x),
        "checkpoint": jax.checkpoint(total)(x),
        "cond": lax.cond(x[0, 0] > 0, total, lambda x: x[0, 0], x),
        "scan": lax.scan(lambda carry, _: (carry + total(x) / ONES, None), x[0, 0], length=2)[0],
        "while": lax.while_loop(lambda c: c < 2, lambda c: c + total(x), x[0, 0] * 0),
        "own": own(x),
        "windows": lax.reduce_window(x, np.zeros((), x.dtype), lax.add, x.shape, (1, 1), "VALID")[
            0, 0
        ],
        "by index": jnp.zeros((2,), x.dtype).at[jnp.zeros(x.size, "int32")].add(x.reshape(-1))[0],
        "none": None,
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sums_within_other_programs(dtype):
    x = jnp.ones((32, ONES // 32), dtype)
    found = jax.jit(sums_in_float32(nested))(x)
    expected = dict.fromkeys(found, ONES) | {"scan": 3, "none": None}
    assert {k: y if y is None else float(y) for k, y in found.items()} == expected
    assert {y.dtype.name for y in found.values() if y is not None} == {dtype}


def test_a_program_without_such_sums_stays_the_same():
    """JAX compiles what it has compiled once, and no second program."""
    inner = jax.jit(lambda x: jnp.sum(x) * 2)

    def programs(function):
        equations = jax.make_jaxpr(function)(jnp.ones(4)).jaxpr.eqns
        return [id(each.params["jaxpr"]) for each in equations if "jaxpr" in each.params]

    assert programs(inner) == programs(sums_in_float32(inner)) != []


def test_arguments_and_results_keep_their_structure():
    def step(state, data):
        return {"loss": state[0][0] + data["x"]}, (state[1], [None, *state[0]])

    given = ([1.0], (jnp.ones(2),)), {"x": jnp.ones((), "bfloat16"), "y": None}
    exact, plain = (jax.jit(each)(*given) for each in (sums_in_float32(step), step))
    assert jax.tree.structure(exact) == jax.tree.structure(plain)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), exact, plain)
