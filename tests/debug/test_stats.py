"""Statistics of a tensor, against counting by hand."""

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
