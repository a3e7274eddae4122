"""Expensive statistics (exponent histogram, update ratio), on a strided sample of each variable.

All variables share one concatenation and one segment sum, so neither the compile time nor the
number of kernels grows with their number. The sample is strided along each axis on its own: a
flattened one would gather a sharded variable on every device.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from kmp import _backend
from kmp._backend.types import Tensor
from kmp.health.reduce import SMALL, Part

SAMPLE_SIZE = SMALL  # numbers of a variable at most: a share of 0.1% is then four of them
LOWEST, HIGHEST = -28, 16  # the exponents at the ends, where those beyond are counted too
# Zeros, one bin an exponent, and what is not finite. `[2**e, 2**(e + 1))` of the scaled gradient.
BINS = HIGHEST - LOWEST + 3
COLUMNS = ("weight_norm", "update_norm", "unmoved_share")
WEIGHT_NORM, UPDATE_NORM, UNMOVED_SHARE = range(len(COLUMNS))
_KEYS = len(COLUMNS) + BINS
_EXPONENT_BITS, _BIAS, _MANTISSA = 255, 127, 23


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """One stride an axis that leave at most `SAMPLE_SIZE` numbers, and more than an eighth of it.

    They are odd: a stride of 64 over 512 columns would see eight columns alone.

    Example:

    >>> strides_of((512, 512))
    (7, 15)
    """
    strides = [1] * len(shape)
    while math.prod(left := _left(shape, strides)) > SAMPLE_SIZE:
        axis = len(left) - 1 - left[::-1].index(max(left))
        strides[axis] = 2 * strides[axis] + 1
    return tuple(strides)


def sample_size(shape: Sequence[int]) -> int:
    """How many numbers of a variable of this shape are sampled."""
    return math.prod(_left(shape, strides_of(shape)))


def _left(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    return [-(-size // stride) for size, stride in zip(shape, strides, strict=True)]


def size_before(shapes: Sequence[Sequence[int]]) -> int:
    """How many numbers `sample` takes of variables of these shapes."""
    return 2 * sum(map(sample_size, shapes))


def layout(parts: Sequence[Part], number: int) -> list[int]:
    """The order in which a sample of gradients holds the variables, `number` of them."""
    order = [i for part in parts for i in part.members]
    return order + sorted(set(range(number)) - set(order))


def sample(parts: Sequence[Part], weights: Sequence[Tensor], target: str = "host") -> Tensor:
    """Sample gradients and weights.

    Args:
        parts: the gradients.
        weights: the value of each variable.
        target: what it is compiled for, from `_backend.per_target`.

    Returns:
        float32[2 * n]: samples of the gradients in the order of `layout`, then of the weights.
        A variable that has no gradient gives zeros.
    """
    samples = []
    for part in parts:
        shape = tuple(weights[part.members[0]].shape)
        of_each = part.values
        if not part.stacked:
            of_each = _backend.gradient_sample(part.values, strides_of(shape), target)
        # (The number of a sparse gradient's rows is known at run time alone.)
        samples.append(ops.reshape(of_each, (len(part.members) * sample_size(shape),)))
    order = layout(parts, len(weights))
    absent = order[sum(len(part.members) for part in parts) :]
    missing = sum(sample_size(weights[i].shape) for i in absent)
    sampled = _sampled(weights, order, target)
    return _together([*samples, ops.zeros((missing,), "float32"), *sampled])


def sample_weights(weights: Sequence[Tensor], order: Sequence[int], target: str = "host") -> Tensor:
    """float32[n]: the samples of the weights, in this order."""
    return _together(_sampled(weights, order, target))


def _sampled(weights: Sequence[Tensor], order: Sequence[int], target: str) -> list[Tensor]:
    values = [(weights[i], strides_of(weights[i].shape)) for i in order]
    return [ops.reshape(_backend.gradient_sample(*pair, target), (-1,)) for pair in values]


def _together(samples: Sequence[Tensor]) -> Tensor:
    return ops.cast(ops.concatenate(samples), "float32")  # of whatever they are promoted to


def measure_sample(
    before: Tensor, after: Tensor, shapes: Sequence[Sequence[int]], order: Sequence[int]
) -> Tensor:
    """Measure gradients, weights and their update.

    Args:
        before: float32[2 * n], from `sample` before the update, of the scaled gradients.
        after: float32[n], from `sample_weights` after it.
        shapes: the shape of each variable.
        order: the order of the samples.

    Returns:
        float32[num_variables, 3 + 47]: `COLUMNS`, then the counts of zeros, of each exponent of
        the gradient and of what is not finite. Norms are estimates of the whole variable's.
    """
    sizes = [sample_size(shape) for shape in shapes]
    gradient, weights = before[: sum(sizes)], before[sum(sizes) :]
    update = ops.subtract(after, weights)
    unmoved = ops.logical_and(ops.not_equal(gradient, 0.0), ops.equal(update, 0.0))
    first_key = np.repeat(np.array(order, "int32") * _KEYS, [sizes[i] for i in order])
    first_key = ops.convert_to_tensor(first_key, "int32")
    row = ops.arange(len(COLUMNS) + 1, dtype="int32")[:, None]
    keys = _chosen(row, [WEIGHT_NORM, UPDATE_NORM, UNMOVED_SHARE, len(COLUMNS) + _bin(gradient)])
    values = [ops.square(after), ops.square(update), ops.cast(unmoved, "float32"), 1.0]
    sums = ops.segment_sum(
        ops.reshape(_chosen(row, values), (-1,)),
        ops.reshape(first_key + keys, (-1,)),
        num_segments=len(sizes) * _KEYS,
    )
    sums = ops.reshape(sums, (len(sizes), _KEYS))
    whole = np.array([math.prod(s) / max(n, 1) for s, n in zip(shapes, sizes, strict=True)])
    whole = ops.convert_to_tensor(whole.astype("float32")[:, None])
    column = ops.arange(_KEYS, dtype="int32")
    nonzero = ops.where(column > len(COLUMNS), sums, 0.0)
    shares = sums / ops.maximum(ops.sum(nonzero, axis=1, keepdims=True), 1.0)
    norms = ops.sqrt(sums * whole)
    return _chosen(column, [norms, norms, shares, sums])


def _chosen(number: Tensor, options: Sequence[Any]) -> Tensor:
    """The option that each number says, the last one beyond.

    Of a concatenation of few operands XLA's CPU compiler makes twice as much code.
    """
    chosen = options[-1]
    for i, option in reversed(list(enumerate(options[:-1]))):
        chosen = ops.where(ops.equal(number, i), option, chosen)
    return chosen


def _bin(values: Tensor) -> Tensor:
    """int32[n]: the bin of each number, read off its bits: exact, and without a logarithm."""
    bits = ops.right_shift(ops.view(values, "int32"), _MANTISSA)
    exponent = ops.bitwise_and(bits, _EXPONENT_BITS) - _BIAS
    inner = ops.clip(exponent, LOWEST, HIGHEST) - LOWEST + 1
    outer = ops.where(ops.equal(values, 0.0), 0, inner)
    return ops.cast(ops.where(exponent > _BIAS, BINS - 1, outer), "int32")
