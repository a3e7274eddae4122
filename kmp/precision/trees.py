"""Casts, finite checks and selection over nested structures of tensors; names of float dtypes."""

from typing import Any, TypeVar

import keras
import ml_dtypes
import numpy as np
from keras import KerasTensor, ops
from keras import Variable as KerasVariable

from kmp._backend import backend
from kmp._backend.base import at_least_float32 as at_least_float32
from kmp._backend.base import is_complex
from kmp._backend.base import is_float as is_float
from kmp._backend.types import DType, Tensor, Tree
from kmp._keras import with_mask_of

T = TypeVar("T")

HALF_DTYPES = ("float16", "bfloat16")
SHORT_NAMES = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_LONG_NAMES = {"full": "float32"} | {short: long for long, short in SHORT_NAMES.items()}


def half_dtype() -> DType:
    """Return the half-precision dtype that suits this hardware.

    Returns:
        `"float16"` on NVIDIA GPUs older than Ampere (compute capability below 8.0), which have no
        bfloat16; `"bfloat16"` on TPUs, newer GPUs and CPUs.

    Example:

    >>> half_dtype() in ("bfloat16", "float16")
    True

    Source: JMP, `half_dtype` (which only checks for TPUs); NVIDIA, "CUDA C++ Programming Guide",
    arithmetic throughput by compute capability.
    """
    capability = backend.device().compute_capability
    return "float16" if capability and capability < (8, 0) else "bfloat16"


def cast_to_half(tree: T) -> T:
    """Return the structure with its floats cast to `half_dtype()`, as `kmp.Policy` casts.

    Example:

    >>> cast_to_half([np.ones(2), np.arange(2)])[1].dtype == np.arange(2).dtype
    True

    Source: JMP, `cast_to_half`.
    """
    return cast_floats(tree, half_dtype())


def cast_to_full(tree: T) -> T:
    """Return the structure with its floats cast to float32, as `kmp.Policy` casts.

    Example:

    >>> str(cast_to_full({"w": np.ones(2, "float16")})["w"].dtype)
    'float32'

    Source: JMP, `cast_to_full`.
    """
    return cast_floats(tree, "float32")


def cast_floats(tree: Tree, dtype: DType) -> Any:
    """Cast the float tensors and arrays of a nested structure; leave everything else as it is."""

    def cast(x: Any) -> Any:
        if not _has_floats(x):
            return x
        if isinstance(x, (np.ndarray, np.generic)):
            return x.astype(ml_dtypes.finfo(dtype).dtype)
        y = backend.map_gradient_values(lambda values: ops.cast(values, dtype), x)
        return with_mask_of(x, y)

    return keras.tree.map_structure(cast, tree)


def _has_floats(x: Any) -> bool:
    arrays = (np.ndarray, np.generic, KerasTensor, KerasVariable)
    if not (isinstance(x, arrays) or ops.is_tensor(x)):
        return False  # other objects, such as layers, have a dtype too
    try:
        return keras.backend.is_float_dtype(x.dtype)
    except ValueError:  # a dtype that Keras does not know, such as NumPy's strings
        return False


def as_float_dtype(dtype: Any) -> DType:
    """Return the name of a float dtype that layers can compute in, or raise ValueError.

    `dtype` is a name, one of JMP's (`"f16"`, `"half"`), or a dtype of NumPy or of a backend.
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


def as_number(scalar: Any) -> float:
    """A scalar tensor, variable or number as a Python float.

    In at least float32, since NumPy reads no bfloat16 scalar of TensorFlow's.
    """
    return float(ops.convert_to_numpy(at_least_float32(scalar)))


def all_finite(tree: Tree) -> Tensor:
    """Tell whether a structure of tensors is free of inf and NaN.

    Args:
        tree: nested structure of tensors of any shape. Integers, bools and None count as finite.
            Of `tf.IndexedSlices` the values are checked; of complex numbers, both parts.

    Returns:
        bool[], True for an empty structure.

    Example:

    >>> bool(all_finite({"a": [1.0, 2.0], "b": None}))
    True
    """
    leaves = [backend.gradient_values(x) for x in keras.tree.flatten(tree) if x is not None]
    leaves += [part(x) for x in leaves if is_complex(x) for part in (ops.real, ops.imag)]
    floats = [ops.convert_to_tensor(x) for x in leaves if is_float(x)]
    floats = [x for x in floats if 0 not in x.shape]
    if not floats:
        return ops.convert_to_tensor(True, "bool")
    found = backend.are_finite(floats)
    return found[0] if len(floats) == 1 else ops.all(found)


def max_abs(tree: Tree) -> Tensor:
    """Return the largest absolute value of the finite numbers in a structure of gradients.

    Args:
        tree: nested structure of tensors of any shape. Integers, bools, complex numbers and None
            are ignored. Rows of `tf.IndexedSlices` with the same index are summed first.

    Returns:
        float32[], 0 for an empty structure, inf for a float64 value too large for float32.

    Example:

    >>> float(max_abs({"a": [1.0, -2.0], "b": None}))
    2.0
    """

    def largest(x: Tensor) -> Tensor:
        x = at_least_float32(backend.gradient_rows(x))
        clean = ops.where(ops.isfinite(x), ops.abs(x), 0.0)
        return ops.max(ops.cast(clean, "float32"), initial=0.0)

    leaves = [largest(x) for x in keras.tree.flatten(tree) if x is not None and is_float(x)]
    return ops.max(ops.stack(leaves)) if leaves else ops.zeros((), "float32")


def select_tree(pred: Tensor, on_true: T, on_false: T) -> T:
    """Choose between two structures of tensors, leaf by leaf, without branching.

    Args:
        pred: bool[].
        on_true: nested structure of tensors; may have None where `on_false` has None too.
        on_false: the same structure with the same shapes and dtypes.

    Returns:
        The chosen structure. NaNs in the other one do not affect it.

    Raises:
        ValueError: if `pred` is not a scalar or the structures differ.

    Example:

    >>> [int(x) for x in select_tree(False, (1, 2), (3, 4))]
    [3, 4]

    Source: JMP, `select_tree`.
    """
    pred = ops.cast(ops.convert_to_tensor(pred), "bool")
    if len(pred.shape) != 0:
        raise ValueError(
            f"`pred` must be a boolean scalar. Received: shape={tuple(pred.shape)}. Reduce it "
            "first, for example with keras.ops.all(pred)."
        )
    keras.tree.assert_same_structure(on_true, on_false)

    def choose(a: Any, b: Any) -> Any:
        if (a is None) != (b is None):
            raise ValueError(
                "`on_true` and `on_false` must have the same structure. Received: None in one "
                f"where the other has {a if b is None else b}. Put None in both, or a tensor in "
                "both, for example keras.ops.zeros_like of the other."
            )
        return None if a is None else ops.where(pred, a, b)

    return keras.tree.map_structure(choose, on_true, on_false)
