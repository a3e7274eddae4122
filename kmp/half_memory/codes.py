"""8 bits for a number of a slot: a code, and a scale that it shares with the rest of its group.

A code `q` stands for `scale * ((q + offset) / (levels + offset)) ** power`, and 0 for 0. That lies
between a power, whose relative steps grow towards small numbers, and a logarithm, whose relative
steps are all alike. The reason is that the errors of a second moment add up over a thousand
updates: where the steps of its code are large, it would wander to numbers that are far too small. A
number becomes one of its neighbours at random, such that the mean is right. A second moment fades
by 0.1% an update: rounded to nearest, it would never move.
"""

import dataclasses
import math
from collections.abc import Sequence

import keras
from keras import ops

from kmp._backend import backend
from kmp._backend.types import Tensor

GROUP = 32  # numbers at most
_SMALLEST_GROUP, _FEWEST = 8, 4096  # numbers; with fewer, scales or codes are not worth it
# Of the scales. With a smaller one the smallest code would not be a normal float32; with a larger
# one XLA takes the reciprocal for 0.
_SMALLEST, _LARGEST = 2.0**-80, 2.0**126


@dataclasses.dataclass(frozen=True)
class Code:
    """What the codes of a slot stand for.

    Attributes:
        dtype: "int8", whose sign is that of the number, or "uint8".
        power, offset: whole numbers, as above.
        reaches_zero: whether a number above zero may become zero. A second moment must not: Adam
            divides by its root.
    """

    dtype: str
    power: int
    offset: int
    reaches_zero: bool

    @property
    def levels(self) -> int:
        """The largest code."""
        return 127 if self.dtype == "int8" else 255


SIGNED = Code("int8", 12, 44, reaches_zero=True)  # over 7 orders of magnitude, in steps from 7%
NON_NEGATIVE = Code("uint8", 20, 72, reaches_zero=False)  # over 13, in steps from 6%
BY_NAME = {"signed": SIGNED, "non-negative": NON_NEGATIVE}
BY_DTYPE = {code.dtype: code for code in BY_NAME.values()}


