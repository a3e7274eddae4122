"""Whether an optimizer is built in the first step or before it, it trains the same, bit for bit.

On TensorFlow a function that creates variables is traced a second time, which takes the time of
tracing again. A model that kmp protects is built before its step is traced, and traced once.
"""

import functools

import keras
import numpy as np
import pytest
from keras import ops
from oracle import few

import kmp
from kmp.scaling.step import ScaledStep

JIT = {"tensorflow": [False, True], "jax": [True], "torch": [False]}[keras.backend.backend()]

X = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(32, 2)).astype("float32")

# Policy, inner optimizer, and arguments of `kmp.scaled`.
OPTIMIZERS = {
    "mixed_float16": ("mixed_float16", lambda: keras.optimizers.Nadam(0.125), {}),
    "half_memory": ("bfloat16", lambda: keras.optimizers.Adam(0.125), {}),
    "master_weights": ("bfloat16", lambda: keras.optimizers.Adam(0.125), {"master_weights": True}),
    "drop_window": (
        "mixed_float16",
        lambda: keras.optimizers.SGD(0.125, momentum=0.5, gradient_accumulation_steps=2),
        {"on_overflow": "drop_window"},
    ),
    "moving_average": (
        "mixed_float16",
        lambda: keras.optimizers.Adam(0.125, use_ema=True, ema_overwrite_frequency=2),
        {},
    ),
}
# What is made in the first step is made while it is traced, before XLA has anything to compile: on
# TensorFlow one of each policy goes through XLA. The settings of the others are run inside XLA by
# tests/test_contract.py and tests/half_memory/test_updates.py.
CASES = [
    (kind, jit)
    for kind in OPTIMIZERS
    for jit in JIT
    if jit == JIT[0] or kind in ("mixed_float16", "half_memory")
]


class SlowWeights(keras.optimizers.SGD):
    """An optimizer whose slots begin as copies of the weights."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.slow = [
            self.add_variable_from_reference(
                v, "slow", initializer=lambda shape, dtype, v=v: ops.copy(v.value)
            )
            for v in variables
        ]


def make_model(kind, jit=False, input_shape=True, metrics=()):
    keras.utils.set_random_seed(7)
    policy, inner, arguments = OPTIMIZERS[kind]
    first = [keras.Input((3,))] if input_shape else []
    layers = [keras.layers.Dense(4, dtype=policy), keras.layers.Dense(2, dtype=policy)]
    model = keras.Sequential([*first, *layers])
    rule = kmp.DynamicLossScale(1024.0, growth_interval=2)
    optimizer = kmp.scaled(inner(), rule, **arguments)
    model.compile(optimizer, "mse", metrics=list(metrics), jit_compile=jit)
    return model


def fit(model, watched=False):
    callbacks = [kmp.callbacks.GradientHealth()] if watched else []
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)


def trained(model):
    """Every number of the model and of its optimizer."""
    assert float(model.optimizer.dynamic_scale) > 1024.0  # not as it was while the step was traced
    return [ops.convert_to_numpy(v) for v in [*model.variables, *model.optimizer.variables]]


@functools.cache
def built_before(kind, jit, watched):
    """What both kinds of models are compared with."""
    model = make_model(kind, jit)
    model.optimizer.build(model.trainable_variables)
    fit(model, watched)
    return trained(model)


@pytest.mark.slow
@pytest.mark.parametrize("input_shape", [True, False], ids=["built", "not_built"])
@pytest.mark.parametrize("watched", [False, True], ids=["bare", "watched"])
@pytest.mark.parametrize(
    "case",
    few(CASES, *[case for case in CASES if case[0] == "mixed_float16"]),
    ids=lambda case: f"{case[0]}-{'xla' if case[1] else 'graph'}",
)
def test_trains_as_if_it_had_been_built_before(case, watched, input_shape):
    kind, jit = case
    model = make_model(kind, jit, input_shape)
    fit(model, watched)
    for got, expected in zip(trained(model), built_before(kind, jit, watched), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("input_shape", [True, False], ids=["built", "not_built"])
@pytest.mark.parametrize("jit", JIT, ids=lambda jit: "xla" if jit else "graph")
def test_a_watched_model_with_metrics_is_traced_once(jit, input_shape, monkeypatch):
    traces = []
    run = ScaledStep.run
    monkeypatch.setattr(ScaledStep, "run", lambda self, *args: (traces.append(1), run(self, *args)))
    fit(make_model("mixed_float16", jit, input_shape, metrics=["mae"]), watched=True)
    assert len(traces) == 1


@pytest.mark.parametrize("input_shape", [True, False], ids=["built", "not_built"])
def test_slots_that_begin_as_the_weights_do(input_shape):
    starts = []
    # Keras 3.16's own optimizer begins slots as empty arrays if `fit` builds the model on
    # TensorFlow: what kmp is compared with is built before.
    for wrapped, built in ((lambda inner: inner, True), (kmp.scaled, input_shape)):
        model = make_model("mixed_float16", input_shape=built)
        inner = SlowWeights(0.125)
        model.compile(wrapped(inner), "mse", jit_compile=JIT[0])
        fit(model, watched=wrapped is kmp.scaled)
        starts.append([ops.convert_to_numpy(v) for v in inner.slow])
    for got, expected in zip(*starts, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert np.any(starts[0][0])
