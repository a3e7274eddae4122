"""SQNR against its formula, and where the formula has no answer."""

import math

import numpy as np
import pytest
from keras import ops

import kmp

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    "reference, x, expected",
    [
        ([3.0, 4.0], [3.0, 4.5], 20.0),
        ([1.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 2.0], [1.0, 2.0], INF),
        ([0.0, 0.0], [0.0, 0.0], INF),
        ([0.0], [1.0], -INF),
        ([1.0, 2.0], [1.0, NAN], -INF),
        ([INF, 3.0], [7.0, 3.3], 20.0),
    ],
)
def test_known_answers(reference, x, expected):
    found = kmp.debug.sqnr(np.array(reference), np.array(x))
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("dtype, bits", [("float16", 11), ("bfloat16", 8)])
def test_a_rounding_costs_six_db_a_bit(dtype, bits):
    """Uniform in the last place: of numbers spread over a binade, 6.02 * bits + 7 +- 1 dB."""
    x = np.random.default_rng(0).uniform(1, 2, 4096).astype("float32")
    found = kmp.debug.sqnr(x, ops.cast(ops.array(x), dtype))
    assert found == pytest.approx(20 * math.log10(2) * bits + 10 * math.log10(12 * 7 / 12), abs=1.0)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"same shape. Received: \(2,\) and \(1, 2\)"):
        kmp.debug.sqnr(np.ones(2), np.ones((1, 2)))
