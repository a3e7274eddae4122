"""Loops other than `fit` end where `fit` ends: same weights, scale and counters, bit for bit.

Each trains the same float16 model on the same real batches; the fourth of eight overflows, and the
scale grows before it, backs off at it, and grows again.
"""

import re
import traceback

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from oracle import few
from sklearn.datasets import load_digits

import kmp

if BACKEND == "tensorflow":
    import tensorflow as tf
elif BACKEND == "jax":
    import jax
else:
    import torch

BATCH_SIZE, BATCHES, POISONED = 32, 8, 3

# How the backend runs a step: arguments of `compile`.
MODES = {
    "tensorflow": {
        "graph": {"jit_compile": False},
        "xla": {"jit_compile": True},
        "eager": {"run_eagerly": True},
    },
    "jax": {"jit": {"jit_compile": True}, "eager": {"run_eagerly": True}},
    "torch": {"eager": {"jit_compile": False}},
}[BACKEND]

loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


INITIAL_SCALE = 2.0**12  # three growths later float16 still holds the gradients


def data():
    digits = load_digits()
    number = BATCH_SIZE * BATCHES
    x = (digits.data[:number] / 16.0).astype("float32")
    y = digits.target[:number].astype("int32")
    x[POISONED * BATCH_SIZE + 5, 20] = np.inf
    return x, y


def batches():
    x, y = data()
    rows = [slice(i, i + BATCH_SIZE) for i in range(0, len(x), BATCH_SIZE)]
    return [(x[r], y[r]) for r in rows]


def make_model(mode, kind=keras.Model):
    """Dropout and batch normalization too: their state must come out of the loop as well."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((64,))
    x = keras.layers.Dense(16, activation="relu", name="hidden")(inputs)
    x = kmp.layers.Float32BatchNormalization(name="norm")(x)
    # With a seed: without one, Keras draws from PyTorch's generator, as its shape inference does.
    x = keras.layers.Dropout(0.25, seed=1, name="dropout")(x)
    model = kind(inputs, kmp.layers.Float32OutputDense(10, name="logits")(x))
    rule = kmp.DynamicLossScale(INITIAL_SCALE, growth_interval=2)
    optimizer = kmp.scaled(keras.optimizers.Adam, rule, learning_rate=1e-2)
    model.compile(optimizer, loss=loss_of, **MODES[mode])
    optimizer.build(model.trainable_variables)  # or TensorFlow traces the step of `fit` twice
    return model


def by_fit(mode):
    model = make_model(mode)
    x, y = data()
    model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    return model


def by_train_on_batch(mode):
    model = make_model(mode)
    for x, y in batches():
        model.train_on_batch(x, y)
    return model


def by_loop_on_tensorflow(mode):
    model = make_model(mode)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = model.optimizer.scale_loss(loss_of(y, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "xla")
    for x, y in batches():
        step(tf.constant(x), tf.constant(y))
    return model


def by_loop_on_jax(mode):
    model = make_model(mode)
    optimizer = model.optimizer

    def scaled_loss(weights, others, state, x, y):
        logits, others = model.stateless_call(weights, others, x, training=True)
        return optimizer.stateless_scale_loss(state, loss_of(y, logits)), others

    def step(variables, x, y):
        weights, others, state = variables
        gradients, others = jax.grad(scaled_loss, has_aux=True)(weights, others, state, x, y)
        weights, state = optimizer.stateless_apply(state, gradients, weights)
        return weights, others, state

    if mode == "jit":
        step = jax.jit(step, donate_argnums=0)
    owners = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    variables = tuple([v.value for v in group] for group in owners)
    for x, y in batches():
        variables = step(variables, x, y)
    for group, values in zip(owners, variables, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)
    return model


def by_loop_on_torch(mode):
    model = make_model(mode)
    for x, y in batches():
        model.zero_grad()
        loss = loss_of(torch.as_tensor(y), model(x, training=True))
        model.optimizer.scale_loss(loss).backward()
        gradients = [v.value.grad for v in model.trainable_variables]
        with torch.no_grad():
            model.optimizer.apply(gradients, model.trainable_variables)
    return model


class TrainStepOnTensorFlow(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled_loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own_loss": loss}


class TrainStepOnJax(keras.Model):
    def train_step(self, state, data):
        weights, others, optimizer_variables, metrics = state
        x, y = data

        def scaled_loss(weights, others):
            logits, others = self.stateless_call(weights, others, x, training=True)
            loss = loss_of(y, logits)
            scaled = self.optimizer.stateless_scale_loss(optimizer_variables, loss)
            return scaled, (loss, others)

        gradients, (loss, others) = jax.grad(scaled_loss, has_aux=True)(weights, others)
        weights, optimizer_variables = self.optimizer.stateless_apply(
            optimizer_variables, gradients, weights
        )
        return {"own_loss": loss}, (weights, others, optimizer_variables, metrics)


class TrainStepOnTorch(keras.Model):
    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.scale_loss(loss).backward()
        gradients = [v.value.grad for v in self.trainable_variables]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"own_loss": loss}


def by_train_step(mode):
    kind = {
        "tensorflow": TrainStepOnTensorFlow,
        "jax": TrainStepOnJax,
        "torch": TrainStepOnTorch,
    }[BACKEND]
    model = make_model(mode, kind)
    x, y = data()
    history = model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    assert "own_loss" in history.history  # it is this step that ran
    return model


LOOPS = {
    "train_on_batch": by_train_on_batch,
    "train_step": by_train_step,
    "loop": {
        "tensorflow": by_loop_on_tensorflow,
        "jax": by_loop_on_jax,
        "torch": by_loop_on_torch,
    }[BACKEND],
}


def numbers(model):
    """All variables of a model and its optimizer, with its random seeds' states."""
    variables = model.trainable_variables + model.non_trainable_variables
    named = [(v.path, v) for v in variables + model.optimizer.variables]
    assert len(dict(named)) == len(named)
    return {path: ops.convert_to_numpy(v) for path, v in named}


