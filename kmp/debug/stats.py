"""What is in a tensor."""

import dataclasses
import math
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp._backend.types import Tensor
from kmp.precision.float_formats import formats


@dataclasses.dataclass(frozen=True)
class TensorStats:
    """A tensor in numbers; see `tensor_stats`.

    Attributes:
        shape: its shape.
        dtype: its dtype, in Keras's words.
        device: where it is, in the backend's words.
        smallest: its smallest finite number; NaN if it has none.
        largest: its largest finite number; NaN if it has none.
        zeros: how many of its numbers are zero.
        subnormals: how many are not zero but below the smallest normal number of the dtype.
        infinities: how many are inf or -inf.
        nans: how many are NaN.

    Example:

    >>> stats = TensorStats((2,), "float16", "cpu", 0.5, 4.0, 0, 0, 1, 0)
    >>> stats.max_abs, stats.nonfinite, str(stats)
    (4.0, 1, 'float16[2] on cpu, from 0.5 to 4, 1 inf')
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    smallest: float
    largest: float
    zeros: int
    subnormals: int
    infinities: int
    nans: int

    @property
    def nonfinite(self) -> int:
        """How many of its numbers are inf or NaN."""
        return self.infinities + self.nans

    @property
    def max_abs(self) -> float:
        """The largest absolute value that is finite; NaN if there is none."""
        return max(abs(self.smallest), abs(self.largest))

    def __str__(self) -> str:
        parts = [f"{self.dtype}{list(self.shape)}" + f" on {self.device}" * bool(self.device)]
        if not math.isnan(self.largest):
            parts.append(f"from {self.smallest:.5g} to {self.largest:.5g}")
        counts = ("zeros", "subnormals", "infinities", "nans")
        for name, count in zip(("zero", "subnormal", "inf", "NaN"), counts, strict=True):
            if getattr(self, count):
                parts.append(f"{getattr(self, count)} {name}")
        return ", ".join(parts)


def tensor_stats(x: Tensor) -> TensorStats:
    """Measure a tensor: shape, dtype, device, range, zeros, subnormals, what is not finite.

    It is copied to the host.

    Args:
        x: a tensor, variable or array of floats or integers, of any shape.

    Returns:
        A `TensorStats`; `str` of it is one line.

    Raises:
        ValueError: `x` is being traced and holds no numbers, or is no tensor of real numbers.

    Example:

    >>> print(tensor_stats(ops.array([0.0, 3e-6, np.inf, -4.0], "float16")))
    float16[4] on ..., from -4 to 2.98...e-06, 1 zero, 1 subnormal, 1 inf
    """
    tensor: Any = x.value if isinstance(x, keras.Variable) else x
    if "complex" in str(getattr(tensor, "dtype", "")):
        raise ValueError(
            f"`x` must be a tensor of real numbers. Received: x of dtype {tensor.dtype}. Measure "
            "its parts, keras.ops.real(x) and keras.ops.imag(x)."
        )
    try:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        is_float = keras.backend.is_float_dtype(dtype)
        tensor_of_host = ops.cast(tensor, "float32") if is_float and dtype != "float64" else tensor
        values = ops.convert_to_numpy(tensor_of_host).astype("float64")
    except Exception as error:
        raise ValueError(
            f"`x` must be a tensor of numbers. Received: x={x!r} (of type {type(x).__name__}). "
            "Call tensor_stats outside of compiled functions, on a tensor or an array."
        ) from error
    finite = values[np.isfinite(values)]
    tiny = formats[dtype].smallest_normal if is_float else 0.0
    magnitudes = np.abs(finite)
    return TensorStats(
        shape=tuple(values.shape),
        dtype=dtype,
        device=str(getattr(tensor, "device", "")),
        smallest=float(finite.min()) if finite.size else math.nan,
        largest=float(finite.max()) if finite.size else math.nan,
        zeros=int((magnitudes == 0).sum()),
        subnormals=int(((magnitudes > 0) & (magnitudes < tiny)).sum()),
        infinities=int(np.isinf(values).sum()),
        nans=int(np.isnan(values).sum()),
    )
