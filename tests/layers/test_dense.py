"""Float32OutputDense: exact on small integers, then against float64 within derived bounds."""

import keras
import numpy as np
import pytest
from keras import ops
from older import of_keras, since_keras
from oracle import few

from kmp.layers import Float32OutputDense

pytestmark = pytest.mark.gpu

MIXED = ["mixed_float16", "mixed_bfloat16"]
POLICIES = [*MIXED, "float16", "bfloat16", "float32"]
# Unit roundoff: the largest relative error of rounding to nearest.
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def integers(*shape, limit=8):
    """Numbers that every half dtype holds exactly."""
    return np.random.default_rng(sum(shape)).integers(-limit, limit + 1, shape).astype("float64")


def built(units, features, policy, **kwargs):
    layer = Float32OutputDense(units, dtype=policy, **kwargs)
    layer.build((None, features))
    return layer


def rounded(x, dtype):
    return np.asarray(x, "float32").astype(np.dtype(dtype))


@pytest.mark.parametrize("policy", POLICIES)
def test_small_integers_come_out_exact(policy, jit, pull_back):
    # Every product and partial sum is an integer below 2**24: float32 holds it, half does not.
    layer = built(5, 1024, policy)
    kernel, bias, x, cotangent = integers(1024, 5), integers(5), integers(3, 1024), integers(3, 5)
    layer.set_weights([kernel, bias])

    y, (to_x, to_kernel, to_bias) = pull_back(
        layer, rounded(x, layer.compute_dtype), cotangent, jit
    )

    assert y.dtype == "float32" and to_bias.dtype == "float32"
    np.testing.assert_array_equal(y, x @ kernel + bias)
    np.testing.assert_array_equal(to_bias, cotangent.sum(0))
    np.testing.assert_array_equal(to_kernel, rounded(x.T @ cotangent, layer.variable_dtype))
    np.testing.assert_array_equal(to_x, rounded(cotangent @ kernel.T, layer.compute_dtype))
    assert np.abs(y).max() > 256  # where bfloat16 no longer holds every integer


@pytest.mark.parametrize("policy", POLICIES)
def test_agrees_with_float64(policy, jit, pull_back):
    layer = built(24, 200, policy)
    random = np.random.default_rng(0)
    half = layer.compute_dtype
    x = rounded(random.normal(size=(7, 11, 200)), half)
    cotangent = random.normal(size=(7, 11, 24)).astype("float32")
    bias = random.normal(size=24).astype("float32")
    layer.bias.assign(bias)

    y, (to_x, to_kernel, to_bias) = pull_back(layer, x, cotangent, jit)

    k = rounded(ops.convert_to_numpy(ops.cast(layer.kernel, "float32")), half).astype("float64")
    x2, c2 = x.reshape(-1, 200).astype("float64"), cotangent.reshape(-1, 24).astype("float64")
    # A sum of n products is off by at most (n + 1) u sum|products|. The cotangent is rounded to
    # half on its way in, and a gradient to its own dtype on its way out: one roundoff each.
    u, u_half = ROUNDOFF["float32"], ROUNDOFF[half]
    within(y.reshape(-1, 24), x2 @ k + bias, 202 * u * (np.abs(x2) @ np.abs(k) + np.abs(bias)))
    magnitude = np.abs(c2) @ np.abs(k.T)
    within(to_x.reshape(-1, 200), c2 @ k.T, (25 * u + 2.1 * u_half) * magnitude)
    magnitude = np.abs(x2.T) @ np.abs(c2)
    out = ROUNDOFF[layer.variable_dtype]
    within(to_kernel, x2.T @ c2, (78 * u + 1.1 * u_half + out) * magnitude)
    within(to_bias, c2.sum(0), 78 * u * np.abs(c2).sum(0))


def within(actual, expected, bound):
    assert np.all(np.abs(actual.astype("float64") - expected) <= bound)


@pytest.mark.parametrize("policy", MIXED)
def test_kernel_gradient_is_rounded_once(policy, jit, pull_back):
    # 1 + 2**-12 is a sum of exact products that no half dtype holds.
    layer = built(1, 1, policy, use_bias=False)
    x = rounded([[1.0], [2.0**-12]], layer.compute_dtype)
    _, (_, to_kernel) = pull_back(layer, x, np.ones((2, 1)), jit)
    assert to_kernel.item() == 1 + 2.0**-12


def test_sums_beyond_float16_stay_finite(jit, pull_back):
    layer = built(1, 4, "mixed_float16", use_bias=False, kernel_initializer=constant(256))
    x = np.full((4, 4), 256, "float16")
    y, (_, to_kernel) = pull_back(layer, x, np.full((4, 1), 256), jit)
    np.testing.assert_array_equal(y, np.full((4, 1), 4 * 256**2))
    np.testing.assert_array_equal(to_kernel, np.full((4, 1), 4 * 256**2))


def constant(value):
    return keras.initializers.Constant(value)


@pytest.mark.parametrize("policy", POLICIES)
def test_activation_sees_float32(policy):
    logits = np.array([0.0, -12.0, -20.0])
    layer = built(3, 1, policy, activation="softmax")
    layer.set_weights([np.zeros((1, 3)), logits])
    tail = np.exp(logits) / np.exp(logits).sum()  # 2e-9 at the end, which float16 flushes to 0
    y = ops.convert_to_numpy(layer(np.zeros((1, 1))))
    # exp of 20 with a relative error of 2**-24 in its argument, then a sum and a quotient.
    np.testing.assert_allclose(y[0], tail, rtol=24 * 2.0**-24)


