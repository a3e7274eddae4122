"""Statistics of a tensor against counting by hand, and SQNR against its formula."""

import math

import keras
import numpy as np
import pytest
from keras import ops

import kmp

VALUES = [0.0, -0.0, 1.0, -3.0, 1e-6, 2.0**-14, np.inf, -np.inf, np.nan, 40000.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_counts(dtype):
    stats = kmp.debug.tensor_stats(ops.reshape(ops.cast(ops.array(VALUES), dtype), (2, 5)))
    assert (stats.shape, stats.dtype) == ((2, 5), dtype)
    assert (stats.zeros, stats.infinities, stats.nans, stats.nonfinite) == (2, 2, 1, 3)
    assert stats.subnormals == (1 if dtype == "float16" else 0)
    assert (stats.smallest, stats.max_abs) == (-3.0, 39936.0 if dtype == "bfloat16" else 40000.0)


@pytest.mark.parametrize("x", [np.full((2,), np.nan), np.zeros((0, 3))], ids=["nan", "empty"])
def test_nothing_that_is_finite(x):
    stats = kmp.debug.tensor_stats(x)
    assert math.isnan(stats.smallest)
    assert math.isnan(stats.max_abs)


def test_arrays_variables_and_integers():
    assert kmp.debug.tensor_stats(np.array([1.0, 2.0])).dtype == "float64"
    assert kmp.debug.tensor_stats(keras.Variable([1.0, 5.0])).largest == 5.0
    stats = kmp.debug.tensor_stats(ops.array([0, 7], "int32"))
    assert (stats.dtype, stats.largest, stats.subnormals, stats.zeros) == ("int32", 7.0, 0, 1)


@pytest.mark.parametrize("x", [None, "text", keras.KerasTensor((2,))], ids=["none", "text", "spec"])
def test_what_is_no_tensor_of_numbers(x):
    with pytest.raises(ValueError, match=r"must be a tensor of numbers\. Received: x="):
        kmp.debug.tensor_stats(x)


@pytest.mark.parametrize("convert", [np.asarray, ops.convert_to_tensor])
def test_complex_numbers_are_refused(convert):
    with pytest.raises(ValueError, match=r"of real numbers\. Received: x of dtype .*complex64"):
        kmp.debug.tensor_stats(convert(np.array([1 + 2j], "complex64")))


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
        ([NAN], [NAN], NAN),
        ([NAN, 1.0], [NAN, 1.0], NAN),
        ([1.0, NAN], [1.0, 1.0], NAN),
        ([-INF, -INF], [-INF, -INF], NAN),
        ([], [], NAN),
    ],
)
def test_known_answers(reference, x, expected):
    found = kmp.debug.sqnr(np.array(reference), np.array(x))
    assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("dtype, bits", [("float16", 11), ("bfloat16", 8)])
def test_a_rounding_costs_six_db_a_bit(dtype, bits):
    """Uniform in the last place: of numbers spread over a binade, 6.02 * bits + 7 +- 1 dB."""
    x = np.random.default_rng(0).uniform(1, 2, 4096).astype("float32")
    found = kmp.debug.sqnr(x, ops.cast(ops.array(x), dtype))
    assert found == pytest.approx(20 * math.log10(2) * bits + 10 * math.log10(12 * 7 / 12), abs=1.0)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"same shape. Received: \(2,\) and \(1, 2\)"):
        kmp.debug.sqnr(np.ones(2), np.ones((1, 2)))
