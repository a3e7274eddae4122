"""What is lost at the ends of the formats, against what the backends' own casts do."""

import dataclasses

import numpy as np
import pytest
from keras import ops

import kmp
from kmp.precision.float_formats import formats

NUMBERS = {
    "float16": [
        65503,
        65519,
        65520,
        1e9,
        np.inf,
        np.nan,
        2.0**-25,
        2.1**-24,
        2.0**-24,
        2.0**-14,
        6e-5,
    ],
    "bfloat16": [3.38e38, 3.4e38, np.inf, np.nan, 1.0, 65520.0, 1e-30, 1e-7],
}


@pytest.mark.parametrize("dtype", NUMBERS)
def test_shares_are_what_a_cast_does(dtype):
    values = np.array([0.0, *NUMBERS[dtype]], "float32")
    cast = ops.convert_to_numpy(ops.cast(ops.cast(ops.array(values), dtype), "float32"))
    present = values != 0
    limits = formats[dtype]
    overflow = ~np.isfinite(cast[present])
    lost = cast[present] == 0
    degraded = ~lost & (np.abs(cast[present]) < limits.smallest_normal)
    expected = overflow.mean(), lost.mean(), degraded.mean()
    found = dataclasses.astuple(kmp.debug.Share.of(values, dtype))
    assert found == pytest.approx(expected, abs=1e-12)
    assert overflow.any()


@pytest.mark.parametrize(
    "value, scale, expected",
    [
        (1e-8, 1.0, (0.0, 1.0, 0.0)),
        (1e-8, 1024.0, (0.0, 0.0, 1.0)),
        (1e-8, 2.0**20, (0.0, 0.0, 0.0)),
        (0.0, 1.0, (0.0, 0.0, 0.0)),
    ],
)
def test_the_scale_counts(value, scale, expected):
    found = kmp.debug.Share.of(np.full(3, value, "float32"), "float16", scale)
    assert dataclasses.astuple(found) == expected
