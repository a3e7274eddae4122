"""Batch normalization whose statistics are float32 and take in no batch that is not finite."""

from typing import Any

import keras
from keras import ops

from kmp._backend.types import DType, Tensor
from kmp.layers.normalize import normalize_by_batch
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
