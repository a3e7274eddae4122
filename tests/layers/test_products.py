"""Float32OutputDense: what its three products read and return, in the program that is compiled."""

import re

import keras
import numpy as np
import pytest
from keras import ops

from kmp.layers import Float32OutputDense

ROWS, FEATURES, UNITS = 7, 5, 3
HALVES = ["float16", "bfloat16"]


def products_on_jax(layer, x):
    import jax

    def loss(trainable, x):
        return ops.sum(layer.stateless_call(trainable, [], x)[0] ** 2)

    trainable = [v.value for v in layer.trainable_variables]
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(trainable, x).as_text()
    dtypes = r"\(tensor<\w*x(\w+)>, tensor<\w*x(\w+)>\) -> tensor<\w*x(\w+)>"
    return re.findall(rf"stablehlo\.dot_general.*: {dtypes}", text)


def products_on_tensorflow(layer, x):
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x) ** 2)
        return tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])

    text = step.experimental_get_compiler_ir(x)(stage="hlo")
    dots = re.findall(r"= (\w+)\[\S* dot\((\w+)\[[^%]*%[^,]*, (\w+)\[", text)
    return [(left, right, result) for result, left, right in dots]


@pytest.mark.only("jax", "tensorflow")
@pytest.mark.parametrize("half", HALVES)
def test_half_operands_and_float32_results_forward_and_backward(half):
    layer = Float32OutputDense(UNITS, dtype=f"mixed_{half}")
    layer.build((ROWS, FEATURES))
    x = ops.cast(np.ones((ROWS, FEATURES)), half)
    on_jax = keras.backend.backend() == "jax"
    products = (products_on_jax if on_jax else products_on_tensorflow)(layer, x)
    short = {"float16": "f16", "bfloat16": "bf16"}[half]
    assert products == [(short, short, "f32")] * 3


def squared_slope(layer, x):
    """The gradient of half the squared gradient of half the squared output."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(layer(x) ** 2) / 2
            slope = tf.cast(inner.gradient(loss, x), "float32")
            total = tf.reduce_sum(slope**2) / 2
        return outer.gradient(total, x)
    if keras.backend.backend() == "jax":
        import jax

        trainable = [v.value for v in layer.trainable_variables]

        def loss(x):
            return ops.sum(layer.stateless_call(trainable, [], x)[0] ** 2) / 2

        return jax.grad(lambda x: ops.sum(ops.cast(jax.grad(loss)(x), "float32") ** 2) / 2)(x)
    import torch

    x.requires_grad_()
    (slope,) = torch.autograd.grad((layer(x) ** 2).sum() / 2, x, create_graph=True)
    return torch.autograd.grad((slope.float() ** 2).sum() / 2, x)[0]


@pytest.mark.parametrize("half", HALVES)
def test_second_derivatives(half):
    # Integers that every half dtype holds, so that all of it is exact.
    x, kernel = np.array([[1.0, -1], [2, 1]]), np.array([[1.0, 0, 1], [-1, 1, 1]])
    layer = Float32OutputDense(3, use_bias=False, dtype=f"mixed_{half}")
    layer.build(x.shape)
    layer.set_weights([kernel])
    result = squared_slope(layer, ops.cast(x, half))
    gram = kernel @ kernel.T
    np.testing.assert_array_equal(
        ops.convert_to_numpy(ops.cast(result, "float32")), x @ gram @ gram
    )
