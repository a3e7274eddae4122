"""Weights that decay has taken to nothing."""

import keras
import numpy as np
import pytest

import kmp


def fit(weight_decay, initializer="glorot_uniform"):
    """120 steps with labels that are noise."""
    keras.utils.set_random_seed(0)
    second = keras.layers.Dense(8, kernel_initializer=initializer)
    layers = [keras.layers.Dense(8, "tanh"), second, keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    adam = keras.optimizers.AdamW(0.01, weight_decay=weight_decay)
    model.compile(kmp.scaled(adam), "mse")
    x, y = np.random.default_rng(0).normal(size=(2, 480, 4)).astype("float32")
    watch = kmp.callbacks.GradientHealth()
    model.fit(x, y[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[watch])
    return model, watch.verdict


@pytest.mark.filterwarnings("ignore:Step 100. gradient norm below")
def test_weights_that_have_decayed_to_nothing():
    with pytest.warns(
        kmp.PrecisionWarning, match="STALLED in .*/kernel: 3 of 3 weights, biases as"
    ):
        model, verdict = fit(weight_decay=20.0)
    assert max(np.linalg.norm(layer.get_weights()[0]) for layer in model.layers) < 1e-6
    assert verdict.state == "STALLED" and "Weight decay" in verdict.advice


@pytest.mark.parametrize("initializer", ["glorot_uniform", "zeros"])
def test_weight_decay_of_the_usual_size_is_sound(initializer):
    assert fit(weight_decay=0.1, initializer=initializer)[1].state == "HEALTHY"
