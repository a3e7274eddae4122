"""Gradients of biases that a machine adds up in half precision, number after number."""

import functools

import keras
import numpy as np
from keras import layers, ops

from kmp._backend import backend
from kmp.layers import Float32OutputDense

_BIASED = (
    layers.Dense,
    layers.EinsumDense,
    layers.Conv1D,
    layers.Conv2D,
    layers.Conv3D,
    layers.Conv1DTranspose,
    layers.Conv2DTranspose,
    layers.Conv3DTranspose,
    layers.DepthwiseConv1D,
    layers.DepthwiseConv2D,
    layers.SeparableConv1D,
    layers.SeparableConv2D,
)


def stalls_by_its_bias(layer: keras.Layer) -> bool:
    """Whether the gradient of a layer's bias stops growing on this machine in Keras's train step.

    Where XLA compiles the step on TensorFlow, it does not.

    Args:
        layer: one that computes in half precision.
    """
    if not isinstance(layer, _BIASED) or isinstance(layer, Float32OutputDense):
        return False
    has_bias = layer.built and layer.bias is not None and layer.trainable
    # One axis of more than 1 is all that counts: Keras has an operation of its own for a vector.
    return has_bias and _stalls(layer.compute_dtype, tuple(min(x, 2) for x in layer.bias.shape))


@functools.cache
def _stalls(dtype: str, shape: tuple[int, ...]) -> bool:
    """It is tried with 32 sequences of 128 ones."""
    bias = keras.Variable(np.zeros(shape, "float32"), dtype="float32")
    positions = np.zeros((32, 128, *shape), "float32")

    def total():
        x = ops.add(ops.cast(positions, dtype), ops.cast(bias, dtype))
        return ops.sum(ops.cast(x, "float32"))

    _, (gradient,) = backend.gradients(total, [bias])
    return float(ops.convert_to_numpy(gradient).flat[0]) != 32 * 128
