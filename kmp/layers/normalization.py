"""Batch normalization whose statistics are float32 and take in no batch that is not finite."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from kmp import _backend
from kmp._backend.types import DType, Tensor
from kmp.precision.policy import Policy
from kmp.precision.trees import at_least_float32, is_float


@keras.saving.register_keras_serializable(package="kmp")
class Float32BatchNormalization(keras.layers.BatchNormalization):
    """Normalizes each channel in float32, with moving statistics that no bad batch can poison.

    One batch with an inf or a NaN in it leaves `keras.layers.BatchNormalization` with moving
    statistics that are NaN for ever, even when the loss scale makes the optimizer skip the step.
    This layer skips such a batch too:

        mean, variance = moments of float32(inputs) over all axes but `axis`
        outputs = (inputs - mean) / sqrt(variance + 0.001) * gamma + beta
        if every mean and every variance is finite:
            moving_mean = 0.99 * moving_mean + 0.01 * mean
            moving_variance = 0.99 * moving_variance + 0.01 * variance

    The condition spans all channels, and no bit of either statistic changes where it fails; it is
    a select on the device, not a branch. Nor does a channel without a single element, in an empty
    or wholly masked batch, change its statistics. Because a mean of 1000 with a deviation of 1 is
    nothing unusual, the variance is taken about the batch's own mean, and is never negative.

    gamma, beta and the moving statistics are float32 variables under every policy, `"float16"`
    included. Arguments, call arguments and weights are those of `keras.layers.BatchNormalization`,
    renormalization aside, so each loads the other's weights.

    For the backward pass the layer keeps its inputs as they come, half if they are half, and two
    numbers a channel; differentiated step by step it would keep four times as much. Outside XLA
    TensorFlow has a fused kernel for half inputs that does so: it is used without a mask, not
    `synchronized`, and on CPUs up to 65536 elements a channel in bfloat16 and 8192 in float16,
    beyond which it loses accuracy. (In eager mode TensorFlow's tape keeps more where the kernel is
    not used.) Gradients of any order are there, but JAX's forward mode, `jax.jvp`, cannot pass the
    layer in training.

    A batch with finite activations whose *gradients* overflow does update the statistics: its
    activations are as good as any.

    Args:
        axis: int, the axis of the channels; 1 for channels-first inputs.
        momentum: float in [0, 1], the share that the moving statistics keep.
        epsilon: float above 0, added to the variance.
        **kwargs: the further arguments of `keras.layers.BatchNormalization`, such as `center`,
            `scale`, `synchronized` (TensorFlow: moments over all replicas), `name`, `dtype`.

    Call arguments:
        inputs: `[..., channels, ...]` of any float dtype and any rank from 2.
        training: whether to use the moments of the batch and to update the moving statistics;
            with `trainable=False` the layer does neither.
        mask: bool, `inputs.shape[:-1]`; False keeps an element out of the moments.

    Returns:
        The shape of `inputs`, in the layer's compute dtype, or in the output dtype of a
        `kmp.Policy` that has one.

    Raises:
        ValueError: `momentum`, `epsilon` or the shape of `mask` is not as above; `renorm=True`;
            `synchronized=True` on a backend other than TensorFlow.

    Example:
        >>> layer = Float32BatchNormalization(dtype="mixed_float16")
        >>> outputs = layer(keras.ops.full((4, 3), float("inf")), training=True)
        >>> keras.ops.convert_to_numpy(layer.moving_mean)
        array([0., 0., 0.], dtype=float32)

    Source: Ioffe and Szegedy, "Batch Normalization" (2015), as in
    `keras.layers.BatchNormalization`; the shifted two-pass variance is that of Chan, Golub and
    LeVeque, "Algorithms for Computing the Sample Variance" (1983).
    """

    def __init__(
        self, axis: int = -1, momentum: float = 0.99, epsilon: float = 1e-3, **kwargs: Any
    ):
        if not 0 <= momentum <= 1:
            raise ValueError(
                f"`momentum` must be between 0 and 1. Received: momentum={momentum}. The default "
                "of 0.99 keeps 99% of the moving statistics in each step."
            )
        if not epsilon > 0:
            raise ValueError(
                f"`epsilon` must be above 0, or a constant channel divides by zero. Received: "
                f"epsilon={epsilon}. The default is 0.001."
            )
        if kwargs.get("renorm"):
            raise ValueError(
                "kmp.layers.Float32BatchNormalization does not renormalize. Received: renorm=True. "
                "Use keras.layers.BatchNormalization(renorm=True, dtype='float32') instead."
            )
        super().__init__(axis=axis, momentum=momentum, epsilon=epsilon, **kwargs)

    def add_weight(self, *args, **kwargs):
        return super().add_weight(*args, **{**kwargs, "dtype": "float32", "autocast": False})

    def call(self, inputs, training=None, mask=None):
        if mask is not None and len(mask.shape) != len(inputs.shape) - 1:
            raise ValueError(
                "`mask` must have the shape of `inputs` without its last axis. Received: "
                f"mask.shape={tuple(mask.shape)}, inputs.shape={tuple(inputs.shape)}."
            )
        x = inputs if is_float(inputs) else at_least_float32(inputs)
        axis = self.axis % len(x.shape)
        along_channels = [1] * len(x.shape)
        along_channels[axis] = -1
        channels = self.moving_mean.shape
        gamma = self.gamma if self.scale else ops.ones(channels, "float32")
        beta = self.beta if self.center else ops.zeros(channels, "float32")
        gamma, beta = (ops.reshape(each, along_channels) for each in (gamma, beta))
        dtype = self._returned_dtype()
        if training and self.trainable:
            outputs, moments = normalize_by_batch(
                x, gamma, beta, mask, axis, self.epsilon, self.synchronized, dtype
            )
            self._update_moving(*(ops.reshape(each, (-1,)) for each in moments))
            return outputs
        mean = ops.reshape(self.moving_mean, along_channels)
        variance = ops.reshape(self.moving_variance, along_channels)
        factor = ops.rsqrt(variance + self.epsilon) * gamma
        wide = at_least_float32(x)
        mean, factor, beta = (ops.cast(each, wide.dtype) for each in (mean, factor, beta))
        return ops.cast((wide - mean) * factor + beta, dtype)

    def compute_output_spec(self, inputs, *args, **kwargs):
        return keras.KerasTensor(inputs.shape, dtype=self._returned_dtype())

    def _returned_dtype(self) -> DType:
        policy = self.dtype_policy
        return policy.output_dtype if isinstance(policy, Policy) else self.compute_dtype

    def _update_moving(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        finite = ops.all(ops.logical_and(ops.isfinite(mean), ops.isfinite(variance)))
        learn = ops.logical_and(finite, count > 0)
        for moving, batch in ((self.moving_mean, mean), (self.moving_variance, variance)):
            old = ops.convert_to_tensor(moving)
            new = old * self.momentum + ops.cast(batch, "float32") * (1 - self.momentum)
            moving.assign(ops.where(learn, new, old))


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

    The backward pass reads the batch as it came in. Differentiated step by step it would keep the
    batch twice in float32: four times the bytes of half inputs. Here only the inputs and a few
    numbers a channel are kept, and the rest is computed again.

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
