"""The loss of an epoch and those of its steps, with any of the callbacks."""

import contextlib
import functools

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from linear_runs import JIT, RATE, SPE, data, fit, last_progress, linear_model

import kmp
from kmp.callbacks.loss_tracker import RECENT

pytestmark = pytest.mark.slow

CALLBACKS = [
    kmp.callbacks.GradientHealth,
    kmp.callbacks.DivergenceGuard,
    kmp.callbacks.TerminateOnNaN,
]


@functools.cache  # several tests ask for the same
def losses_without(poisoned, epochs, metrics=None):
    """The epochs' losses when the poisoned batches, a tuple, had never been there."""
    x, y = data()
    keep = np.setdiff1d(np.arange(48), [4 * b + i for b in poisoned for i in range(4)])
    model = linear_model(metrics=metrics and list(metrics))
    model.optimizer.build(model.trainable_variables)  # or TensorFlow traces the step twice
    fixed = {"batch_size": 4, "shuffle": False, "verbose": 0}
    return model.fit(x[keep], y[keep], epochs=epochs, **fixed).history


@pytest.mark.filterwarnings("ignore:Step")
@pytest.mark.parametrize("callback", CALLBACKS)
@pytest.mark.parametrize("spe", SPE)
def test_the_loss_is_the_mean_of_the_steps_that_counted(callback, spe):
    model = linear_model(steps_per_execution=spe, metrics=["mae"])
    history = fit(model, [callback()], poisoned=[5], epochs=2)
    expected = losses_without((5,), 2, ("mae",))
    # Sums of the same 11 numbers in float32, in the same order.
    np.testing.assert_array_equal(history["loss"], expected["loss"])
    np.testing.assert_array_equal(history["mae"], expected["mae"])
    assert history["skipped_steps"] == [1, 2]


@pytest.mark.filterwarnings("ignore:Step")
@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_first_step_that_is_skipped_leaves_no_metric(callback):
    """Nor one that is only built in it, as in eager mode on TensorFlow."""
    model = linear_model(metrics=["mae"], run_eagerly=BACKEND == "tensorflow")
    history = fit(model, [callback()], poisoned=[0])
    assert history["mae"] == losses_without((0,), 1, ("mae",))["mae"]


def test_an_optimizer_that_does_not_measure_is_watched_too():
    sgd = keras.optimizers.SGD(RATE)
    optimizer = kmp.LossScaleOptimizer(
        sgd, loss_scale=kmp.DynamicLossScale(64.0), measure_gradients=False
    )
    model = linear_model(optimizer)
    history = fit(model, [kmp.callbacks.TerminateOnNaN()], poisoned=[5])
    assert history["skipped_steps"] == [1]
    # The loss itself was not finite: no scale is to blame.
    assert float(ops.convert_to_numpy(optimizer.dynamic_scale)) == 64.0


@pytest.mark.quick
def test_a_first_step_that_finds_the_scale_counts():
    """Keras's TerminateOnNaN would otherwise stop the run."""
    rule = kmp.DynamicLossScale(2.0**100, max_scale=2.0**100)
    model = linear_model(kmp.scaled("sgd", rule, learning_rate=RATE))
    x, y = data(steps=1)
    fixed = {"batch_size": 4, "verbose": 0}
    y = y + np.float32(2.0**30)
    stop = keras.callbacks.TerminateOnNaN()
    history = model.fit(x, y, callbacks=[kmp.callbacks.TerminateOnNaN(), stop], **fixed).history
    assert history["skipped_steps"] == [1]
    assert history["loss"] == [float(np.mean(np.square(y)))]


@pytest.mark.quick
def test_an_epoch_without_a_finite_loss_is_nan():
    history = fit(linear_model(), [kmp.callbacks.DivergenceGuard()], poisoned=range(12))
    assert np.isnan(history["loss"]).all() and history["skipped_steps"] == [12]


def test_with_an_optimizer_that_skips_nothing_nan_stays_nan():
    history = fit(linear_model("sgd"), [kmp.callbacks.DivergenceGuard()], poisoned=[5])
    assert np.isnan(history["loss"]).all() and "skipped_steps" not in history


def test_keras_own_loss_scaling_has_its_nan_left_out():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE))
    history = fit(linear_model(optimizer), [kmp.callbacks.DivergenceGuard()], poisoned=[5])
    np.testing.assert_array_equal(history["loss"], losses_without((5,), 1)["loss"])


@pytest.mark.parametrize("spe", SPE)
@pytest.mark.parametrize("jit", JIT)
def test_each_recent_loss_is_kept(spe, jit):
    model = linear_model(steps_per_execution=spe, jit_compile=jit)
    model.optimizer.learning_rate = 0.0
    fit(model, [kmp.callbacks.TerminateOnNaN()], poisoned=[3, 6, 11], epochs=2)
    progress = last_progress(model)
    _, y = data()
    each = np.square(y).reshape(12, 4).mean(axis=1)[[0, 1, 2, 4, 5, 7, 8, 9, 10]]
    np.testing.assert_array_equal(progress.recent[:18], np.tile(each, 2))
    assert (progress.seen_steps, progress.step, progress.counted_steps) == (24, 24, 18)
    assert (progress.skipped_steps, progress.consecutive_skips) == (6, 1)
    assert progress.nonfinite_losses == 1
    assert progress.mean_loss_since(16) == np.float32(each[-2:].mean())
    assert progress.mean_loss_since(18) is None


