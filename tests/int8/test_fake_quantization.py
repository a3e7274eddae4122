"""The rounding in training is that of int8 inference."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras.src.backend.common.variables import AutocastScope
from older import needs
from quantized_models import fit, one_dense, value, values

import kmp
from kmp.int8.fake_quantization import FakeQuantizedDense

pytestmark = pytest.mark.slow


def rounded(x, step, bits):
    """By its definition, in NumPy: to multiples of a step, symmetric, in so many bits."""
    levels = 2 ** (bits - 1) - 1
    return np.clip(np.floor(x / step + 0.5), -levels, levels) * step


LAYERS = {
    "dense": (lambda: layers.Dense(5, "relu"), (4, 6)),
    "heads": (lambda: layers.EinsumDense("abc,cde->abde", (None, 3, 2), bias_axes="de"), (2, 4, 6)),
    "joined": (lambda: layers.EinsumDense("abde,def->abf", (None, 5), bias_axes="f"), (2, 4, 3, 2)),
    "apart": (lambda: layers.EinsumDense("abc,bcd->abd", (3, 2)), (2, 3, 4)),
    "conv1": (lambda: layers.Conv1D(4, 2, padding="causal", dilation_rate=2), (2, 5, 3)),
    "conv2": (lambda: layers.Conv2D(4, (2, 3), strides=(1, 2), groups=2), (2, 4, 5, 2)),
    "conv3": (lambda: layers.Conv3D(2, 2, padding="same", use_bias=False), (2, 3, 3, 3, 2)),
}


SUMMED = {"heads": (0,), "joined": (0, 1), "apart": (1,)}  # axes of the kernel, of EinsumDense


@needs("quantization_config")
@pytest.mark.parametrize("name", LAYERS)
def test_training_and_int8_both_give_what_rounding_by_hand_gives(name):
    """The oracle is Keras's plain layer on kernel and inputs that NumPy has rounded."""
    make, shape = LAYERS[name]
    bits = (8, 8) if name in ("dense", "conv2") else (4, 6)
    x = np.random.default_rng(2).normal(size=shape).astype("float32")
    model = keras.Sequential([keras.Input(shape[1:]), make()])
    plain = keras.Sequential([keras.Input(shape[1:]), make()])
    kernel, *bias = model.get_weights()
    bias = [np.linspace(-1, 1, b.size).astype("float32").reshape(b.shape) for b in bias]
    model.set_weights([kernel, *bias])

    summed = SUMMED.get(name, tuple(range(kernel.ndim - 1)))
    weight_step = np.abs(kernel).max(summed, keepdims=True) / (2 ** (bits[0] - 1) - 1)
    # The range is that of the smaller batch: the other one has inputs beyond it.
    range_ = np.abs(x / 2).max()
    input_step = range_ / (2 ** (bits[1] - 1) - 1)
    plain.set_weights([rounded(kernel, weight_step, bits[0]), *bias])
    expected = value(plain(rounded(x, input_step, bits[1])))

    kmp.quantize_aware(model, weight_bits=bits[0], activation_bits=bits[1])
    model(x / 2, training=True)
    assert value(model.layers[0].input_range) == np.float32(range_)
    # A sum of at most 16 products, each rounded to 2**-24 of itself.
    close = {"rtol": 0, "atol": 16 * 2.0**-22 * np.abs(expected).max()}
    np.testing.assert_allclose(value(model(x)), expected, **close)

    report = kmp.to_int8(model)
    integers = value(model.layers[0].kernel)
    assert integers.dtype == "int8"
    assert np.abs(integers).max() == 2 ** (bits[0] - 1) - 1
    np.testing.assert_allclose(value(model(x)), expected, **close)
    assert [row.after for row in report.rows] == ["int8_from_float32"]


@needs("quantization_config")
@pytest.mark.parametrize("kind", ["dense", "heads", "conv2"])
def test_the_kernel_in_training_has_the_integers_of_the_int8_one(kind):
    make, shape = LAYERS[kind]
    model = keras.Sequential([keras.Input(shape[1:]), make()])
    kmp.quantize_aware(model)
    model(np.ones(shape), training=True)
    layer = model.layers[0]
    before = value(layer.rounded_kernel())
    kmp.to_int8(model)
    integers, scale = value(layer.kernel).astype("float32"), value(layer.kernel_scale)
    np.testing.assert_array_equal(np.round(before * np.squeeze(scale)), integers)
    # The backend's division and NumPy's: the last bit.
    np.testing.assert_allclose(before, integers / np.squeeze(scale), rtol=2.0**-22)


def test_the_float32_kernel_is_rounded_under_half_precision():
    """Inside of a layer's call Keras would hand out its copy in half precision."""
    layer = FakeQuantizedDense(8, dtype="mixed_float16")
    layer.build((None, 64))
    with AutocastScope("float16"):
        inside = value(layer.rounded_kernel())
    kernel = value(layer.kernel)
    step = np.abs(kernel).max(0) / 127
    assert inside.dtype == "float16"
    np.testing.assert_array_equal(inside, value(layer.rounded_kernel()))
    np.testing.assert_allclose(inside, rounded(kernel, step, 8), rtol=2.0**-10)


def gradients(layer, x):
    """Of the sum of the outputs, with respect to inputs and kernel."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(layer(x, training=False))
        found = tape.gradient(total, [x, layer._kernel.value])
    elif keras.backend.backend() == "jax":
        import jax

        def total(x, kernel):
            state = [kernel, *(v.value for v in layer.trainable_variables[1:])]
            others = [v.value for v in layer.non_trainable_variables]
            return ops.sum(layer.stateless_call(state, others, x, training=False)[0])

        found = jax.grad(total, (0, 1))(ops.convert_to_tensor(x), layer._kernel.value)
    else:
        layer.zero_grad()  # of the training before
        x = ops.convert_to_tensor(x).requires_grad_()
        ops.sum(layer(x, training=False)).backward()
        found = x.grad, layer._kernel.value.grad
    return values(found)


def test_gradients_pass_straight_through_but_beyond_the_range():
    model, layer = one_dense()
    fit(model, [[1.0, 0.3, 0.0], [-2.0, 0.7, 0.0]])
    kernel = value(layer.rounded_kernel())
    to_inputs, to_kernel = gradients(layer, np.float32([[1.99, 2.5, -0.1], [-3.0, 0.7, 0.7]]))
    inside = [[1, 0, 1], [0, 1, 1]]
    np.testing.assert_allclose(to_inputs, inside * kernel.sum(1), rtol=1e-6)
    # The kernel's are the rounded inputs, clipped ones included; all weights get theirs.
    inputs = rounded(np.float32([[1.99, 2.5, -0.1], [-3.0, 0.7, 0.7]]), 2 / 127, 8)
    np.testing.assert_allclose(to_kernel, inputs.sum(0)[:, None] * np.ones(2), rtol=1e-5)


@pytest.mark.only("jax", "torch")  # TensorFlow's own kernel rounds otherwise
def test_keras_still_loses_the_gradient_of_the_largest_weights():
    """Why the kernel is not rounded by fake_quant_with_min_max_vars: its range ends below them."""
    ends = np.random.default_rng(0).uniform(0.5, 2, 4000).astype("float32")
    fake = keras.quantizers.fake_quant_with_min_max_vars
    inside = fake(ops.convert_to_tensor(ends)[None], -ends, ends, narrow_range=True, axis=1)
    assert (value(inside)[0] < ends).any()
