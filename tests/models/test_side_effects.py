"""What half precision would round in the state and in the losses of layers is exact after all.

The oracle is the float32 model, or NumPy.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops
from oracle import BACKEND

import kmp

HALVES = ["mixed_float16", "mixed_bfloat16"]
COMPILE = {"run_eagerly": True} if BACKEND == "torch" else {"jit_compile": BACKEND == "jax"}


class Average(layers.Layer):
    """Centers its inputs by a moving average, which the state of many layers is."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], trainable=False, name="mean")

    def call(self, x, training=False):
        if training:
            mean = ops.cast(ops.mean(x, axis=0), self.mean.dtype)
            self.mean.assign(0.999 * self.mean + 0.001 * mean)
        return x - ops.cast(self.mean, x.dtype)


class Bounded(layers.Layer):
    """Adds the sum of squares of what it hands on, which float16 cannot hold."""

    def call(self, x):
        self.add_loss(1e-6 * ops.sum(ops.square(x)))
        return x


class Itself(keras.Model):
    """A model that adds a loss, and updates state, in its own code."""

    def __init__(self, cast=lambda x: x, **own):
        super().__init__()
        self.hidden, self.head, self.cast = layers.Dense(4), layers.Dense(1), cast
        self.seen = self.add_weight(shape=(), trainable=False, name="seen", **own)

    def call(self, x):
        x = self.hidden(x)
        self.add_loss(self.cast(ops.mean(x)))
        self.seen.assign_add(1.0)
        return self.head(x)


def stack(*middle):
    return keras.Sequential([keras.Input((4,)), *middle, layers.Dense(1)])


def trained(model, x=None, epochs=1, policy=None, **compiled):
    """The model after some epochs of one batch, and its losses."""
    x = np.ones((8, 4), "float32") if x is None else x
    optimizer = compiled.pop("optimizer", None) or kmp.scaled("sgd", learning_rate=0.0)
    model.compile(optimizer, "mse", **COMPILE)
    history = model.fit(x, x[:, :1], epochs=epochs, verbose=0)
    return history.history["loss"]


def kinds(model):
    return [each.kind for each in kmp.audit(model).findings if each.kind != "tensor cores"]


@pytest.mark.parametrize("policy", HALVES)
def test_a_moving_average_does_not_stall(policy):
    """Its steps are below half a unit in the last place of bfloat16 from 0.25 on."""
    model = stack(Average())
    report = kmp.to_mixed_precision(model, policy)
    assert report.kept[model.layers[0].path].startswith("updates its state")
    assert kinds(model) == []
    model.layers[0].mean.assign(np.full(4, 0.9, "float32"))
    trained(model, epochs=10)
    expected = 1 - 0.1 * 0.999**10  # each step takes a thousandth of the way to 1
    np.testing.assert_allclose(ops.convert_to_numpy(model.layers[0].mean), expected, rtol=1e-6)


@pytest.mark.skipif(BACKEND == "torch", reason="there it is not written at all")
def test_keras_still_rounds_a_moving_average():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = stack(Average())
    (finding,) = kmp.audit(model).of_kind("half statistics")
    assert "reads mean in bfloat16" in finding.problem and 'dtype="float32"' in finding.advice
    model.layers[0].mean.assign(np.full(4, 0.9, "float32"))
    trained(model, epochs=10)
    assert ops.convert_to_numpy(model.layers[0].mean).max() < 0.9005
    model = stack(Average(dtype="float32"))
    assert kmp.audit(model).of_kind("half statistics") == ()


def test_spectral_normalization_keeps_the_steps_of_the_optimizer():
    """Its kernel is divided by its norm and written back; the dense layer computes in half."""
    random = np.random.default_rng(0)
    x = random.normal(size=(16, 4)).astype("float32")
    kernels = {}
    for policy in ("float32", "mixed_bfloat16"):
        keras.utils.set_random_seed(1)
        model = stack(layers.SpectralNormalization(layers.Dense(4)))
        wrapper = model.layers[0]
        kmp.to_mixed_precision(model, policy)
        dense_dtype = "float32" if policy == "float32" else "bfloat16"
        assert (wrapper.compute_dtype, wrapper.layer.compute_dtype) == ("float32", dense_dtype)
        trained(model, x, epochs=20, optimizer=kmp.scaled("sgd", "none", learning_rate=1e-4))
        kernels[policy] = ops.convert_to_numpy(wrapper.layer.kernel)
    # Gradients are right to 8 bits, and move the weights by some thousandths.
    np.testing.assert_allclose(*kernels.values(), atol=1e-4)


def test_spectral_normalization_in_half_is_named():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = stack(layers.SpectralNormalization(layers.Dense(4)))
    (finding,) = kmp.audit(model).of_kind("half statistics")
    assert "kernel" in finding.problem
    model = stack(layers.SpectralNormalization(layers.Dense(4), dtype="float32"))
    assert kmp.audit(model).of_kind("half statistics") == ()
    assert model.layers[0].layer.compute_dtype == "bfloat16"


def test_the_state_of_an_rnn_is_no_sum():
    inputs = keras.Input(batch_shape=(8, 2, 4))
    rnn = layers.GRU(4, stateful=True)
    model = keras.Model(inputs, layers.Dense(1)(rnn(inputs)))
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert rnn.compute_dtype == "bfloat16" and kinds(model) == []


