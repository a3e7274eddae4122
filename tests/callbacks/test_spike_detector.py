"""SpikeDetector: the rule against NumPy, and how rarely it is wrong."""

import importlib.util
import math
import pathlib

import numpy as np
import pytest

from kmp.callbacks import SpikeDetector
from kmp.callbacks.spike_detector import SpikeState

pytestmark = pytest.mark.any_backend

BENCHMARK = pathlib.Path(__file__).parents[2] / "benchmarks" / "experiments" / "false_alarms.py"
SPEC = importlib.util.spec_from_file_location("false_alarms", BENCHMARK)
false_alarms = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(false_alarms)

CALM = tuple(float(x) for x in np.random.default_rng(0).normal(1.0, 0.1, 50))


DEFAULT, USUAL = SpikeDetector(), SpikeState(CALM)


def after(readings, detector=DEFAULT, state=USUAL):
    states = [state]
    for reading in readings:
        states.append(detector.next(states[-1], reading))
    return states[1:]


@pytest.mark.parametrize("length", [10, 11, 49, 50])
@pytest.mark.parametrize("threshold, factor", [(6.0, 1.0), (0.5, 2.0), (6.0, 2.0)])
def test_the_limit_is_numpys(length, threshold, factor):
    history = np.random.default_rng(length).lognormal(0.0, 0.7, length)
    middle = np.median(history)
    deviation = 1.4826 * np.median(np.abs(history - middle))
    expected = max(middle + threshold * deviation, factor * middle)
    detector = SpikeDetector(threshold=threshold, factor=factor)
    assert detector.limit(history.tolist()) == pytest.approx(expected, rel=1e-15)


def test_a_spike_is_three_outliers_in_a_row_and_said_once():
    detector = SpikeDetector()
    states = after([9.0, 9.0, 1.0, 9.0, math.nan, 9.0, 9.0, 1.0])
    assert [s.outliers for s in states] == [1, 2, 0, 1, 2, 3, 4, 0]
    assert [detector.is_spike(s) for s in states] == [False] * 5 + [True, False, False]


def test_outliers_do_not_enter_the_history():
    states = after([1.1, 9.0, math.inf, 9.0, 9.0])
    assert {s.history for s in states} == {(*CALM[1:], 1.1)}


def test_a_lasting_level_becomes_the_new_one():
    detector = SpikeDetector(window=10, patience=2)
    states = after([9.0] * 15, detector, SpikeState(CALM[:10]))
    assert [detector.is_spike(s) for s in states].count(True) == 1
    assert states[-1] == SpikeState((9.0,) * 5, 0)


@pytest.mark.parametrize("reading, outliers", [(1e30, 0), (math.nan, 1), (math.inf, 1)])
def test_few_readings_judge_only_what_is_not_finite(reading, outliers):
    (state,) = after([reading], state=SpikeState(CALM[:9]))
    assert state.outliers == outliers


def test_losses_below_zero():
    state = SpikeState(tuple(-5.0 + 0.01 * x for x in CALM))
    assert [s.outliers for s in after([-4.9, -0.5, 0.5], state=state)] == [0, 0, 1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"window": 9},
        {"window": 10.5},
        {"threshold": 0},
        {"threshold": math.inf},
        {"factor": 0.9},
        {"factor": "2x"},
        {"patience": 0},
        {"patience": 50},
    ],
    ids=str,
)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=f"`{next(iter(arguments))}` of SpikeDetector must"):
        SpikeDetector(**arguments)


@pytest.mark.parametrize(
    "kind, expected", list(zip(false_alarms.KINDS, [0, 0, 0, 2, 4], strict=True)), ids=str
)
def test_alarms_in_the_first_50_of_the_benchmarks_curves(kind, expected):
    """The docstring of DivergenceGuard has the result of all 10,000."""
    curves = [false_alarms.draw_curve(kind, seed) for seed in range(50)]
    assert sum(false_alarms.alarms(SpikeDetector(), curve) for curve in curves) == expected


@pytest.mark.parametrize("kind", false_alarms.KINDS[:4])
def test_a_tenfold_loss_is_seen_in_ordinary_noise(kind):
    for seed in range(20):
        curve = false_alarms.draw_curve(kind, seed)
        curve[500:] = 10 * np.median(curve[450:500])
        assert false_alarms.alarms(SpikeDetector(), curve[:500]) == 0
        assert false_alarms.alarms(SpikeDetector(), curve[:503]) == 1
