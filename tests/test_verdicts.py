"""A sample of benchmarks/experiments/verdicts.py: a verdict agrees with the weights."""

import pathlib
import sys

import pytest

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
@pytest.mark.only("jax")
def test_a_verdict_agrees_with_the_weights(verdicts):
    """The first programs of the experiment. What it has found wrong is in docs/limits.md."""
    runs = verdicts.Runs(verdicts.draw_group(verdicts.chooser(1, 0)))
    for index in range(4):
        found = {"index": index, **runs(verdicts.draw_program(verdicts.chooser(2, index)))}
        assert not verdicts.judged(found), verdicts.told("jax", found)


def result(said="HEALTHY: ", losses=(1.0, 0.2), moved=1.0, same=None, skipped=0, clean=(1.0, 0.2)):
    return {
        "said": [said],
        "losses": list(losses),
        "clean": list(clean),
        "same": same or list(clean),
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
        ({"losses": (1.0, 0.2, 0.2, 0.6), "clean": (1.0, 0.2, 0.45, 0.2)}, ""),  # by chance
        ({"losses": (1.0, 0.2, 0.2, 0.6), "clean": (1.0, 0.45, 0.3, 0.2)}, "false HEALTHY"),
        ({"said": "UNSTABLE: "}, "false alarm"),
        ({"said": "CALIBRATING: "}, ""),
        ({"said": "UNSTABLE: ", "losses": (1.0, 0.4)}, ""),
        ({"said": "UNSTABLE: ", "same": [1.0, float("nan")]}, ""),
        ({"said": "UNSTABLE: ", "moved": 0.7}, ""),
        ({"said": "UNSTABLE: ", "same": [1.0, 0.1]}, ""),  # the fault lowers the loss
        ({"said": "UNSTABLE: ", "same": [1.0, 0.16]}, "false alarm"),
    ],
)
def test_what_is_called_wrong(verdicts, seen, judged):
    assert verdicts.judged(result(**seen)) == judged
