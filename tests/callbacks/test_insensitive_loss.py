"""Runs whose loss hardly depends on the weights; tests/advice.py trains some and cures them."""

import math

import keras
import numpy as np
import pytest
from reports import look_at

import kmp
from kmp.callbacks.verdict.observation import Weight
from kmp.callbacks.verdict.stalled import InsensitiveLoss
from kmp.health.details import BINS, COLUMNS

PATHS = ("a", "b")
WEIGHTS = {path: Weight(path) for path in PATHS}
LOSSES = [1.0, 1.5, 2.0]  # of nine of them the middle half is 1 wide
SMALL = 4e-5  # the gradient of each of two weights of size 1


def look(step, gradients, losses=LOSSES, sizes=(1.0, 1.0)):
    matrix = np.zeros((2, 5), "float32")
    matrix[:, 0] = gradients
    details = None
    if sizes:
        details = np.zeros((2, len(COLUMNS) + BINS), "float32")
        details[:, COLUMNS.index("weight_norm")] = sizes
    report = kmp.GradientReport(PATHS, matrix, 1.0, step, 0, 0, details=details)
    return look_at(report, weights=WEIGHTS, new_losses=losses)


def verdicts(*looks):
    detector = InsensitiveLoss()
    return [bool(detector.see(each)) for each in looks]


def test_three_looks_over_twenty_steps():
    assert verdicts(*(look(step, [SMALL, SMALL]) for step in (5, 15, 24, 25))) == [False] * 3 + [
        True
    ]
    assert verdicts(look(5, [SMALL, SMALL]), look(25, [SMALL, SMALL])) == [False] * 2


@pytest.mark.parametrize(
    ("change", "speaks"),
    [
        ({}, True),
        ({"gradients": [SMALL, 7e-5]}, False),  # together above 1e-4
        ({"sizes": (1.0, 3.0)}, False),
        ({"sizes": (0.0, 1e-9)}, True),  # which count as 1
        ({"sizes": (0.0, 1e-9), "gradients": [SMALL, 7e-5]}, False),
        ({"gradients": [0.0, 0.0]}, False),  # of which `ZeroGradients` speaks
        ({"losses": [2.0] * 3}, False),  # one batch again and again, perhaps
        ({"losses": [2.0] * 97 + [1e9] * 3}, False),  # a few batches are huge
        ({"losses": [*LOSSES, math.nan, math.inf]}, True),
        ({"losses": []}, False),
        ({"sizes": None}, False),
    ],
)
def test_where_it_turns(change, speaks):
    given = {"gradients": [SMALL, SMALL], **change}
    assert verdicts(*(look(step, **given) for step in (10, 20, 30)))[-1] == speaks


@pytest.mark.parametrize("large", [[1.0, 0.0], [math.nan, 0.0]])
def test_one_look_that_felt_something_is_enough(large):
    """NaN says nothing, and is no look."""
    given = [[SMALL, SMALL], large, *[[SMALL, SMALL]] * 3]
    spoken = verdicts(*(look(10 * i, each) for i, each in enumerate(given, start=1)))
    assert spoken == [False, False, False, math.isnan(large[0]), math.isnan(large[0])]


def fit(rate, targets, epochs=2):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd", learning_rate=rate), "mse")
    x = np.random.default_rng(0).normal(size=(320, 4)).astype("float32")
    y = targets * x.sum(axis=1, keepdims=True)
    watch = kmp.callbacks.GradientHealth(update_freq=10)
    model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=[watch])
    return watch.verdict


@pytest.mark.filterwarnings("ignore:Step")
def test_large_targets_of_a_rate_that_reaches_them():
    assert fit(0.1, 1e7).state != "STALLED"  # gradients of a million are UNSTABLE


@pytest.mark.filterwarnings("ignore:Step")
def test_large_targets_of_a_rate_that_does_not():
    verdict = fit(1e-9, 1e7)
    assert verdict.state == "STALLED" and "hardly depends on the weights" in str(verdict)
