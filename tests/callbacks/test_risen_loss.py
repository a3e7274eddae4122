"""Training that has made the model worse than it was, although everything is finite."""

import math

import keras
import numpy as np
import pytest
from linear_runs import SPE
from reports import Told, look_at

import kmp
from kmp.callbacks.verdict.large_steps import RisenLoss
from kmp.callbacks.verdict.observation import Weight
from kmp.health.details import BINS, COLUMNS


def fit(rate, optimizer="adagrad", outliers=False, spe=1):
    """Two epochs of 40 steps; targets that may have rare outliers, none in the first batch."""
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(8, "tanh") for _ in range(2)]
    model = keras.Sequential([keras.Input((4,)), *dense, keras.layers.Dense(1)])
    model.compile(kmp.scaled(optimizer, learning_rate=rate), "mse", steps_per_execution=spe)
    x = np.random.default_rng(0).normal(size=(320, 4)).astype("float32")
    y = np.tanh(x.sum(axis=1, keepdims=True))
    if outliers:
        y[8::20] *= 30
    watch = kmp.callbacks.GradientHealth()
    past = model.fit(
        x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[watch]
    ).history
    return watch.verdict, past["loss"]


@pytest.mark.filterwarnings("ignore:Step")
@pytest.mark.parametrize("spe", SPE)
def test_a_learning_rate_that_is_far_too_high(spe):
    """All is finite, and updates are of the usual size, since Adagrad has seen large gradients."""
    verdict, losses = fit(100.0, spe=spe)
    assert math.isfinite(losses[-1]) and losses[-1] > 10, losses
    assert verdict.state == "UNSTABLE" and "above that of the first batch" in str(verdict)
    assert "times as large as when fit began" in verdict.reason


@pytest.mark.filterwarnings("ignore:Step")
def test_a_cross_entropy_hardly_rises():
    """Guesses of four classes, however sure, cost little more than those of the first batch."""
    verdicts = []
    for rate in (0.1, 0.003):
        keras.utils.set_random_seed(0)
        dense = [keras.layers.Dense(32, "tanh") for _ in range(3)]
        model = keras.Sequential([keras.Input((8,)), *dense, keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(kmp.scaled("adamw", learning_rate=rate), loss)
        random = np.random.default_rng(0)
        x, y = random.normal(size=(640, 8)).astype("float32"), random.integers(0, 4, 640)
        watch = kmp.callbacks.GradientHealth()
        past = model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[watch]).history
        verdicts.append(watch.verdict)
    assert past["loss"][-1] < 1.5
    assert [x.state for x in verdicts] == ["UNSTABLE", "HEALTHY"], list(map(str, verdicts))
    assert "as when fit began, and a step changes the weights" in verdicts[0].reason


def test_the_same_at_a_usual_one():
    verdict, losses = fit(0.05)
    assert verdict.state == "HEALTHY" and losses[1] < losses[0], str(verdict)


@pytest.mark.parametrize("optimizer, rate", [("sgd", 0.001), ("adam", 0.01)])
def test_outliers_that_the_first_batch_has_not(optimizer, rate):
    verdict, losses = fit(rate, optimizer=optimizer, outliers=True)
    plain, _ = fit(rate, optimizer=optimizer)
    assert losses[-1] > 10 and verdict.state == plain.state == "HEALTHY", str(verdict)


@pytest.mark.parametrize(
    "loss, first, grown, share, step, state",
    [
        (1.6, 1.0, 4.0, 1e-3, 10, "UNSTABLE"),
        (1.1, 1.0, 4.0, 0.02, 10, "UNSTABLE"),  # a loss that is bounded rises little
        (1.1, 1.0, 4.0, 0.009, 99, "HEALTHY"),
        (1.4, 1.0, 4.0, 1e-3, 99, "HEALTHY"),  # about as high: the batches may differ
        (9.0, 1.0, 2.0, 1e-3, 99, "HEALTHY"),  # the weights have not grown
        (1.1, 1.0, 1.3, 0.05, 20, "UNSTABLE"),
        (1.1, 1.0, 1.3, 0.05, 19, "HEALTHY"),  # weights that began at zero may still be small
        (1.1, 1.0, 1.3, 0.02, 20, "HEALTHY"),
        (1.1, 1.0, 1.7, 0.02, 99, "HEALTHY"),  # as momentum does in sound runs on small batches
        (1.9, 1.0, 0.9, 0.17, 20, "HEALTHY"),  # few rows in a batch, the first of which were easy
        (0.9, 1.0, 9.0, 0.50, 99, "HEALTHY"),
        (9.0, -1.0, 9.0, 0.50, 99, "HEALTHY"),  # such a loss has no zero to be compared with
        (9.0, math.nan, 9.0, 0.50, 99, "HEALTHY"),
        (math.inf, 1.0, 9.0, 0.50, 99, "HEALTHY"),  # other detectors tell more
        (None, 1.0, 9.0, 0.50, 99, "HEALTHY"),  # within an epoch
    ],
)
def test_where_it_turns(loss, first, grown, share, step, state):
    """The growth is the median of three kernels, of which one began at zero."""
    paths = [f"layer_{i}/kernel" for i in range(3)]
    details = np.zeros((3, len(COLUMNS) + BINS), "float32")
    details[:, COLUMNS.index("weight_norm")] = grown
    details[:, COLUMNS.index("update_norm")] = grown * share
    health = np.ones((3, 5), "float32")
    report = kmp.GradientReport(tuple(paths), health, 1024.0, step, 0, 0, details=details)
    run = Told(first_loss=first, first_norms=dict(zip(paths, [1.0, 1.0, 0.0], strict=True)))
    weights = {x: Weight(x) for x in paths}
    losses = None if loss is None else {"loss": loss}
    verdict = RisenLoss().see(look_at(report, run=run, weights=weights, losses=losses))
    assert (verdict.state if verdict else "HEALTHY") == state, str(verdict)
