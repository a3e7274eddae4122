"""Half and full: names of float dtypes, and casts of whole structures to them."""

from typing import Any, TypeVar

import keras
import ml_dtypes
import numpy as np
from keras import ops

from kmp import _backend
from kmp._backend.types import DType, Tensor, Tree

T = TypeVar("T")

HALF_DTYPES = ("float16", "bfloat16")
SHORT_NAMES = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_LONG_NAMES = {"full": "float32"} | {short: long for long, short in SHORT_NAMES.items()}


def half_dtype() -> DType:
    """Return the half precision that this hardware is good at.

    Returns:
        `"float16"` on NVIDIA GPUs before Ampere (compute capability below 8.0, which have no
        bfloat16), `"bfloat16"` elsewhere: TPUs, later GPUs, CPUs.

    Example:

    >>> half_dtype() in ("bfloat16", "float16")
    True

    Source: JMP, `half_dtype` (which knows TPUs alone); NVIDIA, "CUDA C++ Programming Guide",
    arithmetic throughput by compute capability.
    """
    capability = _backend.device().compute_capability
    return "float16" if capability and capability < (8, 0) else "bfloat16"


def cast_to_half(tree: T) -> T:
    """Return the structure with its floats in `half_dtype()`; see `kmp.Policy` for what is touched.

    Example:

    >>> cast_to_half([np.ones(2), np.arange(2)])[1].dtype == np.arange(2).dtype
    True

    Source: JMP, `cast_to_half`.
    """
    return cast_floats(tree, half_dtype())


def cast_to_full(tree: T) -> T:
    """Return the structure with its floats in float32; see `kmp.Policy` for what is touched.

    Example:

    >>> str(cast_to_full({"w": np.ones(2, "float16")})["w"].dtype)
    'float32'

    Source: JMP, `cast_to_full`.
    """
    return cast_floats(tree, "float32")


def cast_floats(tree: Tree, dtype: DType) -> Any:
    """Cast the float tensors and arrays of a nested structure; everything else stays."""

    def cast(x):
        if not _has_floats(x):
            return x
        if isinstance(x, (np.ndarray, np.generic)):
            return x.astype(ml_dtypes.finfo(dtype).dtype)
        y = _backend.map_gradient_values(lambda values: ops.cast(values, dtype), x)
        mask = keras.src.backend.get_keras_mask(x)  # there is no public way to either of the two
        if mask is not None:
            keras.src.backend.set_keras_mask(y, mask)
        return y

    return keras.tree.map_structure(cast, tree)


def _has_floats(x: Any) -> bool:
    arrays = (np.ndarray, np.generic, keras.KerasTensor, keras.Variable)
    if not (isinstance(x, arrays) or ops.is_tensor(x)):
        return False  # layers, among others, have a dtype too
    try:
        return keras.backend.is_float_dtype(x.dtype)
    except ValueError:  # a dtype that Keras does not know, such as NumPy's strings
        return False


def as_float_dtype(dtype: Any) -> DType:
    """Return the name of a float dtype that layers can compute in.

    Args:
        dtype: a name, one of JMP's short names (`"f16"`, `"half"`), or a dtype of NumPy or of a
            backend.

    Raises:
        ValueError: if it is none.
    """
    name = _LONG_NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if isinstance(name, str) and name == "half":  # NumPy's float16 equals "half" too
        return half_dtype()
    try:
        name = keras.backend.standardize_dtype(name)
    except (ValueError, TypeError):
        name = None
    if name not in SHORT_NAMES:
        quantized = " Keras trains float8 and int8 by model.quantize." if "8" in str(dtype) else ""
        raise ValueError(
            f"A policy's dtypes are {', '.join(map(repr, SHORT_NAMES))} or JMP's short names "
            f"{', '.join(map(repr, (*_LONG_NAMES, 'half')))}. Received: {dtype!r}.{quantized} "
            'Write for example kmp.Policy("mixed_bfloat16") or kmp.Policy("p=f32,c=bf16,o=f32").'
        )
    return name


def is_float(x: Any) -> bool:
    """Tell whether `x` is a float or a tensor, array or sparse gradient of floats."""
    if not hasattr(x, "dtype"):
        return isinstance(x, float)
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype))


def is_complex(x: Any) -> bool:
    """Tell whether `x` is a tensor or array of complex numbers."""
    return hasattr(x, "dtype") and keras.backend.standardize_dtype(x.dtype).startswith("complex")


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x`, in float32 if it was half precision or a Python number."""
    if not hasattr(x, "dtype"):
        return ops.convert_to_tensor(x, "float32")
    dtype = keras.backend.standardize_dtype(x.dtype)
    return x if dtype in ("float32", "float64") else ops.cast(x, "float32")
