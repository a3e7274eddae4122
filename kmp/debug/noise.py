"""How much of a signal is left: the signal-to-quantization-noise ratio."""

import math

import keras
import numpy as np
from keras import ops

from kmp._backend.types import Tensor, Tree
from kmp.debug.replay import floats
from kmp.precision.trees import HALF_DTYPES


def sqnr(reference: Tensor, x: Tensor) -> float:
    """The signal-to-quantization-noise ratio of `x` in dB: `10 log10(sum(r^2) / sum((r - x)^2))`.

    6 dB are one bit. float16 keeps about 74 dB in one rounding, bfloat16 56 dB; a layer below 20 dB
    has lost what it computed.

    Args:
        reference: what is right, of any shape and float dtype.
        x: of the same shape.

    Returns:
        dB; inf where both are equal, -inf where `x` is not finite but the reference is, or where
        the reference is zero and `x` is not. What is not finite in the reference is left out.

    Raises:
        ValueError: the shapes differ.

    Example:

    >>> round(sqnr(ops.array([3.0, 4.0]), ops.array([3.0, 4.5])))
    20

    Source: `compute_error` of torchao.
    """
    right, given = as_float64(reference), as_float64(x)
    if right.shape != given.shape:
        raise ValueError(
            "`reference` and `x` must have the same shape. Received: "
            f"{right.shape} and {given.shape}."
        )
    known = np.isfinite(right)
    right, given = right[known], given[known]
    if not np.isfinite(given).all():
        return -math.inf
    signal, noise = float((right**2).sum()), float(((right - given) ** 2).sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def sqnr_of(reference: Tree, tree: Tree) -> float:
    """`sqnr` over all floats of two equal structures; NaN if there are none."""
    right, given = floats(reference), floats(tree)
    if not right:
        return math.nan
    return sqnr(*(np.concatenate([as_float64(x).ravel() for x in side]) for side in (right, given)))


def as_float64(x: Tensor) -> np.ndarray:
    """The numbers of a float tensor on the host."""
    dtype = getattr(x, "dtype", None)
    if dtype is not None and keras.backend.standardize_dtype(dtype) in HALF_DTYPES:
        x = ops.cast(x, "float32")  # NumPy knows no bfloat16, and some backends will not convert it
    return ops.convert_to_numpy(x).astype("float64")