@pytest.mark.parametrize("policy", POLICIES)
def test_bias_is_float32_and_added_in_float32(policy):
    layer = built(1, 1, policy, kernel_initializer="zeros")
    layer.bias.assign([1 + 2.0**-20])
    assert layer.bias.dtype == "float32"
    assert layer.kernel.dtype == keras.DTypePolicy(policy).variable_dtype
    assert ops.convert_to_numpy(layer(np.ones((1, 1)))).item() == 1 + 2.0**-20


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", [(6,), (None, 6), (3, None, 6)], ids=str)
def test_symbolic_output_is_float32(policy, shape):
    inputs = keras.Input(shape)
    outputs = Float32OutputDense(2, dtype=policy)(inputs)
    assert outputs.dtype == "float32"
    assert outputs.shape == (None, *shape[:-1], 2)
    x = np.ones((5, *(n or 4 for n in shape)))
    y = keras.Model(inputs, outputs)(x)
    assert keras.backend.standardize_dtype(y.dtype) == "float32"
    assert tuple(y.shape) == (*x.shape[:-1], 2)


@since_keras("3.14.0", "a cast of the inputs loses their mask on TensorFlow and JAX")
def test_mask_passes_through():
    x = keras.layers.Masking()(ops.convert_to_tensor([[[1.0], [0.0]]]))
    y = Float32OutputDense(2, dtype="mixed_bfloat16")(x)
    np.testing.assert_array_equal(ops.convert_to_numpy(y._keras_mask), [[True, False]])


def test_empty_batch():
    y = Float32OutputDense(2, dtype="mixed_float16")(np.ones((0, 3, 4)))
    assert tuple(y.shape) == (0, 3, 2)


@pytest.mark.parametrize("policy", few(POLICIES, "mixed_float16"))
def test_fit(policy, jit):
    keras.config.set_dtype_policy(policy)
    layers = [keras.layers.Dense(8), Float32OutputDense(3, "softmax")]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(keras.optimizers.SGD(0.5), "categorical_crossentropy", jit_compile=jit)
    model.optimizer.build(model.trainable_variables)  # or TensorFlow traces the step twice
    x = np.eye(6)
    y = np.eye(3)[[0, 0, 1, 1, 2, 2]]
    losses = model.fit(x, y, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert model.predict(x, verbose=0).dtype == "float32"


@pytest.mark.parametrize("policy", few(MIXED, "mixed_float16"))
def test_activity_regularizer_in_fit(policy, jit):
    # One output of 512, squared: 262144, beyond float16. Kernel and learning rate stay at that.
    layer = Float32OutputDense(
        1, activity_regularizer="l2", kernel_initializer=constant(512), dtype=policy
    )
    model = keras.Sequential([layer])
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=jit)
    loss = model.fit(np.ones((1, 1)), np.full((1, 1), 512.0), verbose=0).history["loss"][0]
    assert loss == np.float32(0.01) * 512**2


@pytest.mark.parametrize("policy", POLICIES)
def test_lora(policy, pull_back):
    layer = built(4, 6, policy, lora_rank=2)
    layer.lora_kernel_b.assign(integers(2, 4))
    layer.lora_kernel_a.assign(integers(6, 2))
    layer._kernel.assign(integers(6, 4))
    x = rounded(integers(3, 6), layer.compute_dtype)
    y, gradients = pull_back(layer, x, np.ones((3, 4)))
    kernel = integers(6, 4) + integers(6, 2) @ integers(2, 4)
    np.testing.assert_array_equal(y, integers(3, 6) @ kernel)
    lora = [layer.lora_kernel_a.dtype, layer.lora_kernel_b.dtype]  # float32 in newer Keras
    assert [g.dtype for g in gradients[1:]] == ["float32", *lora]


@pytest.mark.parametrize("policy", POLICIES)
def test_saves_and_loads(policy, tmp_path):
    layer = Float32OutputDense(
        3, "relu", kernel_regularizer="l2", bias_constraint="non_neg", dtype=policy
    )
    model = keras.Sequential([keras.Input((4,)), layer])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].get_config() == layer.get_config()
    assert [v.dtype for v in loaded.variables] == [v.dtype for v in model.variables]
    x = np.ones((2, 4))
    np.testing.assert_array_equal(ops.convert_to_numpy(loaded(x)), ops.convert_to_numpy(model(x)))


def test_takes_the_weights_of_dense():
    theirs = keras.layers.Dense(3, bias_initializer="normal")
    theirs.build((None, 4))
    ours = built(3, 4, "float32")
    ours.set_weights(theirs.get_weights())
    x = np.eye(4)  # a product with the identity is exact
    np.testing.assert_array_equal(ops.convert_to_numpy(ours(x)), ops.convert_to_numpy(theirs(x)))


@pytest.mark.parametrize(
    "name, value",
    [
        ("dtype", lambda: "int8_from_mixed_bfloat16"),
        ("dtype", lambda: "float8_from_float32"),
        ("quantization_config", of_keras("quantizers.Int8QuantizationConfig")),
    ],
)
def test_refuses_quantized_policies(name, value):
    kwargs = {name: value()}
    with pytest.raises(ValueError, match=r"Received: dtype=.*Use keras\.layers\.Dense"):
        Float32OutputDense(3, **kwargs)


def test_refuses_to_be_quantized():
    with pytest.raises(NotImplementedError, match=r"mode='int8'.*Use keras\.layers\.Dense"):
        built(3, 4, "float32").quantize("int8")