def test_more_losses_than_stay_readable():
    model = linear_model()
    fit(model, [kmp.callbacks.TerminateOnNaN()], steps=RECENT + 3)
    progress = last_progress(model)
    assert progress.counted_steps == RECENT + 3
    assert progress.mean_loss_since(0) == float(progress.recent.mean())
    np.testing.assert_array_equal(
        progress.mean_loss_since(RECENT - 1),
        np.float32(np.mean(progress.recent[[RECENT - 1, 0, 1, 2]])),
    )


def test_each_look_is_one_transfer(monkeypatch):
    model = linear_model()
    fit(model, [kmp.callbacks.TerminateOnNaN()])
    transfers = []

    def convert(x):
        transfers.append(x)
        return np.asarray(x)

    monkeypatch.setattr(ops, "convert_to_numpy", convert)
    assert last_progress(model).seen_steps == 12
    assert len(transfers) == 1


@pytest.mark.parametrize("other", ["sgd", lambda: kmp.scaled("sgd")], ids=["bare", "kmp"])
def test_compiling_anew_with_another_optimizer(other):
    model = linear_model("adam")
    fit(model, [kmp.callbacks.DivergenceGuard()])
    model.compile(other() if callable(other) else other, loss="mse")
    history = fit(model, [kmp.callbacks.DivergenceGuard()], poisoned=[5])
    assert np.isnan(history["loss"]).all() == (other == "sgd")


def test_evaluation_hides_nothing_and_files_load_without_kmp(tmp_path):
    model = linear_model()
    fit(model, [kmp.callbacks.TerminateOnNaN()])
    x, y = data(poisoned=[2])
    assert not np.isfinite(model.evaluate(x, y, verbose=0))
    assert last_progress(model).seen_steps == 12
    model.save_weights(tmp_path / "model.weights.h5")
    plain = linear_model()
    plain.optimizer.build(plain.trainable_variables)
    plain.load_weights(tmp_path / "model.weights.h5")
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.only("tensorflow")
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("jit", [False, True])
def test_the_end_of_data_of_unknown_length_is_no_step(jit):
    """There TensorFlow's loop runs a step whose data do not come."""
    import tensorflow as tf

    unknown = tf.data.Dataset.from_tensor_slices(data()).filter(lambda x, y: True).batch(4)
    model, guard = linear_model(jit_compile=jit), kmp.callbacks.TerminateOnNaN()
    model.fit(unknown, epochs=3, shuffle=False, verbose=0, callbacks=[guard])
    progress = last_progress(model)
    assert (progress.step, progress.seen_steps, progress.counted_steps) == (36, 36, 36)


@pytest.mark.only("tensorflow")  # elsewhere Keras itself refuses such a model
@pytest.mark.filterwarnings("ignore:Step", "ignore:.* sees no loss")
@pytest.mark.parametrize("callback", CALLBACKS)
def test_a_model_without_a_call_of_its_own(callback):
    class Model(keras.Model):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def train_step(self, data):
            return self.part.train_step(data)

    part = linear_model()
    model = Model(part)
    model.compile(part.optimizer)
    history = fit(model, [callback()], poisoned=[0], epochs=2)
    assert history["skipped_steps"] == [1, 2] and not model.built


def test_a_model_that_is_compiled_anew_is_traced_anew():
    """JAX would find the step with the old loss, as its inputs have the same shapes."""
    x, y = np.ones((4, 2), "float32"), np.full((4, 1), 5, "float32")
    model = linear_model(kmp.scaled("sgd", learning_rate=0.0))
    losses = []
    for loss in ("mse", "mae"):
        model.compile(kmp.scaled("sgd", learning_rate=0.0), loss=loss)
        history = model.fit(x, y, verbose=0, callbacks=[kmp.callbacks.TerminateOnNaN()])
        losses += history.history["loss"]
    assert losses == [25.0, 5.0]


def test_sparse_gradients_under_accumulation():
    """An embedding's gradient has no static shape on TensorFlow, and under accumulation Keras
    computes `iterations` from a variable that JAX has in its loop."""
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(5, 2)])
    model.compile(kmp.scaled("sgd", gradient_accumulation_steps=2), "mse")
    health = kmp.callbacks.GradientHealth(update_freq=1)
    callbacks = [health, kmp.callbacks.DivergenceGuard(update_freq=1)]
    x = np.tile(np.arange(3, dtype="int32"), (16, 1))
    model.fit(x, np.ones((16, 3, 2)), batch_size=4, verbose=0, callbacks=callbacks)
    assert health.report.step == 4 and int(model.optimizer.iterations) == 2
    # Rows that no batch has asked for: two of five.
    assert list(health.report.column("zero_share").values()) == [np.float32(0.4)]


@contextlib.contextmanager
def nan_finder():
    """What a backend has itself to stop at inf and NaN."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tf.debugging.enable_check_numerics()
        try:
            yield
        finally:
            tf.debugging.disable_check_numerics()
    elif BACKEND == "jax":
        import jax

        with jax.debug_nans(True), jax.debug_infs(True):
            yield
    else:
        import torch

        with torch.autograd.detect_anomaly(check_nan=True):
            yield


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_the_nan_finder_of_a_backend_finds_nothing_in_a_sound_run():
    x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd"), "mse", jit_compile=False)
    with nan_finder():
        history = model.fit(x, x[:, :1], callbacks=[kmp.callbacks.GradientHealth()], verbose=0)
    assert np.isfinite(history.history["loss"]).all()