@pytest.fixture(scope="module")
def fitted():
    """What `fit` ends with, for each mode, trained once."""
    return {}


@pytest.mark.parametrize("mode", few(MODES, "graph", "jit"))
@pytest.mark.parametrize("loop", few(LOOPS, "loop"))
def test_a_loop_ends_where_fit_does(loop, mode, fitted):
    if mode not in fitted:
        fitted[mode] = numbers(by_fit(mode))
        keras.utils.clear_session(free_memory=False)
    received, expected = numbers(LOOPS[loop](mode)), fitted[mode]
    assert received.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(received[path], value, err_msg=path)


@pytest.mark.parametrize("mode", few(MODES, "graph", "jit"))
def test_what_they_are_compared_with_did_skip_and_train(mode):
    model = by_fit(mode)
    optimizer = model.optimizer
    # Finite steps: 3 before the overflow and 4 after it; one growth, then two. In between the loss
    # is infinite: on JAX the optimizer is not told, halves the scale and counts anew.
    halving, counted = (0.5, 0) if BACKEND == "jax" else (1.0, 1)
    assert float(optimizer.dynamic_scale) == INITIAL_SCALE * 2 * halving * 2 * 2
    assert int(optimizer.steps) == BATCHES
    assert int(optimizer.skipped_steps) == 1
    assert int(optimizer.iterations) == BATCHES - 1
    assert (int(optimizer.consecutive_skips), int(optimizer.step_counter)) == (0, counted)
    trained = model.get_weights()
    keras.utils.clear_session(free_memory=False)
    fresh = make_model(mode)
    for w, start in zip(trained[:2], fresh.get_weights()[:2], strict=True):
        assert np.isfinite(w).all()
        assert np.abs(w - start).max() > 1e-2


def step_of(optimizer, variable):
    """A compiled training step on `loss = variable * x`, or an eager one."""
    if BACKEND == "tensorflow":

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(variable * x)
            optimizer.apply(tape.gradient(loss, [variable.value]), [variable])

    elif BACKEND == "jax":

        @jax.jit
        def compiled(values, state, x):
            def loss(values):
                return optimizer.stateless_scale_loss(state, values[0] * x)

            return optimizer.stateless_apply(state, jax.grad(loss)(values), values)

        def step(x):
            state = [v.value for v in optimizer.variables]
            values, state = compiled([variable.value], state, x)
            variable.assign(values[0])
            for v, value in zip(optimizer.variables, state, strict=True):
                v.assign(value)

    else:

        def step(x):
            variable.value.grad = None
            optimizer.scale_loss(variable * x).backward()
            with torch.no_grad():
                optimizer.apply([variable.value.grad], [variable])

    return step


@pytest.mark.parametrize("overflows", [0, 1, 2, 12])
def test_the_update_is_right_after_overflows_in_a_compiled_loop(overflows):
    """keras-team/keras#19244: the loss is multiplied with the scale that the step divides by."""
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=1024.0)
    variable = keras.Variable(np.float32(1.0), name="weight")
    optimizer.build([variable])
    step = step_of(optimizer, variable)
    for x in [np.inf] * overflows:
        step(ops.convert_to_tensor(x, "float32"))
    assert float(ops.convert_to_numpy(variable)) == 1.0
    step(ops.convert_to_tensor(0.25, "float32"))
    assert float(ops.convert_to_numpy(variable)) == 0.75
    # The loss is not finite either. On JAX the optimizer is not told; where it is, no scale sinks.
    sunk = 1024.0 / 2**overflows if BACKEND == "jax" else 1024.0
    assert float(optimizer.dynamic_scale) == sunk


