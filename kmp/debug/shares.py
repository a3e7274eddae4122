"""What becomes of float32 numbers in half precision."""

import numpy as np

from kmp.precision.float_formats import formats


def shares(values: np.ndarray, dtype: str, scale: float = 1.0) -> tuple[float, float, float]:
    """What becomes of float32 numbers in `dtype`, after multiplication by `scale`.

    Returns:
        The shares of the numbers that are not zero that overflow, that are lost (become zero), and
        that are degraded (not lost, but subnormal there).
    """
    limits = formats[dtype]
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
