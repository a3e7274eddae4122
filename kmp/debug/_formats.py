"""The ranges of the float formats, from their own definitions."""

import dataclasses

import ml_dtypes  # Keras requires it
import numpy as np


@dataclasses.dataclass(frozen=True)
class Range:
    """Where a float format ends.

    Attributes:
        largest: the largest finite number.
        smallest_normal: below it precision is lost bit by bit.
        smallest_subnormal: half of it rounds to zero, and so does all below.
    """

    largest: float
    smallest_normal: float
    smallest_subnormal: float


def range_of(dtype: str) -> Range:
    """The range of `dtype`, a Keras name such as "bfloat16"."""
    info = ml_dtypes.finfo(dtype)
    return Range(float(info.max), float(info.smallest_normal), float(info.smallest_subnormal))


def shares(values: np.ndarray, dtype: str, scale: float = 1.0) -> tuple[float, float, float]:
    """What becomes of float32 numbers in `dtype`, after multiplication by `scale`.

    Returns:
        The shares of the numbers that are not zero that overflow, that are lost (become zero), and
        that are degraded (not lost, but subnormal there).
    """
    limits = range_of(dtype)
    magnitudes = np.abs(values[values != 0].astype("float64")) * scale
    if not magnitudes.size:
        return 0.0, 0.0, 0.0
    # A tie rounds to even: half of the smallest subnormal is zero, as is half a unit beyond the end
    # an overflow. NaN counts as an overflow.
    unit = limits.largest - float(np.nextafter(np.array(limits.largest, dtype), np.array(0, dtype)))
    overflow = ~(magnitudes < limits.largest + unit / 2)
    lost = magnitudes <= limits.smallest_subnormal / 2
    degraded = ~lost & (magnitudes < limits.smallest_normal)
    return float(overflow.mean()), float(lost.mean()), float(degraded.mean())
