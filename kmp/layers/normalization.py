"""Batch normalization in float32 that leaves non-finite batches out of its statistics."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from kmp._backend import backend
from kmp._backend.types import DType, Tensor
from kmp.health.spikes import SkipSpikes
from kmp.health.spikes import get as get_spikes
from kmp.precision.policy import Policy
from kmp.precision.trees import at_least_float32, is_float


@keras.saving.register_keras_serializable(package="kmp")
class Float32BatchNormalization(keras.layers.BatchNormalization):
    """Normalizes in float32 and keeps inf and NaN out of its moving statistics.

    One batch with an inf or NaN makes the moving statistics of `keras.layers.BatchNormalization`
    NaN for good, even if loss scaling makes the optimizer skip the step. This layer leaves such a
    batch out of them:

        mean, variance = moments of float32(inputs) over all axes but `axis`
        outputs = (inputs - mean) / sqrt(variance + 0.001) * gamma + beta
        if every mean and every variance is finite:
            moving_mean = 0.99 * moving_mean + 0.01 * mean
            moving_variance = 0.99 * moving_variance + 0.01 * variance

    The condition covers all channels: either all statistics are updated or none changes by a single
    bit. It is a select on the device, not a branch. Empty or fully masked batches do not change the
    statistics either. The variance is computed about the batch's own mean, so that it is accurate
    for a mean of 1000 with a deviation of 1, and never negative. Inputs are not cast to the compute
    dtype first: raw inputs such as years, which half precision rounds to a few numbers, stay apart.

    A batch with finite activations whose *gradients* overflow does update the statistics.

    One finite batch in the wrong unit ruins the statistics as well, while its gradients look
    ordinary. With `spikes="skip"`, after the first 100 batches, the statistics stay as they were in
    a batch that would multiply the largest moving variance by more than 10. As with gradients, at
    most 8 such batches may follow one another, and one more for every 10,000 batches, so that the
    statistics follow a true change of scale. This is for training loops of your own:
    `kmp.scaled(..., spikes="skip")` does the same for all batch normalizations of a `fit` with
    kmp's callbacks. Two more weights count the batches and how much of this budget is spent; files
    of a layer without the rule still load.

    gamma, beta and the moving statistics are float32 variables under every policy, including
    `"float16"`. Arguments, call arguments and weights are those of
    `keras.layers.BatchNormalization`, except for renormalization, so each layer loads the other's
    weights.

    For the backward pass the layer keeps its inputs in the dtype they came in, and two numbers per
    channel. Automatic differentiation would keep four times the bytes of half inputs. Outside XLA,
    TensorFlow's fused kernel for half inputs is used if there is no mask and the layer is not
    `synchronized`; on CPUs only up to 65536 elements per channel in bfloat16 and 8192 in float16,
    beyond which the kernel loses accuracy. (Without that kernel, TensorFlow's tape keeps more in
    eager mode.) Gradients of any order work, but JAX's forward mode, `jax.jvp`, is not supported in
    training.

    Args:
        axis: int, the axis of the channels; 1 for channels-first inputs.
        momentum: float in [0, 1], the weight of the old moving statistics in each update.
        epsilon: float above 0, added to the variance.
        spikes: None, "skip" or a `kmp.SkipSpikes`, of which `factor` and `patience` count.
        **kwargs: other arguments of `keras.layers.BatchNormalization`, such as `center`,
            `scale`, `synchronized` (TensorFlow: moments over all replicas), `name`, `dtype`.

    Call arguments:
        inputs: `[..., channels, ...]` of any float dtype and any rank from 2.
        training: whether to normalize by the moments of the batch and to update the moving
            statistics; with `trainable=False` the layer never does.
        mask: bool, `inputs.shape[:-1]`; False leaves an element out of the moments.

    Returns:
        A tensor of the shape of `inputs`, in the layer's compute dtype, or in the output dtype of a
        `kmp.Policy` that has one.

    Raises:
        ValueError: if `momentum`, `epsilon`, `spikes` or the shape of `mask` is invalid, if
            `renorm` is True, or if `synchronized` is True on a backend other than TensorFlow.

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
        self,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        spikes: Any = None,
        **kwargs: Any,
    ):
        if not 0 <= momentum <= 1:
            raise ValueError(
                f"`momentum` must be between 0 and 1. Received: momentum={momentum}. The default "
                "is 0.99, which keeps 99% of the moving statistics in each step."
            )
        if not epsilon > 0:
            raise ValueError(
                "`epsilon` must be above 0, or a constant channel would be divided by zero. "
                f"Received: epsilon={epsilon}. The default is 0.001."
            )
        if kwargs.get("renorm"):
            raise ValueError(
                "kmp.layers.Float32BatchNormalization does not renormalize. Received: renorm=True. "
                "Use keras.layers.BatchNormalization(renorm=True, dtype='float32') instead."
            )
        super().__init__(axis=axis, momentum=momentum, epsilon=epsilon, **kwargs)
        self.autocast = False  # raw inputs are not rounded before their mean is subtracted
        self.spikes = get_spikes(spikes)

    def build(self, input_shape):
        super().build(input_shape)
        if self.spikes is not None:
            for name in ("batches", "spent"):
                setattr(
                    self,
                    name,
                    self.add_weight(name=name, shape=(), trainable=False, initializer="zeros"),
                )

    def load_own_variables(self, store):
        if self.spikes is not None and len(store.keys()) == len(self.variables) - 2:
            # Of a layer without the rule: it counts anew.
            counts = {str(len(self.variables) - i): np.zeros(()) for i in (2, 1)}
            store = {**{name: store[name] for name in [*store.keys()]}, **counts}
        super().load_own_variables(store)

    def get_config(self):
        spikes = self.spikes and keras.saving.serialize_keras_object(self.spikes)
        return {**super().get_config(), "spikes": spikes}

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
            outputs, found = self._normalize_by_batch(x, gamma, beta, mask, axis, dtype)
            self._update_moving(*(ops.reshape(each, (-1,)) for each in found))
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

    def _normalize_by_batch(
        self, x: Tensor, gamma: Tensor, beta: Tensor, mask: Tensor | None, axis: int, dtype: DType
    ) -> tuple[Tensor, "Moments"]:
        """Normalize by the moments of the batch, and return them in at least float32.

        The backward pass keeps the batch in the dtype it came in and a few numbers per channel, and
        recomputes the rest. Gradients of any order flow from both results to all three inputs.

        Args:
            x: any float dtype, any shape.
            gamma, beta: float32, of the rank of `x`, with size 1 on all axes but `axis`.
            mask: bool `x.shape[:-1]`, or None; False leaves an element out of the moments.
            axis: 0 or more, the axis of the channels.
            dtype: of the normalized batch.
        """
        epsilon, synchronized = self.epsilon, self.synchronized

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
            to_beta = backend.sum_along(to_y, axis)
            to_gamma = backend.sum_along(to_y * (centred * inverse), axis)
            # Each element affects every output through the moments, also on other replicas.
            to_mean = to_mean - gamma * inverse * to_beta
            to_variance = to_variance - 0.5 * gamma * ops.square(inverse) * to_gamma
            to_mean, to_variance = _over_replicas(synchronized, to_mean, to_variance)
            through = (to_mean + 2 * to_variance * centred) / ops.maximum(count, 1)
            to_x = to_y * (gamma * inverse) + _chosen(through, _spread(mask, x))
            gradients = zip((to_x, to_gamma, to_beta), inputs[:3], strict=True)
            return *(ops.cast(each, x.dtype) for each, x in gradients), *(None for _ in mask)

        def step_by_step():
            inputs = (x, gamma, beta) if mask is None else (x, gamma, beta, mask)
            return backend.custom_gradient(forward, backward, inputs)

        if mask is None and not synchronized and dtype == keras.backend.standardize_dtype(x.dtype):
            y, *found = backend.fused_batch_norm(x, gamma, beta, axis, epsilon, step_by_step)
        else:
            y, *found = step_by_step()
        return y, Moments(*found)

    def _update_moving(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        finite = ops.all(ops.logical_and(ops.isfinite(mean), ops.isfinite(variance)))
        learn = ops.logical_and(finite, count > 0)
        pairs = ((self.moving_mean, mean), (self.moving_variance, variance))
        old = [ops.convert_to_tensor(moving) for moving, _ in pairs]
        new = [
            before * self.momentum + ops.cast(batch, "float32") * (1 - self.momentum)
            for before, (_, batch) in zip(old, pairs, strict=True)
        ]
        if self.spikes is not None:
            learn = self._without_spikes(self.spikes, old[1], new[1], ops.all(learn))
        for (moving, _), before, after in zip(pairs, old, new, strict=True):
            moving.assign(ops.where(learn, after, before))

    def _without_spikes(
        self, rule: SkipSpikes, before: Tensor, after: Tensor, learn: Tensor
    ) -> Tensor:
        """Return bool[], whether the statistics take in a batch, and count it.

        Args:
            rule: the layer's.
            before: float32[channels], the moving variance.
            after: float32[channels], what it would be.
            learn: bool[], whether the batch has sound moments.
        """
        batches, spent = (ops.cast(x, "int32") for x in (self.batches, self.spent))
        keeps = rule.keeps_statistics(before, after, batches, spent)
        spike = ops.logical_and(keeps, learn)
        self.batches.assign(ops.where(learn, batches + 1, batches))
        self.spent.assign(ops.where(learn, rule.spend(spent, spike), spent))
        return ops.logical_and(learn, ops.logical_not(spike))


class Moments(NamedTuple):
    """Moments of a batch; each has the rank of the batch, with size 1 on the reduced axes."""

    mean: Tensor
    variance: Tensor  # biased
    count: Tensor  # number of elements, as a float


def moments(x: Tensor, mask: Tensor | None, axis: int, synchronized: bool = False) -> Moments:
    """Mean, biased variance and number of elements of `x` over all axes but `axis`.

    The first pass finds a shift near the mean. The second sums differences from it, so that neither
    a large mean nor the rounding of the first sum affects the variance.

    Args:
        x: float32 or float64, of any shape.
        mask: bool of the shape of `x`, or None; False leaves an element out.
        axis: 0 or more, the axis that is not reduced. The reduced axes stay, with size 1.
        synchronized: whether to reduce over the replicas of a `tf.distribute` strategy too.

    Returns:
        `Moments` of the dtype of `x`; mean and variance are 0 where the count is 0.
    """
    total = backend.sum_along(_chosen(x, mask), axis)
    total, count = _over_replicas(synchronized, total, _count(x, mask, axis, total))
    divisor = ops.maximum(count, 1)
    shift = ops.stop_gradient(total / divisor)
    rest = _chosen(x - shift, mask)
    sums = (backend.sum_along(each, axis) for each in (rest, ops.square(rest)))
    first, second = (each / divisor for each in _over_replicas(synchronized, *sums))
    return Moments(shift + first, ops.maximum(second - ops.square(first), 0), count)


def _spread(mask: Sequence[Tensor], x: Tensor) -> Tensor | None:
    """The mask, if there is one, broadcast to the shape of `x`."""
    if not mask:
        return None
    return ops.broadcast_to(ops.expand_dims(ops.cast(mask[0], "bool"), -1), ops.shape(x))


def _chosen(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else ops.where(mask, values, 0)


def _count(x: Tensor, mask: Tensor | None, axis: int, like: Tensor) -> Tensor:
    """The number of elements over all axes but `axis`, in the shape of `like`."""
    if mask is not None:
        return backend.sum_along(ops.cast(mask, x.dtype), axis)
    sizes = ops.shape(x)
    number = ops.convert_to_tensor(math.prod((*sizes[:axis], *sizes[axis + 1 :])))
    return ops.broadcast_to(ops.cast(number, x.dtype), ops.shape(like))


def _over_replicas(synchronized: bool, *values: Tensor) -> Sequence[Tensor]:
    """The values; if `synchronized`, summed over the replicas in one collective."""
    if not synchronized:
        return values
    return ops.unstack(backend.all_reduce_sum(ops.stack(values)), len(values))
