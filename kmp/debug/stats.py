"""What is in a tensor, and how much of a signal is left in it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np
from keras import KerasTensor, Variable, ops

from kmp._backend.types import Tensor, Tree


@dataclasses.dataclass(frozen=True)
class TensorStats:
    """A tensor in numbers; see `tensor_stats`.

    Attributes:
        shape: its shape.
        dtype: its dtype, in Keras's words.
        device: where it is, in the backend's words.
        smallest: its smallest finite value; NaN if it has none.
        largest: its largest finite value; NaN if it has none.
        zeros: how many of its values are zero.
        subnormals: how many are not zero, but below the smallest normal number of the dtype.
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
        """How many of its values are inf or NaN."""
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
    """Measure a tensor: shape, dtype, device, range, zeros, subnormals, inf and NaN.

    The tensor is copied to the host.

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
    tensor: Any = x.value if isinstance(x, Variable) else x
    if "complex" in str(getattr(tensor, "dtype", "")):
        raise ValueError(
            f"`x` must be a tensor of real numbers. Received: x of dtype {tensor.dtype}. Measure "
            "its parts, keras.ops.real(x) and keras.ops.imag(x)."
        )
    try:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        values = as_float64(tensor)
    except Exception as error:
        raise ValueError(
            f"`x` must be a tensor of numbers. Received: x={x!r} (of type {type(x).__name__}). "
            "Call tensor_stats outside of compiled functions, on a tensor or an array."
        ) from error
    is_float = keras.backend.is_float_dtype(dtype)
    finite = values[np.isfinite(values)]
    tiny = float(ml_dtypes.finfo(dtype).smallest_normal) if is_float else 0.0
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


def floats(tree: Tree) -> list[Tensor]:
    """The float tensors in a structure, those that are being traced included."""
    return [x for x in keras.tree.flatten(tree) if is_float_tensor(x)]


def is_float_tensor(x: Any) -> bool:
    """Whether `x` is a tensor, variable or array of floats, and not a symbolic KerasTensor."""
    if isinstance(x, KerasTensor) or not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return False
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype))


def measure(tree: Tree) -> tuple[TensorStats, ...]:
    """The statistics of each float tensor in a structure."""
    return tuple(tensor_stats(x) for x in floats(tree))


def has_nonfinite(stats: Sequence[TensorStats]) -> bool:
    """Whether any of the measured tensors holds an inf or a NaN."""
    return any(s.nonfinite for s in stats)


def sqnr(reference: Tensor, x: Tensor) -> float:
    """The signal-to-quantization-noise ratio of `x` in dB: `10 log10(sum(r^2) / sum((r - x)^2))`.

    One bit is worth 6 dB. A single rounding leaves about 74 dB in float16 and 56 dB in bfloat16; a
    layer below 20 dB has lost what it computed.

    Args:
        reference: the right values, of any shape and float dtype. Infinite values are left out: a
            mask of -inf is right in any dtype.
        x: of the same shape.

    Returns:
        dB. inf if both are equal; -inf if `x` has an inf or a NaN where the reference is finite, or
        if the reference is zero and `x` is not. NaN if the reference has a NaN, or no finite value:
        then there is nothing to compare with.

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
    if np.isnan(right).any() or not known.any():
        return math.nan
    right, given = right[known], given[known]
    if not np.isfinite(given).all():
        return -math.inf
    signal, noise = float((right**2).sum()), float(((right - given) ** 2).sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def sqnr_of(reference: Tree, tree: Tree) -> float:
    """`sqnr` over all floats of two equal structures; NaN if there are none."""
    sides = (floats(reference), floats(tree))
    if not sides[0]:
        return math.nan
    return sqnr(*(np.concatenate([as_float64(x).ravel() for x in side]) for side in sides))


def as_float64(x: Tensor) -> np.ndarray:
    """The numbers of a tensor as float64 on the host."""
    dtype = getattr(x, "dtype", None)
    if dtype is not None and keras.backend.standardize_dtype(dtype) in ("float16", "bfloat16"):
        x = ops.cast(x, "float32")  # NumPy knows no bfloat16, and some backends do not convert it
    return ops.convert_to_numpy(x).astype("float64")
