"""TensorFlow traces the first step once: what the optimizer creates in it asks for no second trace.

Plain Keras is traced twice, which takes the time of tracing twice over. Built in the step or before
it, an optimizer trains the same, bit for bit.
"""

import keras
import numpy as np
import pytest
from keras import ops

import kmp
from kmp.scaling.step import ScaledStep

pytestmark = pytest.mark.only("tensorflow")

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


class SlowWeights(keras.optimizers.SGD):
    """An optimizer whose slots begin as copies of the weights."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.slow = [
            self.add_variable_from_reference(
                v, "slow", initializer=lambda shape, dtype, v=v: ops.convert_to_tensor(v.value)
            )
            for v in variables
        ]


@pytest.fixture
def traces(monkeypatch):
    """A list that grows by one whenever a step is traced."""
    seen = []
    run = ScaledStep.run
    monkeypatch.setattr(ScaledStep, "run", lambda self, *args: (seen.append(1), run(self, *args)))
    return seen


def make_model(kind, jit, input_shape=True, metrics=()):
    keras.utils.set_random_seed(7)
    policy, inner, arguments = OPTIMIZERS[kind]
    first = [keras.Input((3,))] if input_shape else []
    layers = [keras.layers.Dense(4, dtype=policy), keras.layers.Dense(2, dtype=policy)]
    model = keras.Sequential([*first, *layers])
    optimizer = kmp.scaled(inner(), **arguments)
    model.compile(optimizer, "mse", metrics=list(metrics), jit_compile=jit)
    return model


def fit(model, **arguments):
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, **arguments)


def assert_same(one, other):
    assert float(one.optimizer.iterations) > 0
    values = [[*m.variables, *m.optimizer.variables] for m in (one, other)]
    for got, expected in zip(*values, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(got), ops.convert_to_numpy(expected))


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fit_traces_once_and_trains_as_if_it_had_been_built_before(kind, jit, traces):
    model, before = make_model(kind, jit), make_model(kind, jit)
    before.optimizer.build(before.trainable_variables)
    fit(model)
    assert len(traces) == 1
    fit(before)
    assert_same(model, before)


def test_a_watched_model_with_metrics_is_traced_once(traces):
    model = make_model("mixed_float16", False, metrics=["mae"])
    fit(model, callbacks=[kmp.callbacks.GradientHealth()])
    assert len(traces) == 1


@pytest.mark.parametrize("watched", [False, True], ids=["bare", "watched"])
@pytest.mark.parametrize("kind", ["mixed_float16", "master_weights"])
def test_a_model_that_the_step_itself_builds_trains_the_same(kind, watched):
    model, built = make_model(kind, False, input_shape=False), make_model(kind, False)
    assert not model.variables
    for each in (model, built):
        fit(each, callbacks=[kmp.callbacks.GradientHealth()] if watched else [])
    assert_same(model, built)


@pytest.mark.parametrize("input_shape", [True, False], ids=["built", "not_built"])
def test_slots_that_begin_as_the_weights_do(input_shape):
    starts = []
    for wrapped in (lambda inner: inner, kmp.scaled):
        model = make_model("mixed_float16", False, input_shape=input_shape)
        inner = SlowWeights(0.125)
        model.compile(wrapped(inner), "mse", jit_compile=False)
        fit(model)
        starts.append([ops.convert_to_numpy(v) for v in inner.slow])
    for got, expected in zip(*starts, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert np.any(starts[0][0])


def test_a_function_of_ones_own_is_traced_once_and_a_creator_of_ones_own_still_creates():
    import tensorflow as tf

    model = make_model("mixed_float16", False)
    traced, created, loss_of = [], [], keras.losses.MeanSquaredError()

    @tf.function
    def step(x, y):
        traced.append(1)
        with tf.GradientTape() as tape:
            loss = model.optimizer.scale_loss(loss_of(y, model(x)))
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, [w.value for w in weights]), weights)

    step(X, Y)
    step(X, Y)
    assert len(traced) == 1

    def creator(next_creator, **arguments):
        created.append(1)
        return next_creator(**arguments)

    with tf.variable_creator_scope(creator):
        keras.Variable(0.0)
    assert created
