"""Expensive statistics (exponent histogram, update ratio), on a strided sample of each variable.

All variables share one concatenation and one segment sum, so that neither the compile time nor the
number of kernels grows with the number of variables. The sample is strided along each axis: a
sample of the flattened variable would gather a sharded variable on every device.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from kmp import _backend
from kmp._backend.types import Gradient, Tensor
from kmp._keras.optimizer import on_every_device
from kmp.health.measure import SMALL, Part

SAMPLE_SIZE = SMALL  # the most values sampled from a variable; 0.1% of them is four
LOWEST, HIGHEST = -28, 16  # exponents of the outermost bins, which also count those beyond
# One bin for zeros, one for each exponent e, counting `[2**e, 2**(e + 1))`, one for non-finite.
BINS = HIGHEST - LOWEST + 3
COLUMNS = ("weight_norm", "update_norm", "unmoved_share")
WEIGHT_NORM, UPDATE_NORM, UNMOVED_SHARE = range(len(COLUMNS))
_KEYS = len(COLUMNS) + BINS
_EXPONENT_BITS, _BIAS, _MANTISSA = 255, 127, 23


class Cut(NamedTuple):
    """How a variable is sampled."""

    # The variable's, with each axis that is split over devices as two: pieces, size of each.
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # one for each of these axes
    split: tuple[int, ...] = ()  # which of these axes count pieces

    @property
    def left(self) -> list[int]:
        """What the strides leave of each axis."""
        return [-(-size // stride) for size, stride in zip(self.shape, self.strides, strict=True)]

    @property
    def size(self) -> int:
        """How many values are sampled."""
        return math.prod(self.left)

    @property
    def of_sample(self) -> tuple[int, ...]:
        """The shape of the sample: `[size]`, or `[pieces, size of each]`."""
        pieces = math.prod(self.shape[axis] for axis in self.split)
        return (pieces, self.size // pieces) if self.split else (self.size,)


def cut(shape: Sequence[int], shards: Sequence[int] = ()) -> Cut:
    """Choose strides that leave at most `SAMPLE_SIZE` values, but more than an eighth of that.

    Strides are odd: a stride of 64 over 512 columns would only ever see eight columns.

    Args:
        shape: of the variable.
        shards: into how many pieces each axis is split over devices. Each device samples its piece.

    Example:

    >>> cut((512, 512))
    Cut(shape=(512, 512), strides=(7, 15), split=())
    >>> cut((512, 512), (1, 4))
    Cut(shape=(512, 4, 128), strides=(15, 1, 7), split=(1,))
    """
    axes: list[int] = []
    split: list[int] = []
    for size, pieces in zip(shape, shards or [1] * len(shape), strict=True):
        if pieces > 1 and size % pieces == 0:
            split.append(len(axes))
            axes += [pieces, size // pieces]
        else:
            axes.append(size)
    within = [axis for axis in range(len(axes)) if axis not in split]
    found = Cut(tuple(axes), (1,) * len(axes), tuple(split))
    while found.size > SAMPLE_SIZE and any(found.left[axis] > 1 for axis in within):
        longest = max(within, key=lambda axis: (found.left[axis], axis))
        strides = list(found.strides)
        strides[longest] = 2 * strides[longest] + 1
        found = found._replace(strides=tuple(strides))
    return found


def layout(parts: Sequence[Part], number: int) -> list[int]:
    """The order of the variables in a sample: those in `parts`, then the rest of `number`."""
    order = [i for part in parts for i in part.members]
    return order + sorted(set(range(number)) - set(order))


def sample(
    parts: Sequence[Part], weights: Sequence[Tensor], cuts: Sequence[Cut], target: str = "host"
) -> Tensor:
    """Sample gradients and weights, on the target that `_backend.per_target` names.

    Returns:
        float32[2 * n]: samples of the gradients in the order of `layout`, then of the weights in
        the same order. For a variable without a gradient, the former are zeros.
    """
    samples = []
    for part in parts:
        if part.stacked:
            samples.append(ops.reshape(part.values, (-1,)))
        else:
            samples.append(_sampled(part.values, cuts[part.members[0]], target))
    order = layout(parts, len(weights))
    absent = order[sum(len(part.members) for part in parts) :]
    samples += [ops.zeros(cuts[i].of_sample, "float32") for i in absent]
    before = sample_weights(weights, cuts, order, target)
    return ops.concatenate([_together(samples), before])


def sample_weights(
    weights: Sequence[Tensor], cuts: Sequence[Cut], order: Sequence[int], target: str = "host"
) -> Tensor:
    """Sample weights: float32[n], with the variables in this order."""
    return _together([_sampled(weights[i], cuts[i], target) for i in order])


def _sampled(values: Gradient, cut: Cut, target: str) -> Tensor:
    if cut.split:
        values = ops.reshape(values, cut.shape)
    found = _backend.gradient_sample(values, cut.strides, target)
    if cut.split:
        others = [axis for axis in range(len(cut.shape)) if axis not in cut.split]
        found = ops.transpose(found, [*cut.split, *others])
    # A sparse gradient's number of rows is only known at run time.
    return found if found.shape == cut.of_sample else ops.reshape(found, cut.of_sample)


def _together(samples: Sequence[Tensor]) -> Tensor:
    """float32[n]: samples one after the other; of those in equally many pieces, piece by piece.

    So a device puts its pieces of all variables together, and they are collected in one go.
    """
    joined = [ops.concatenate(some, axis=-1) for some in _by_pieces(samples)]
    vectors = [on_every_device(ops.reshape(x, (-1,)) if len(x.shape) > 1 else x) for x in joined]
    return ops.cast(ops.concatenate(vectors) if len(vectors) > 1 else vectors[0], "float32")


def _rows(cuts: Sequence[Cut], order: Sequence[int]) -> np.ndarray:
    """int32[n]: the variable that each value of `_together` is of."""
    rows = [np.full(cuts[i].of_sample, i, "int32") for i in order]
    return np.concatenate([np.concatenate(some, axis=-1).ravel() for some in _by_pieces(rows)])


def _by_pieces(samples: Sequence[Any]) -> list[list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for each in samples:
        groups.setdefault(tuple(each.shape[:-1]), []).append(each)
    return list(groups.values())


def measure_sample(
    before: Tensor, after: Tensor, cuts: Sequence[Cut], order: Sequence[int]
) -> Tensor:
    """Measure gradients, weights and updates on their samples.

    Args:
        before: float32[2 * n], from `sample`: the scaled gradients, and weights before the update.
        after: float32[n], from `sample_weights`, after the update.
        cuts, order: how the variables are sampled, and in which order.

    Returns:
        float32[num_variables, 3 + 47]: `COLUMNS`, then the gradient's histogram: zeros, each
        exponent, non-finite values. Norms are estimates for the whole variable.
    """
    sizes = [each.size for each in cuts]
    gradient, weights = before[: sum(sizes)], before[sum(sizes) :]
    update = ops.subtract(after, weights)
    unmoved = ops.logical_and(ops.not_equal(gradient, 0.0), ops.equal(update, 0.0))
    first_key = _backend.constant(_rows(cuts, order) * np.int32(_KEYS))
    row = ops.arange(len(COLUMNS) + 1, dtype="int32")[:, None]
    keys = _chosen(row, [WEIGHT_NORM, UPDATE_NORM, UNMOVED_SHARE, len(COLUMNS) + _bin(gradient)])
    values = [ops.square(after), ops.square(update), ops.cast(unmoved, "float32"), 1.0]
    sums = _backend.segment_sum(
        ops.reshape(_chosen(row, values), (-1,)),
        ops.reshape(first_key + keys, (-1,)),
        len(sizes) * _KEYS,
    )
    sums = ops.reshape(sums, (len(sizes), _KEYS))
    whole = [[math.prod(each.shape) / max(each.size, 1)] for each in cuts]
    column = ops.arange(_KEYS, dtype="int32")
    nonzero = ops.where(column > len(COLUMNS), sums, 0.0)
    shares = sums / ops.maximum(ops.sum(nonzero, axis=1, keepdims=True), 1.0)
    norms = ops.sqrt(sums * ops.convert_to_tensor(whole, "float32"))
    return _chosen(column, [norms, norms, shares, sums])


def _chosen(number: Tensor, options: Sequence[Any]) -> Tensor:
    """`options[number]` elementwise; the last option for numbers beyond it.

    XLA's CPU compiler makes twice as much code from a concatenation of these few operands.
    """
    chosen = options[-1]
    for i, option in reversed(list(enumerate(options[:-1]))):
        chosen = ops.where(ops.equal(number, i), option, chosen)
    return chosen


def _bin(values: Tensor) -> Tensor:
    """int32[n]: the bin of each value, read from its bits: exact, without a logarithm."""
    bits = ops.right_shift(_backend.bitcast(values, "int32"), _MANTISSA)
    exponent = ops.bitwise_and(bits, _EXPONENT_BITS) - _BIAS
    inner = ops.clip(exponent, LOWEST, HIGHEST) - LOWEST + 1
    outer = ops.where(ops.equal(values, 0.0), 0, inner)
    return ops.cast(ops.where(exponent > _BIAS, BINS - 1, outer), "int32")
