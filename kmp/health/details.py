"""Expensive statistics (exponent histogram, update ratio), on a strided sample of each variable.

All variables share one concatenation and one segment sum, so that neither the compile time nor the
number of kernels grows with the number of variables. The sample is strided along each axis,
so that no variable has to be flattened first.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from kmp._backend import UNSHARDED, Sharding, backend
from kmp._backend.types import Gradient, Tensor
from kmp.health.measure import SMALL, GradientGroup

SAMPLE_SIZE = SMALL  # the most values sampled from a variable; 0.1% of them is four
LOWEST, HIGHEST = -28, 16  # exponents of the outermost bins, which also count those beyond
# One bin for zeros, one for each exponent e, counting `[2**e, 2**(e + 1))`, one for non-finite.
BINS = HIGHEST - LOWEST + 3
COLUMNS = ("weight_norm", "update_norm", "unmoved_share")
WEIGHT_NORM, UPDATE_NORM, UNMOVED_SHARE = range(len(COLUMNS))
_KEYS = len(COLUMNS) + BINS
_EXPONENT_BITS, _BIAS, _MANTISSA = 255, 127, 23


class Cut(NamedTuple):
    """How a variable, or the shard of it on one device, is sampled."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # one for each axis

    @property
    def size(self) -> int:
        """How many values are sampled."""
        pairs = zip(self.shape, self.strides, strict=True)
        return math.prod(-(-size // stride) for size, stride in pairs)


def cut(shape: Sequence[int], shard: Sequence[int] | None = None) -> Cut:
    """Choose strides that leave at most `SAMPLE_SIZE` values, but more than an eighth of that.

    Strides are odd, so they do not fall in step with powers of two, such as heads of 64 columns.

    Args:
        shape: of the variable.
        shard: the shape of the shard on one device; `shape` if all of it is there. Each device
            samples its shard, so that the shards together leave that many values.

    Example:

    >>> cut((512, 512))
    Cut(shape=(512, 512), strides=(7, 15))
    >>> cut((512, 512), (512, 128))
    Cut(shape=(512, 128), strides=(15, 7))
    """
    shard = tuple(shape if shard is None else shard)
    found = Cut(shard, (1,) * len(shard))
    shards = math.prod(shape) // max(math.prod(shard), 1)
    while found.size * shards > SAMPLE_SIZE and found.size > 1:
        left = [-(-size // stride) for size, stride in zip(*found, strict=True)]
        longest = max(range(len(left)), key=lambda axis: (left[axis], axis))
        strides = list(found.strides)
        strides[longest] = 2 * strides[longest] + 1
        found = found._replace(strides=tuple(strides))
    return found


def layout(groups: Sequence[GradientGroup], number: int) -> list[int]:
    """The order of the variables in a sample: those in `groups`, then the rest of `number`."""
    order = [i for group in groups for i in group.members]
    return order + sorted(set(range(number)) - set(order))


def sample(
    groups: Sequence[GradientGroup],
    weights: Sequence[Tensor],
    cuts: Sequence[Cut],
    target: str = "host",
    sharding: Sharding = UNSHARDED,
) -> Tensor:
    """Sample gradients and weights, on the target that `backend.per_target` names.

    Returns:
        float32[2 * n]: samples of the gradients in the order of `layout`, then of the weights in
        the same order. For a variable without a gradient, the former are zeros.
    """
    samples = []
    for group in groups:
        if group.stacked:
            samples.append(ops.reshape(group.values, (-1,)))
        else:
            samples.append(_sampled(group.values, cuts[group.members[0]], target, sharding))
    order = layout(groups, len(weights))
    absent = order[sum(len(group.members) for group in groups) :]
    samples += [ops.zeros((cuts[i].size,), "float32") for i in absent]
    before = sample_weights(weights, cuts, order, target, sharding)
    return ops.concatenate([_together(samples), before])


def sample_weights(
    weights: Sequence[Tensor],
    cuts: Sequence[Cut],
    order: Sequence[int],
    target: str = "host",
    sharding: Sharding = UNSHARDED,
) -> Tensor:
    """Sample weights: float32[n], with the variables in this order."""
    return _together([_sampled(weights[i], cuts[i], target, sharding) for i in order])


def _sampled(values: Gradient, cut: Cut, target: str, sharding: Sharding) -> Tensor:
    found = sharding.replicate(backend.gradient_sample(values, cut.strides, target))
    # A sparse gradient's number of rows is only known at run time.
    return found if found.shape == (cut.size,) else ops.reshape(found, (cut.size,))


def _together(samples: Sequence[Tensor]) -> Tensor:
    """float32[n]: samples one after the other."""
    return ops.cast(ops.concatenate(samples) if len(samples) > 1 else samples[0], "float32")


def measure_sample(
    before: Tensor,
    after: Tensor,
    cuts: Sequence[Cut],
    order: Sequence[int],
    sharding: Sharding = UNSHARDED,
) -> Tensor:
    """Measure gradients, weights and updates on their samples.

    Args:
        before: float32[2 * n], from `sample`: the scaled gradients, and weights before the update.
        after: float32[n], from `sample_weights`, after the update.
        cuts, order: how the variables are sampled, and in which order.
        sharding: how the variables lie on the devices.

    Returns:
        float32[num_variables, 3 + 47]: `COLUMNS`, then the gradient's histogram: zeros, each
        exponent, non-finite values. Norms are estimates for the whole variable.
    """
    sizes = [each.size for each in cuts]
    gradient, weights = before[: sum(sizes)], before[sum(sizes) :]
    update = ops.subtract(after, weights)
    unmoved = ops.logical_and(ops.not_equal(gradient, 0.0), ops.equal(update, 0.0))
    rows = np.repeat(np.array(order, "int32"), [sizes[i] for i in order])
    first_key = backend.constant(rows * np.int32(_KEYS))
    row = ops.arange(len(COLUMNS) + 1, dtype="int32")[:, None]
    keys = _chosen(row, [WEIGHT_NORM, UPDATE_NORM, UNMOVED_SHARE, len(COLUMNS) + _bin(gradient)])
    values = [ops.square(after), ops.square(update), ops.cast(unmoved, "float32"), 1.0]
    sums = backend.segment_sum(
        ops.reshape(_chosen(row, values), (-1,)),
        ops.reshape(first_key + keys, (-1,)),
        len(sizes) * _KEYS,
    )
    sums, _ = sharding.reduced(ops.reshape(sums, (len(sizes), _KEYS)))
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
    bits = ops.right_shift(backend.bitcast(values, "int32"), _MANTISSA)
    exponent = (bits & _EXPONENT_BITS) - _BIAS  # `&`, as in `hash_bits`
    inner = ops.clip(exponent, LOWEST, HIGHEST) - LOWEST + 1
    outer = ops.where(ops.equal(values, 0.0), 0, inner)
    return ops.cast(ops.where(exponent > _BIAS, BINS - 1, outer), "int32")
