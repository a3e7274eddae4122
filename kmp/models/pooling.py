"""Average pooling whose sums are rounded to half precision on their way."""

import functools
import math
from typing import Any

import numpy as np
from keras import ops
from keras.layers import AveragePooling1D, AveragePooling2D, AveragePooling3D

from kmp.precision.float_formats import formats
from kmp.precision.trees import HALF_DTYPES

ADDS_UP_IN_HALF = "would add up in half precision"
_TOLERATED = 0.03


def error_of_averages(layer: Any, dtype: str) -> float:
    """The relative error of an average pooling in `dtype` on this machine; 0 if it is small.

    XLA's CPU compiler adds up in the dtype of the inputs, and TensorFlow's kernels do so in
    float16. Once a sum of ones is 256 in bfloat16, one more changes nothing. So the pooling is
    tried.
    """
    if not isinstance(layer, (AveragePooling1D, AveragePooling2D, AveragePooling3D)):
        return 0.0
    if dtype not in HALF_DTYPES:
        return 0.0
    most = math.prod(layer.pool_size) * formats[dtype].eps / 4  # each sum is rounded by so much
    error = _error(tuple(layer.pool_size), dtype) if most > _TOLERATED else 0.0
    return error if error > _TOLERATED else 0.0


@functools.cache
def _error(pool_size: tuple[int, ...], dtype: str) -> float:
    x = np.random.default_rng(0).uniform(1, 2, (1, *pool_size, 8)).astype("float32")
    try:
        rounded = ops.cast(x, dtype)
        y = ops.average_pool(rounded, pool_size, pool_size, data_format="channels_last")
    except Exception:  # there is no such operation in this dtype
        return 0.0
    y, rounded = (ops.convert_to_numpy(ops.cast(each, "float32")) for each in (y, rounded))
    exact = rounded.reshape(-1, 8).mean(axis=0, dtype="float64")
    return float(np.abs(y.reshape(8) / exact - 1).max())
