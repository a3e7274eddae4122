"""The first epoch of a model that its first step builds, as on TensorFlow: watched as any other."""

import math

import keras
import numpy as np
import pytest
from keras import ops

import kmp
from kmp.callbacks import GradientHealth
from kmp.health.telemetry import NO_SAMPLING

pytestmark = pytest.mark.filterwarnings("ignore:Step", "ignore:float16 without")


def watched_run(built, steps, update_freq=10, epochs=1, layers=8, **arguments):
    """Gradients shrink from layer to layer, and float16 without a scale loses their bits."""
    keras.utils.set_random_seed(0)
    dense = {"use_bias": False, "kernel_initializer": "ones", "activation": "sigmoid"}
    chain = [keras.layers.Dense(1, dtype="mixed_float16", **dense) for _ in range(layers)]
    model = keras.Sequential([keras.Input((1,))] * built + chain)
    model.compile(kmp.scaled("sgd", "none", learning_rate=1e-3), "mse", **arguments)
    watch = GradientHealth(update_freq=update_freq, logs="all")
    data = np.ones((steps, 1))
    past = model.fit(data, data, batch_size=1, epochs=epochs, verbose=0, callbacks=[watch])
    return past.history, watch, model


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 25])
@pytest.mark.parametrize("update_freq", [10, "epoch"])
def test_the_first_epoch_has_details_whatever_builds_the_model(steps, update_freq):
    for built in (True, False):
        history, watch, model = watched_run(built, steps, update_freq)
        assert history["verdict"] == ["UNDERFLOW"], str(watch.verdict)
        assert watch.report.details is not None and math.isfinite(history["update_ratio"][0])
        assert history["degraded_share"][0] > 0.1
        sampling = ops.convert_to_numpy(model.optimizer.telemetry.sampling)
        assert sampling.tolist() == [0, 0, steps, steps]  # as before `fit`, but for the notes


def test_a_run_that_builds_nothing_leaves_nothing_behind():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd"), "mse")
    watch = GradientHealth()
    stop = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0, callbacks=[watch, stop])
    watch.on_train_end()
    assert model.optimizer.first_sampling == NO_SAMPLING
