"""What kmp's layers need of TensorFlow: gradients of their own, and its batch-statistics kernel."""

import math
from collections.abc import Callable, Sequence

import tensorflow as tf
from keras import ops

from kmp._backend.tensorflow.core import inside_xla, platform
from kmp._backend.types import Tensor

_CUDNN_MIN_EPSILON = 1.001e-5  # cuDNN refuses 1e-5 and less
# Of a channel: up to here a sum of halves of one magnitude is exact in float32, in any order.
_FUSED_ELEMENTS = {"float16": 2**13, "bfloat16": 2**16}
_BLOCK, _LEVELS = 256, 2  # of `sum_along`: no sum has more than 256 terms up to 2**24 elements


def custom_gradient(
    forward: Callable[..., Sequence[Tensor]],
    backward: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor],
) -> Sequence[Tensor]:
    # An eager tape keeps what `forward` computes on the way too, for second derivatives.

    @tf.custom_gradient
    def function(*inputs):
        outputs = tuple(forward(*inputs))
        return outputs, lambda *gradients: backward(inputs, outputs[1:], gradients)

    return function(*inputs)


def fused_batch_norm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    axis: int,
    epsilon: float,
    otherwise: Callable[[], Sequence[Tensor]],
) -> Sequence[Tensor]:
    # The kernel does harm under XLA, which takes the variance as E[x^2] - E[x]^2 and may get it
    # negative, and on CPUs for large batches: it sums the elements of a channel one after another,
    # and finds a variance of 2000 in 65536 equal float16 numbers.
    half = x.dtype in (tf.float16, tf.bfloat16)
    if inside_xla() or tf.config.optimizer.get_jit() or not half or epsilon < _CUDNN_MIN_EPSILON:
        return otherwise()
    shape = ops.shape(x)
    before, channels, after = math.prod(shape[1:axis]), shape[axis], math.prod(shape[axis + 1 :])
    if axis == len(shape) - 1:
        flat, data_format = (shape[0], before, 1, channels), "NHWC"
    else:
        flat, data_format = (shape[0] * before, channels, after, 1), "NCHW"
    count = shape[0] * before * after

    def fused() -> Sequence[Tensor]:
        y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=tf.reshape(x, flat),
            scale=tf.reshape(gamma, (-1,)),
            offset=tf.reshape(beta, (-1,)),
            mean=tf.zeros((0,)),
            variance=tf.zeros((0,)),
            epsilon=epsilon,
            data_format=data_format,
        )
        number = tf.fill(gamma.shape, tf.cast(count, "float32"))
        mean, variance = (tf.reshape(each, gamma.shape) for each in (mean, variance))
        variance *= tf.maximum(number - 1, 1) / tf.maximum(number, 1)  # the kernel's is unbiased
        return tf.ensure_shape(tf.reshape(y, shape), x.shape), mean, variance, number

    if platform() != "cpu":
        return fused()
    most = _FUSED_ELEMENTS[x.dtype.name]
    if isinstance(count, int):
        return fused() if count <= most else otherwise()
    return tf.cond(count <= most, fused, lambda: tuple(otherwise()))


def sum_along(x: Tensor, axis: int) -> Tensor:
    # On CPUs TensorFlow adds the elements of a channel one after another, and of a million of them
    # loses three digits. Sums of blocks, and sums of these sums, lose none.
    if platform() != "cpu":
        return tf.reduce_sum(x, [i for i in range(len(x.shape)) if i != axis], keepdims=True)
    channels, after = x.shape[axis], x.shape[axis + 1 :]
    if after.num_elements() != 1:
        x = tf.reshape(x, (-1, channels, math.prod(ops.shape(x)[axis + 1 :])))
        x = tf.linalg.matrix_transpose(x)
    rows, total = tf.reshape(x, (-1, channels)), tf.zeros((channels,), x.dtype)
    for _ in range(_LEVELS):
        number = ops.shape(rows)[0]
        if isinstance(number, int) and number <= _BLOCK:
            break
        whole = number // _BLOCK
        blocks = tf.reshape(rows[: whole * _BLOCK], (_BLOCK, whole * channels))
        total += tf.reduce_sum(rows[whole * _BLOCK :], 0)
        rows = tf.reshape(tf.reduce_sum(blocks, 0), (whole, channels))
    total += tf.reduce_sum(rows, 0)
    return tf.reshape(total, [1] * axis + [channels] + [1] * len(after))