@dataclasses.dataclass(frozen=True)
class Groups:
    """How the numbers of a slot are grouped: neighbours along one axis.

    Attributes:
        axis: the axis.
        size: numbers in a group; the axis has a multiple of it.
    """

    axis: int
    size: int

    def scales(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scales of a slot of this shape."""
        return tuple(n // self.size if i == self.axis else n for i, n in enumerate(shape))

    def magnitudes(self, x: Tensor) -> Tensor:
        """The magnitudes of a slot, those of each group along an axis of their own after `axis`."""
        n = x.shape[self.axis]
        grouped = (*x.shape[: self.axis], n // self.size, self.size, *x.shape[self.axis + 1 :])
        magnitudes = ops.where(ops.isfinite(x), ops.abs(x), float("inf"))  # a maximum may lose NaN
        return ops.reshape(magnitudes, grouped)

    def largest(self, *slots: Tensor) -> list[Tensor]:
        """The largest magnitude of each group of slots of one shape, in the shape of the scales."""
        return list(backend.maxima([self.magnitudes(x) for x in slots], self.axis + 1))

    def spread(self, scales: Tensor) -> Tensor:
        """Each scale for all of its group, in the shape of the slot."""
        after = self.axis + 1
        grouped = (*scales.shape[:after], self.size, *scales.shape[after:])
        whole = (*grouped[: self.axis], grouped[self.axis] * self.size, *grouped[after + 1 :])
        return ops.reshape(ops.broadcast_to(ops.expand_dims(scales, after), grouped), whole)


def groups_of(shape: Sequence[int], shard: Sequence[int], by_row: bool) -> Groups | None:
    """Choose the groups of a slot.

    The last axis is taken last: on a TPU it lies along the lanes of a register, which to reduce in
    groups takes memory and time.

    Args:
        shape: of the slot.
        shard: the shape of what one device holds of it. No group lies on two.
        by_row: whether the last axis is taken first, as for embeddings: rare words have smaller
            gradients than frequent ones.

    Returns:
        None if the slot has less than 4096 numbers, or no axis groups of at least 8.

    Example:

    >>> groups_of((512, 2048), (512, 2048), by_row=False)
    Groups(axis=0, size=32)
    """
    if math.prod(shape) < _FEWEST:
        return None
    sizes, last = list(map(_largest_divisor, shard)), len(shape) - 1
    others = sorted(range(last), key=lambda axis: (sizes[axis], axis), reverse=True)
    order = [last, *others] if by_row else [*others, last]
    large = [axis for axis in order if sizes[axis] >= _SMALLEST_GROUP]
    return Groups(large[0], sizes[large[0]]) if large else None


def _largest_divisor(n: int) -> int:
    return max((size for size in range(1, GROUP + 1) if n % size == 0), default=1)


def scales_of(largest: Tensor) -> Tensor:
    """The scales of groups, by the largest magnitudes in them, which `Groups.largest` gives.

    Returns:
        float32 that bfloat16 holds: the next one up; NaN for inf and NaN.
    """
    bits = backend.bitcast(ops.clip(largest, _SMALLEST, _LARGEST), "int32")
    rounded = backend.bitcast((bits + (2**16 - 1)) & -(2**16), "float32")
    return ops.where(ops.isfinite(largest), rounded, float("nan"))


def encode(x: Tensor, scales: Tensor, code: Code, groups: Groups, uniform: Tensor) -> Tensor:
    """Encode a slot, which has the scales that `scales_of` gave.

    Args:
        x: float32[shape].
        scales: float32.
        code: how.
        groups: which numbers share a scale.
        uniform: float32[shape] above 0 and below 1, random; or 0.5 throughout, to round to nearest.

    Returns:
        Codes of the shape of `x`.
    """
    # What is the same for a group is computed for the group: a GPU's division is many operations.
    share = ops.abs(x) * groups.spread(1.0 / scales)
    # By a logarithm, since XLA's power takes a GPU four times as many operations.
    root = ops.exp(ops.log(share) * (1 / code.power))
    place = (code.levels + code.offset) * root - code.offset
    lower = ops.clip(ops.floor(place), 0.0, code.levels - 1.0)
    below, above = _value(lower, code), _above_zero(lower + 1, code)
    # By sums and products, since a select takes PyTorch ten times as long.
    codes = lower + ops.cast(share - below > uniform * (above - below), "float32")
    if not code.reaches_zero:
        codes = ops.maximum(codes, ops.sign(x))
    if code.dtype == "int8":
        codes = codes * ops.sign(x)
    return ops.cast(codes, code.dtype)


def decode(codes: Tensor, scales: Tensor, code: Code, groups: Groups) -> Tensor:
    """float32, what codes and scales stand for."""
    codes = ops.cast(codes, "float32")
    values = _above_zero(ops.abs(codes), code) * ops.sign(codes)
    return values * groups.spread(ops.cast(scales, "float32"))


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """float32, from codes and scales of a file, whose dtype and shapes say what they are."""
    shapes = zip(codes.shape, scales.shape, strict=True)
    axis, size = next((i, n // m) for i, (n, m) in enumerate(shapes) if n != m)
    code = BY_DTYPE[keras.backend.standardize_dtype(codes.dtype)]
    return decode(codes, scales, code, Groups(axis, size))


def _value(codes: Tensor, code: Code) -> Tensor:
    """What a code stands for beside a scale of 1."""
    return _above_zero(codes, code) * ops.minimum(codes, 1.0)


def _above_zero(codes: Tensor, code: Code) -> Tensor:
    """What a code above 0 stands for, by products, which backends round alike."""
    square = (codes + code.offset) * (1 / (code.levels + code.offset))
    power, product = code.power, None
    while power:
        if power % 2:
            product = square if product is None else product * square
        square, power = square * square, power // 2
    return product
