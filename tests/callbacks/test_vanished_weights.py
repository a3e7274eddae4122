"""Weights that decay has taken to nothing."""

import keras
import numpy as np
import pytest
from reports import look_at

import kmp
from kmp.callbacks.verdict.observation import Weight
from kmp.callbacks.verdict.stalled import VanishedWeights
from kmp.health.details import BINS, COLUMNS


def fit(weight_decay, initializer="glorot_uniform"):
    """Two epochs of 120 steps with labels that are noise."""
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


@pytest.mark.parametrize(
    "norms, state",
    [
        ([1e-7, 1.0], "STALLED"),  # half of them
        ([1e-7, 1.0, 1.0], "HEALTHY"),
        ([0.0, 0.0, 1.0], "HEALTHY"),  # they began at zero: that is another matter
        ([1e-5, 1e-5], "HEALTHY"),
    ],
)
def test_half_of_the_matrices_must_have_decayed(norms, state):
    """Biases do not count."""
    paths = [f"layer_{i}/kernel" for i in range(len(norms))] + ["layer/bias"]
    details = np.zeros((len(paths), len(COLUMNS) + BINS), "float32")
    details[:, COLUMNS.index("weight_norm")] = [*norms, 1e-9]
    health = np.ones((len(paths), 5), "float32")
    report = kmp.GradientReport(tuple(paths), health, 1024.0, 200, 0, 0, details=details)
    weights = {x: Weight(x, "float32", is_matrix="kernel" in x) for x in paths}
    verdict = VanishedWeights().see(look_at(report, weights=weights))
    assert (verdict.state if verdict else "HEALTHY") == state, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("initializer", ["glorot_uniform", "zeros"])
def test_weight_decay_of_the_usual_size_is_sound(initializer):
    assert fit(weight_decay=0.1, initializer=initializer)[1].state == "HEALTHY"
