"""Normalization by the moments of a batch, whose backward pass reads the batch as it came in.

Differentiated step by step it would keep the batch twice in float32: four times the bytes of half
inputs. Here only the inputs and a few numbers a channel are kept, and the rest is computed again.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import keras
from keras import ops

from kmp import _backend
from kmp._backend.types import DType, Tensor
from kmp.precision.trees import at_least_float32


class Moments(NamedTuple):
    """What a batch is normalized by: each of the shape of `x` with size 1 on the reduced axes."""

    mean: Tensor
    variance: Tensor  # biased
    count: Tensor  # number of elements, as a float


def normalize_by_batch(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None,
    axis: int,
    epsilon: float,
    synchronized: bool,
    dtype: DType,
) -> tuple[Tensor, Moments]:
    """`(x - mean) / sqrt(variance + epsilon) * gamma + beta`, computed in float32.

    Args:
        x: any float dtype, any shape.
        gamma, beta: float32, with a size other than 1 on the channels' axis alone.
        mask: bool `x.shape[:-1]`, or None; False keeps an element out of the moments.
        axis: int, 0 or more: the axis of the channels.
        epsilon: float, added to the variance.
        synchronized: whether the moments span the replicas of a `tf.distribute` strategy.
        dtype: the dtype of the result.

    Returns:
        The normalized `x`, and the moments in at least float32. Gradients of any order flow from
        both to `x`, to `gamma` and to `beta`.
    """

    def forward(x, gamma, beta, *mask):
        wide = at_least_float32(x)
        found = moments(wide, _spread(mask, x), axis, synchronized)
        gamma, beta = (ops.cast(each, wide.dtype) for each in (gamma, beta))
        factor = ops.rsqrt(found.variance + epsilon) * gamma
        return ops.cast((wide - found.mean) * factor + beta, dtype), *found

    def backward(inputs, kept, cotangents):
        x, gamma, _, *mask = inputs
        mean, variance, count = kept
        to_y, to_mean, to_variance, _ = cotangents
        to_y, centred = ops.cast(to_y, mean.dtype), at_least_float32(x) - mean
        gamma = ops.cast(gamma, mean.dtype)
        inverse = ops.rsqrt(variance + epsilon)
        to_beta = _backend.sum_along(to_y, axis)
        to_gamma = _backend.sum_along(to_y * (centred * inverse), axis)
        # Through the moments each element reaches every output, those of other replicas too.
        to_mean = to_mean - gamma * inverse * to_beta
        to_variance = to_variance - 0.5 * gamma * ops.square(inverse) * to_gamma
        to_mean, to_variance = _over_replicas(synchronized, to_mean, to_variance)
        through = (to_mean + 2 * to_variance * centred) / ops.maximum(count, 1)
        to_x = to_y * (gamma * inverse) + _chosen(through, _spread(mask, x))
        gradients = zip((to_x, to_gamma, to_beta), inputs[:3], strict=True)
        return *(ops.cast(each, x.dtype) for each, x in gradients), *(None for _ in mask)

    def step_by_step():
        inputs = (x, gamma, beta) if mask is None else (x, gamma, beta, mask)
        return _backend.custom_gradient(forward, backward, inputs)

    if mask is None and not synchronized and dtype == keras.backend.standardize_dtype(x.dtype):
        y, *found = _backend.fused_batch_norm(x, gamma, beta, axis, epsilon, step_by_step)
    else:
        y, *found = step_by_step()
    return y, Moments(*found)


def moments(x: Tensor, mask: Tensor | None, axis: int, synchronized: bool = False) -> Moments:
    """Mean, biased variance and number of the elements of `x` over all axes but `axis`.

    The first pass finds a shift near the mean; the second sums what is left, so that neither a
    large mean nor the rounding of the first sum reaches the variance.

    Args:
        x: float32 or float64, of any shape.
        mask: bool of the shape of `x`, or None; False leaves an element out.
        axis: int, 0 or more: the axis that is not reduced. The others stay, with size 1.
        synchronized: whether to reduce over the replicas of a `tf.distribute` strategy as well.

    Returns:
        `Moments` of the dtype of `x`; mean and variance are 0 where the count is 0.
    """
    total = _backend.sum_along(_chosen(x, mask), axis)
    total, count = _over_replicas(synchronized, total, _count(x, mask, axis, total))
    divisor = ops.maximum(count, 1)
    shift = ops.stop_gradient(total / divisor)
    rest = _chosen(x - shift, mask)
    sums = (_backend.sum_along(each, axis) for each in (rest, ops.square(rest)))
    first, second = (each / divisor for each in _over_replicas(synchronized, *sums))
    return Moments(shift + first, ops.maximum(second - ops.square(first), 0), count)


def _spread(mask: Sequence[Tensor], x: Tensor) -> Tensor | None:
    """The mask, if there is one, as bool of the shape of `x`."""
    if not mask:
        return None
    return ops.broadcast_to(ops.expand_dims(ops.cast(mask[0], "bool"), -1), ops.shape(x))


def _chosen(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else ops.where(mask, values, 0)


def _count(x: Tensor, mask: Tensor | None, axis: int, like: Tensor) -> Tensor:
    """The number of elements over all axes but `axis`, of the shape of `like`."""
    if mask is not None:
        return _backend.sum_along(ops.cast(mask, x.dtype), axis)
    sizes = ops.shape(x)
    number = ops.convert_to_tensor(math.prod((*sizes[:axis], *sizes[axis + 1 :])))
    return ops.broadcast_to(ops.cast(number, x.dtype), ops.shape(like))


def _over_replicas(synchronized: bool, *values: Tensor) -> Sequence[Tensor]:
    """Each of the values, summed over the replicas if so asked; in one collective."""
    if not synchronized:
        return values
    return ops.unstack(_backend.all_reduce_sum(ops.stack(values)), len(values))
