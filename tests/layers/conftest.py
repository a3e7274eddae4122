"""One way, on three backends, to run a layer forward and backward."""

import keras
import numpy as np
import pytest
from keras import ops

BACKEND = keras.backend.backend()


def _tensorflow(layer, x, cotangent, jit, kwargs):
    import tensorflow as tf

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, **kwargs)
            loss = tf.reduce_sum(ops.cast(y, cotangent.dtype) * cotangent)
        return y, tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])

    return (tf.function(step, jit_compile=True) if jit else step)(x)


def _jax(layer, x, cotangent, jit, kwargs):
    import jax

    def loss(x, trainable):
        frozen = [v.value for v in layer.non_trainable_variables]
        y, _ = layer.stateless_call(trainable, frozen, x, **kwargs)
        return ops.sum(ops.cast(y, cotangent.dtype) * cotangent), y

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    trainable = [v.value for v in layer.trainable_variables]
    (_, y), (to_x, to_variables) = (jax.jit(step) if jit else step)(x, trainable)
    return y, [to_x, *to_variables]


def _torch(layer, x, cotangent, jit, kwargs):
    x.requires_grad_()
    y = layer(x, **kwargs)
    ops.sum(ops.cast(y, cotangent.dtype) * cotangent).backward()
    return y, [x.grad, *(v.value.grad for v in layer.trainable_variables)]


@pytest.fixture
def pull_back():
    """`pull_back(layer, x, cotangent, jit)`: output, and gradients of sum(output * cotangent)."""

    def run(layer, x, cotangent, jit=False, **kwargs):
        if not layer.built:
            layer.build(x.shape)
        x = ops.convert_to_tensor(x)
        cotangent = ops.convert_to_tensor(cotangent, "float32")
        runner = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}[BACKEND]
        y, gradients = runner(layer, x, cotangent, jit, kwargs)
        return as_numpy(y), [as_numpy(g) for g in gradients]

    return run


def as_numpy(x):
    """A NumPy array of the same dtype, bfloat16 included."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    return ops.convert_to_numpy(ops.cast(x, "float32")).astype(np.dtype(dtype))


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.only("tensorflow", "jax"))])
def jit(request):
    """Eager, and compiled by XLA; PyTorch compiles in the tests that say so."""
    return request.param


@pytest.fixture
def two_replicas():
    """A MirroredStrategy over two CPU devices."""
    import replicas

    return replicas.mirrored(2)
