"""float32 in two parts: a bfloat16 number that a model computes with, and what that leaves over.

The parts take as many bits as the whole, so nothing is lost: 16 bits are the nearest bfloat16, and
16 more, an integer, say how far the float32 lies from it. With 8 more instead, the whole has 24.
"""

import keras
from keras import ops

from kmp._backend import backend
from kmp._backend.types import Tensor

_MAGNITUDE = 2**31 - 1
_INFINITY, _QUIET_NAN = 0x7F800000, 0x7FC00000
_UPPER, _HALF_UNIT = 2**16, 2**15  # a unit in the last place of bfloat16, and half of it


def split(x: Tensor, remainder: str) -> tuple[Tensor, Tensor]:
    """Split float32 into the nearest bfloat16, in a tie the one of larger magnitude, and the rest.

    Every NaN becomes the quiet NaN without a rest: all bits of a GPU's NaN are set, so that it
    would carry into the sign, and the model would see -0.

    Args:
        x: float32[...]. For an int8 remainder its lower 8 bits must be zero.
        remainder: "int16" or "int8".

    Returns:
        bfloat16[...] and integers of the same shape.

    Example:

    >>> x = ops.convert_to_tensor([1.001, -3e-41, 0.0], "float32")
    >>> weight, remainder = split(x, "int16")
    >>> bool(ops.all(join(weight, remainder) == x))
    True
    """
    bits = backend.bitcast(x, "int32")
    # Python's operators keep int32 whatever Keras's floatx is; see `backend.hash_bits`.
    bits = ops.where((bits & _MAGNITUDE) > _INFINITY, _QUIET_NAN, bits)
    upper = ops.right_shift(bits + _HALF_UNIT, 16)
    rest = ops.right_shift(bits - upper * _UPPER, _zeros_below(remainder))
    weight = backend.bitcast(ops.cast(upper, "int16"), "bfloat16")
    return weight, ops.cast(rest, remainder)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Join what `split` has split, bit for bit.

    A weight that somebody else has assigned since has the remainder of another one. Then the result
    lies within half a unit in the last place of that weight, and splits into the same two parts:
    zeros stay zeros but for 1e-40, and infinity stays infinity or is a float32 at
    most half a unit below it.

    Args:
        weight: bfloat16[...].
        remainder: int16[...] or int8[...].

    Returns:
        float32[...].
    """
    upper = ops.cast(backend.bitcast(weight, "int16"), "int32") * _UPPER
    rest = ops.cast(remainder, "int32") * 2 ** _zeros_below(remainder.dtype)
    magnitude = upper & _MAGNITUDE
    # Neither comes from `split`: below zero would be NaN, and so would be above infinity.
    at_end = ((magnitude == 0) & (rest < 0)) | ((magnitude == _INFINITY) & (rest > 0))
    return backend.bitcast(upper + ops.where(at_end, 0, rest), "float32")


def _zeros_below(remainder: object) -> int:
    """How many of the lowest bits of float32 a remainder of this dtype leaves out."""
    return 8 if keras.backend.standardize_dtype(remainder) == "int8" else 0
