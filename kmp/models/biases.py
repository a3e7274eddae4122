"""Gradients of biases that a machine adds up in half precision, number after number."""

import functools

import keras
import numpy as np
from keras import ops

from kmp._backend import backend


@functools.cache
def biases_stall(dtype: str) -> bool:
    """Whether the gradient of a bias stops growing in `dtype` on this machine without a compiler.

    It is tried with 32 sequences of 128 ones.
    """
    bias = keras.Variable(np.zeros(4, "float32"), dtype="float32")
    positions = np.zeros((32, 128, 4), "float32")

    def total():
        x = ops.add(ops.cast(positions, dtype), ops.cast(bias, dtype))
        return ops.sum(ops.cast(x, "float32"))

    _, (gradient,) = backend.gradients(total, [bias])
    return float(ops.convert_to_numpy(gradient)[0]) != 32 * 128