@pytest.mark.only("tensorflow")
def test_autograph_does_not_rewrite_the_step(monkeypatch):
    """It has nothing to convert there, and takes up to 15 seconds for it in a new process."""
    stacks, blame = [], kmp.health.measure.blame

    def spy(nonfinite):
        stacks.append([frame.filename for frame in traceback.extract_stack()])
        return blame(nonfinite)

    monkeypatch.setattr(kmp.health.measure, "blame", spy)
    optimizer, variable = kmp.scaled("sgd"), keras.Variable(np.float32(1.0))
    optimizer.build([variable])
    step_of(optimizer, variable)(tf.constant(0.25))
    (files,) = stacks
    assert any("__autograph_generated_file" in file for file in files)  # the loop was converted
    assert files[-2].endswith("kmp/health/telemetry.py")  # which called `spy`


def test_the_stateless_scale_is_the_one_in_the_given_state():
    optimizer = kmp.scaled("sgd")
    optimizer.build([keras.Variable([1.0])])
    state = [v.value for v in optimizer.variables]
    place = [v is optimizer.dynamic_scale for v in optimizer.variables].index(True)
    state[place] = ops.convert_to_tensor(8.0, "float32")
    scaled = optimizer.stateless_scale_loss(state, ops.convert_to_tensor(3.0, "float16"))
    assert float(scaled) == 24.0
    assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
    assert float(optimizer.dynamic_scale) == 2.0**15


def test_the_stateless_loss_stays_as_it_is_without_a_scale():
    optimizer = kmp.scaled("sgd", "none")
    optimizer.build([keras.Variable([1.0])])
    loss = ops.convert_to_tensor(3.0)
    assert optimizer.stateless_scale_loss([v.value for v in optimizer.variables], loss) is loss


def test_a_stateless_scale_needs_a_built_optimizer():
    """Also if there is a value for each variable that it has by then."""
    optimizer = kmp.scaled("sgd")
    state = [v.value for v in optimizer.variables]
    message = f"Received: {len(state)} values for {len(state)} variables (built=False)"
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        optimizer.stateless_scale_loss(state, 1.0)
    assert "Write optimizer.build(model.trainable_variables)" in str(error.value)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_stateless_scale_needs_one_value_for_each_variable(change):
    optimizer = kmp.scaled("sgd", momentum=0.5)
    optimizer.build([keras.Variable([1.0])])
    number = len(optimizer.variables)
    state = [v.value for v in optimizer.variables] + [ops.zeros(())]
    state = state[: number + change]
    message = f"Received: {number + change} values for {number} variables (built=True)"
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.stateless_scale_loss(state, 1.0)


@pytest.mark.only("jax")
@pytest.mark.parametrize("details", [False, True])
def test_an_ensemble_steps_under_vmap(details):
    """Each copy steps as it does alone; an overflow of one skips the step of that one."""
    optimizer = kmp.scaled("adam", learning_rate=0.1)
    kernel = keras.Variable(np.ones((3, 4), "float32"))
    optimizer.build([kernel])
    optimizer.scale_loss(1.0)
    optimizer.sample_gradients(1, details=details)
    gradients = np.random.default_rng(0).normal(size=(3, 3, 4)).astype("float32")
    gradients[1, 0, 0] = np.inf

    def step(gradient, weight):
        state = [v.value for v in optimizer.variables]
        return optimizer.stateless_apply(state, [gradient], [weight])

    weight = kernel.value
    together = jax.jit(jax.vmap(step, (0, None)))(gradients, weight)
    for i, gradient in enumerate(gradients):
        alone = jax.jit(step)(gradient, weight)
        jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i], b), together, alone)
    assert (np.asarray(together[0][0]) == 1).all((1, 2)).tolist() == [False, True, False]


@pytest.mark.only("jax")
@pytest.mark.parametrize("jit", [False, True])
def test_a_step_can_be_differentiated(jit):
    """As meta-learning does: the step of SGD, whose derivative by its weight is known."""
    import jax

    optimizer = kmp.scaled("sgd", learning_rate=0.25)
    kernel = keras.Variable(np.ones(3, "float32"))
    optimizer.build([kernel])
    state = [v.value for v in optimizer.variables]

    def after(weight):
        loss = lambda w: optimizer.stateless_scale_loss(state, ops.sum(ops.square(w)))  # noqa: E731
        weights, _ = optimizer.stateless_apply(state, [jax.grad(loss)(weight)], [weight])
        return ops.sum(weights[0])

    gradient = jax.grad(after)
    derivative = (jax.jit(gradient) if jit else gradient)(kernel.value)
    np.testing.assert_array_equal(derivative, np.full(3, 1 - 0.25 * 2))
