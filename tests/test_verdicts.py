"""A sample of benchmarks/experiments/verdicts.py: a verdict agrees with the weights."""

import pathlib
import sys

import keras
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "experiments"


@pytest.fixture(scope="module")
def verdicts():
    sys.path.insert(0, str(EXPERIMENTS))
    try:
        import verdicts
    finally:
        sys.path.remove(str(EXPERIMENTS))
    return verdicts


@pytest.mark.slow
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_a_verdict_agrees_with_the_weights(verdicts, data):
    """Four programs of each group, whatever hypothesis draws."""

    def choose(sequence):
        return data.draw(st.sampled_from(sequence))

    runs = verdicts.Runs(verdicts.draw_group(choose))
    for _ in range(4):
        result = runs(verdicts.draw_program(choose))
        assert not verdicts.judged(result), verdicts.told(keras.backend.backend(), result)


def result(said="HEALTHY: ", losses=(1.0, 0.2), moved=1.0, same=None, skipped=0):
    clean = [1.0, 0.2]
    return {
        "said": [said],
        "losses": list(losses),
        "clean": clean,
        "same": same or clean,
        "moved": [moved],
        "moved_clean": [1.0],
        "moved_same": [1.0],
        "apart": [0.0],
        "skipped": [skipped],
        "group": {"steps": 10},
    }


@pytest.mark.any_backend
@pytest.mark.parametrize(
    "seen, judged",
    [
        ({}, ""),
        ({"losses": (1.0, 0.6)}, "false HEALTHY"),
        ({"losses": (1.0, float("nan"))}, "false HEALTHY"),
        ({"moved": 0.1}, "false HEALTHY"),
        ({"losses": (1.0, 0.4)}, ""),  # not as good, and not bad
        ({"said": "UNSTABLE: "}, "false alarm"),
        ({"said": "CALIBRATING: "}, ""),
        ({"said": "UNSTABLE: ", "losses": (1.0, 0.4)}, ""),
        ({"said": "UNSTABLE: ", "same": [1.0, float("nan")]}, ""),
        ({"said": "UNSTABLE: ", "moved": 0.7}, ""),
    ],
)
def test_what_is_called_wrong(verdicts, seen, judged):
    assert verdicts.judged(result(**seen)) == judged