@pytest.mark.parametrize("policy", HALVES)
def test_a_loss_that_a_layer_adds(policy):
    """In half precision it is rounded or inf, and TensorFlow adds it to none in float32."""
    x = np.full((8, 4), 300.0, "float32")
    losses = []
    for each in ("float32", policy):
        model = stack(Bounded())
        model.layers[-1].set_weights([np.zeros((4, 1)), np.zeros(1)])
        report = kmp.to_mixed_precision(model, each)
        losses += trained(model, x)
        assert kinds(model) == []
    assert report.kept[model.layers[0].path] == "adds a loss"
    assert losses[0] == losses[1] == pytest.approx(300**2 + 1e-6 * 32 * 300**2)


def test_a_half_loss_is_named():
    keras.config.set_dtype_policy("mixed_float16")
    (finding,) = kmp.audit(stack(Bounded())).of_kind("half loss")
    assert "adds a loss in float16" in finding.problem
    assert kmp.audit(stack(Bounded(dtype="float32"))).of_kind("half loss") == ()
    regularized = layers.Dense(8, activity_regularizer="l2")
    assert kmp.audit(stack(regularized)).of_kind("half loss") == ()  # has a kind of its own


def test_what_a_model_itself_rounds_is_told():
    x = np.ones((8, 4), "float32")
    model = Itself()
    model(x)
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert "adds a loss in float16" in str(report) and "half loss" in kinds(model)
    rounds = BACKEND != "jax"  # whose trainer calls a model without its scope for variables
    assert ("reads seen in float16" in str(report)) == rounds
    assert ("half statistics" in kinds(model)) == rounds
    mended = Itself(lambda loss: ops.cast(loss, "float32"), autocast=False)
    mended(x)
    report = kmp.to_mixed_precision(mended, "mixed_float16")
    assert report.rounded == "" and kinds(mended) == []
    trained(mended, x)


class Shares(layers.Layer):
    """Divides by the sum, which may be 0."""

    def call(self, x):
        return x / (ops.sum(ops.abs(x), axis=-1, keepdims=True) + 1e-9)


class Weighted(Shares):
    def build(self, shape):
        self.gain = self.add_weight(name="gain", shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return self.gain * super().call(x)


@pytest.mark.parametrize("middle", [layers.UnitNormalization, Shares])
def test_a_constant_that_float16_loses_is_kept(middle):
    """An epsilon of 0, or its reciprocal of inf, makes NaN of a row of zeros."""
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    x[3] = 0
    model = stack(middle())
    expected = model.predict(x, verbose=0)
    report = kmp.to_mixed_precision(model, "mixed_float16")
    (row,) = [each for each in report.rows if each.path.endswith(model.layers[0].name)]
    assert row.reason == "has a constant that half precision loses"
    assert np.array_equal(model.predict(x, verbose=0), expected) and kinds(model) == []


def test_a_layer_with_weights_is_converted_and_its_constant_named():
    for policy, dtype, found in zip(
        HALVES, ("float16", "bfloat16"), (["epsilon"], []), strict=True
    ):
        model = stack(Weighted())
        kmp.to_mixed_precision(model, policy)
        assert model.layers[0].compute_dtype == dtype and kinds(model) == found


def test_who_is_told_to_write_another_number():
    """Whoever wrote it; of a number in Keras's own code nobody is."""
    keras.config.set_dtype_policy("mixed_float16")
    for layer in (layers.Rescaling(1e6), layers.Lambda(lambda x: x * 1e6)):
        (finding,) = kmp.audit(stack(layer)).of_kind("constant")
        assert finding.advice.startswith("Use 32752, or keep it in float32")
    (finding,) = kmp.audit(stack(layers.UnitNormalization())).of_kind("constant")
    assert finding.advice.startswith('Give the layer dtype="float32"')


def gram(x):
    """Positive definite matrices: float32[n, 2, 2] of float32[n, 4]."""
    squares = ops.reshape(x, (-1, 2, 2))
    return ops.matmul(squares, ops.swapaxes(squares, 1, 2)) + ops.eye(2, dtype=x.dtype)


DECOMPOSITIONS = {
    "cholesky": lambda x: ops.reshape(ops.cholesky(gram(x)), (-1, 4)),
    "eigh": lambda x: ops.eigh(gram(x))[0],
    "fft": lambda x: ops.fft((x, ops.zeros_like(x)))[0],
    "inv": lambda x: ops.reshape(ops.inv(gram(x)), (-1, 4)),
    "qr": lambda x: ops.reshape(ops.abs(ops.qr(gram(x))[1]), (-1, 4)),
    "solve": lambda x: ops.reshape(ops.solve(gram(x), gram(ops.flip(x, axis=-1))), (-1, 4)),
    "svd": lambda x: ops.svd(gram(x), compute_uv=False),
}


@pytest.mark.parametrize("name", DECOMPOSITIONS)
@pytest.mark.parametrize("policy", HALVES)
def test_layers_that_decompose_stay_in_float32(name, policy):
    """Not each backend has these in half precision; where it has not, only a run raises."""
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    middle = layers.Lambda(DECOMPOSITIONS[name], name="code")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), middle, layers.Dense(2)])
    report = kmp.to_mixed_precision(model, policy)
    (row,) = [each for each in report.rows if each.path.endswith("code")]
    assert row.reason.startswith("decomposes matrices or signals")
    first, middle, _ = model.layers
    expected = DECOMPOSITIONS[name](ops.cast(first(x), "float32"))
    np.testing.assert_array_equal(*map(ops.convert_to_numpy, (middle(first(x)), expected)))
    assert np.isfinite(model.predict(x, verbose=0)).all()
    model.compile(kmp.scaled("sgd"), "mse")
    model.fit(x, np.zeros((8, 2)), verbose=0)
