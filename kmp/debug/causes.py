"""Why a place is not finite: what the same numbers are in float32."""

import math
from collections.abc import Sequence

import keras
from keras import Layer, ops

from kmp._backend import backend
from kmp._backend.types import Gradient, Variable
from kmp._keras.calls import Call
from kmp.debug.blame import Blame, Cotangents
from kmp.debug.stats import TensorStats, has_nonfinite, measure, tensor_stats
from kmp.precision.float_formats import formats
from kmp.precision.temporary import under
from kmp.precision.trees import HALF_DTYPES, is_float

_NOT_PRECISION = (
    "not finite in float32 either, so not a matter of precision. Look for a division by zero, a "
    "logarithm or root of a number that is not positive, or weights that diverge"
)
_ADVICE = "Keep this layer in float32 (dtype='float32') or rescale"


def forward_cause(blame: Blame) -> str:
    """What is known of why the blamed call gives what it gives."""
    call = blame.call
    if call is None:  # the batch
        return ""
    for variable in getattr(call.layer, "variables", []):
        bad = tensor_stats(variable).nonfinite
        if bad:
            return f"{bad} numbers of its variable {variable.path} are not finite"
    if call.dtype not in HALF_DTYPES:
        return f"it computes in {call.dtype}, so not a matter of precision"
    again = blame.inputs if blame.part == "cast" else _in_float32(call)
    if not again or has_nonfinite(again):
        return _NOT_PRECISION
    return f"{_left_the_range(again, call.dtype)}. {_ADVICE}"


def backward_cause(
    blame: Blame,
    in_float32: Cotangents,
    gradients: Sequence[Gradient],
    variables: Sequence[Variable],
    scale: float,
) -> str:
    """What is known of why a gradient is not finite, from a replay with all layers in float32.

    Args:
        blame: the place.
        in_float32: the gradients there in float32.
        gradients: those of `variables` in float32.
        variables: the model's trainable variables.
        scale: the loss scale.
    """
    if blame.part == "weights":
        again = tuple(
            tensor_stats(backend.gradient_values(gradient))
            for variable, gradient in zip(variables, gradients, strict=True)
            if gradient is not None and variable.path in blame.variables
        )
    else:
        again = tuple(s for _, _, role, s in in_float32.seen if role == blame.role)
    if not again or has_nonfinite(again):
        return _NOT_PRECISION
    dtype = blame.outputs[0].dtype if blame.outputs else ""
    if dtype not in HALF_DTYPES and blame.call is not None:
        dtype = blame.call.dtype
    if dtype not in HALF_DTYPES:
        return f"finite where all layers compute in float32 (largest {_largest(again):.5g})"
    found, largest = _left_the_range(again, dtype), _largest(again)
    if largest <= formats[dtype].largest:
        return f"{found}. {_ADVICE}"
    holds = 2.0 ** math.floor(math.log2(formats[dtype].largest / (largest / scale)))
    return f"{found}. A loss scale of at most {holds:g} holds it; or k{_ADVICE[1:]}"


def term_cause(blame: Blame, dtype: str, in_float32: tuple[TensorStats, ...]) -> str:
    """What is known of why a term of the loss is not finite.

    Args:
        blame: the term.
        dtype: what the layer that it belongs to computes in.
        in_float32: the term where all layers compute in float32; empty if that was not found out.
    """
    if not in_float32 or has_nonfinite(in_float32):
        return "the loss is not finite whatever it is multiplied by: no loss scale can help"
    dtype = dtype if dtype in HALF_DTYPES else blame.outputs[0].dtype
    if dtype not in HALF_DTYPES:  # what it is given comes from a layer in half precision
        return f"finite where all layers compute in float32 (largest {_largest(in_float32):.5g})"
    return f"{_left_the_range(in_float32, dtype)}. {_ADVICE}; no loss scale can help"


def _largest(stats: tuple[TensorStats, ...]) -> float:
    return max(s.max_abs for s in stats)


def _left_the_range(in_float32: tuple[TensorStats, ...], dtype: str) -> str:
    largest, limit = _largest(in_float32), formats[dtype].largest
    left = f"it left {dtype} (at most {limit:.5g})"
    if largest <= limit:
        least = formats[dtype].smallest_subnormal
        left = (
            f"a number on the way left {dtype} (at most {limit:.5g}, and 0 below {least:.2g}, as "
            "an epsilon may be: kmp.audit(model) lists such constants)"
        )
    return f"finite in float32 (largest {largest:.5g}): {left}"


def _in_float32(call: Call) -> tuple[TensorStats, ...]:
    """What the call gives in float32 on its own inputs; nothing if it cannot be run alone."""

    def cast(x):
        return ops.cast(x, "float32") if hasattr(x, "dtype") and is_float(x) else x

    args, kwargs = keras.tree.map_structure(cast, call.passed)
    try:
        if not isinstance(call.layer, Layer):
            return measure(call.layer(*args, **kwargs))
        with under(call.layer, "float32"):
            return measure(call.layer(*args, **kwargs))
    except Exception:  # a tool that explains must not fail where it could say less
        return ()
