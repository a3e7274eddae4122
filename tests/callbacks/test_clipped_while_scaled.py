"""Gradients that a train step clips before they are divided by the loss scale."""

import dataclasses

import numpy as np
import pytest
from reports import look_at

import kmp
from kmp.callbacks.verdict.stalled import ClippedWhileScaled

RANDOM = np.random.default_rng(0)
SCALE = 32768.0


def sizes_of(how):
    """Norms and largest numbers of three gradients, as they are after the division."""
    norms = RANDOM.uniform(1e2, 1e4, 3)
    if how == "all":
        norms /= np.linalg.norm(norms)
    elif how == "each":
        norms /= norms
    elif how == "after":  # as the optimizer is asked to: to 1, once they are divided
        norms *= SCALE / np.linalg.norm(norms)
    elif how == "same":  # a batch of all data, which moves nothing any more
        norms = np.array([0.1, 0.2, 0.3])
    largest = norms * (1.0 if how == "same" else RANDOM.uniform(0.1, 0.9, 3))
    numbers = {"numbers": 3, "two thirds": 2, "one": 1}.get(how, 0)
    largest[:numbers] = 1.0  # the others are smaller
    largest[numbers:] *= 1e-5 if numbers else 1.0
    return norms / SCALE, largest / SCALE


@pytest.mark.quick
@pytest.mark.parametrize(
    "how, scale, said",
    [
        ("all", SCALE, "global_clipnorm=1,"),
        ("each", SCALE, "give the optimizer clipnorm=1,"),
        ("numbers", SCALE, "clipvalue=1,"),
        ("two thirds", SCALE, "clipvalue=1,"),  # the others' gradients are smaller
        ("one", SCALE, ""),
        ("none", SCALE, ""),
        ("after", SCALE, ""),
        ("same", SCALE, ""),
        ("all", 512.0, ""),  # what is left may be enough
    ],
)
def test_a_size_that_is_the_same_at_each_look(how, scale, said):
    detector, verdicts = ClippedWhileScaled(), []
    for step in range(100, 600, 100):
        sizes = zip(*sizes_of(how), strict=True)
        rows = np.array([[norm, largest, 0, 0, 0] for norm, largest in sizes])
        report = kmp.GradientReport(("a", "b", "c"), rows.astype("float32"), scale, step, 0, 0)
        look = look_at(dataclasses.replace(report, measured_step=step))
        verdicts.append(detector.see(look))
        assert detector.see(look) == verdicts[-1]  # a look at the same step counts once
    assert verdicts[:3] == [None] * 3
    for verdict in verdicts[3:]:
        assert said in verdict.advice if said else verdict is None
