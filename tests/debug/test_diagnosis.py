"""diagnose: the map, its smallest size, what it says of ranges, and the loss scale."""

import keras
import numpy as np
import pytest
from architectures import find, make, plant
from keras import layers, ops

import kmp

pytestmark = pytest.mark.slow


class Contrast(layers.Layer):
    """A variance as E[x^2] - E[x]^2, which bfloat16 has no digits for."""

    def call(self, x):
        mean = ops.mean(x, axis=(1, 2))
        return ops.sqrt(ops.maximum(ops.mean(ops.square(x), (1, 2)) - ops.square(mean), 1e-3))


def contrast_model(policy="float32"):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    x = inputs = keras.Input((6, 6, 1))
    x = layers.Conv2D(4, 3, activation="relu", name="conv")(x)
    x = layers.Rescaling(1.0, offset=30.0, name="shift")(x)
    x = Contrast(name="contrast")(x)
    outputs = layers.Dense(3, name="logits")(x)
    keras.config.set_dtype_policy("float32")
    model = keras.Model(inputs, outputs)
    random = np.random.default_rng(0)  # the same weights on every backend
    model.set_weights([random.normal(size=v.shape) for v in model.weights])
    return model


IMAGES = np.random.default_rng(0).normal(size=(16, 6, 6, 1)).astype("float32")


def test_the_one_layer_that_ruins_bfloat16():
    diagnosis = kmp.debug.diagnose(
        contrast_model(), IMAGES, policy="mixed_bfloat16", target_sqnr=30.0
    )
    assert diagnosis.float32_layers == ("contrast",)
    assert diagnosis.sqnr >= 30.0 > 10.0 > diagnosis.sqnr_before
    assert diagnosis.loss_scale is None
    assert diagnosis.gradients_finite is None


def test_the_map_does_in_a_new_model_what_was_measured():
    model = contrast_model()
    diagnosis = kmp.debug.diagnose(model, IMAGES, policy="mixed_bfloat16", target_sqnr=30.0)
    rebuilt = contrast_model(diagnosis.policy)
    assert rebuilt.get_layer("contrast").compute_dtype == "float32"
    assert rebuilt.get_layer("conv").compute_dtype == "bfloat16"
    rebuilt.set_weights(model.get_weights())
    found = kmp.debug.sqnr(model(IMAGES, training=False), rebuilt(IMAGES, training=False))
    assert found == pytest.approx(diagnosis.sqnr, abs=1e-6)


def test_no_layer_is_kept_that_could_go():
    """Of two faulty layers either is needed, of the others none."""
    model, x, _ = make("residual")
    for name in ("inner0", "outer1"):
        plant(find(model, name), "underflow")
    diagnosis = kmp.debug.diagnose(model, x)
    assert set(diagnosis.float32_layers) == {"inner0", "outer1"}


def test_more_is_asked_for_than_half_precision_has():
    model, x, _ = make("autoencoder")
    diagnosis = kmp.debug.diagnose(model, x, target_sqnr=500.0)
    assert len(diagnosis.float32_layers) == 3
    assert diagnosis.sqnr == float("inf")


def test_a_layer_without_a_path_is_kept_and_said():
    """Keras gives none to layers that it builds at once, and a map knows layers by their path."""
    model, x, _ = make("cnn")
    relu = find(model, "relu")
    plant(relu, "underflow")
    diagnosis = kmp.debug.diagnose(model, x)
    assert relu.path is None
    assert diagnosis.without_path == diagnosis.float32_layers == ("relu",)
    assert "a rebuilt model needs the same names, and dtype='float32' there" in str(diagnosis)
    assert "Keras gives no path to relu: " in str(diagnosis)
    kmp.to_mixed_precision(model, diagnosis.policy)
    assert relu.compute_dtype == "float32" and find(model, "conv").compute_dtype == "float16"


def test_the_advised_scale_leaves_one_doubling():
    """One weight, w = x = 1: d mse / d w = 2 (w - y) x; times the scale it is below 65504 / 2."""
    inputs = keras.Input((1,))
    layer = layers.Dense(1, use_bias=False, kernel_initializer="ones", name="w")
    model = keras.Model(inputs, layer(inputs))
    model.compile("sgd", loss="mse")
    for y, expected in ((0.0, 2.0**13), (-999.0, 2.0**4), (1.0, 2.0**24)):
        found = kmp.debug.diagnose(model, np.ones((1, 1)), np.full((1, 1), y))
        assert found.loss_scale == expected
        assert found.gradients_finite


def test_ranges_use_the_ends_of_each_format():
    inputs = keras.Input((4,))
    outputs = layers.Rescaling(1.0, name="wide")(inputs)
    values = np.array([[1e5, 1.0, 1e-6, 1e-9]])
    (row,) = kmp.debug.diagnose(keras.Model(inputs, outputs), values).ranges
    assert row.path == "wide"
    assert row.max_abs == 1e5
    half, brain = row.activations["float16"], row.activations["bfloat16"]
    assert (half.overflow, half.lost, half.degraded) == (0.25, 0.25, 0.25)
    assert (brain.overflow, brain.lost, brain.degraded) == (0.0, 0.0, 0.0)
    assert row.gradients == {}


def test_gradient_rows_are_scaled():
    inputs = keras.Input((1,))
    layer = layers.Dense(2, use_bias=False, kernel_initializer="ones", name="w")
    model = keras.Model(inputs, layer(inputs))
    model.compile("sgd", loss=keras.losses.MeanSquaredError(reduction="sum"))
    y = np.array([[1 - 2.0**10, 1 - 2.0**-20]])  # gradients of 2**10 and 2**-20
    (row,) = kmp.debug.diagnose(model, np.ones((1, 1)), y).ranges
    assert row.max_gradient == 2.0**10
    assert row.gradients["float16"].degraded == 0.5  # 2**-20 times the scale of 2**4
    assert row.gradients["bfloat16"].degraded == 0.0


def test_printing():
    model, x, y = make("residual")
    lines = str(kmp.debug.diagnose(model, x, y)).splitlines()
    assert lines[0].startswith("mixed_float16 everywhere: output SQNR ")
    assert lines[1].startswith("advised loss scale ")
    assert lines[1].endswith(": all gradients finite")
    assert lines[2].split()[:4] == ["output", "of", "max", "|y|"]
    assert any(line.startswith("gradient at") for line in lines)


class Residual(layers.Layer):
    """Holds layers to which Keras gives no path, and adds what they return to its input."""

    def __init__(self, shared=None, **kwargs):
        super().__init__(**kwargs)
        policy = self.dtype_policy
        self.inner = shared or layers.Dense(4, name="inner", dtype=policy)
        self.relu = layers.Activation("relu", name="relu", dtype=policy)
        self.dropout = layers.Dropout(0.1, seed=1, name="dropout", dtype=policy)

    def build(self, shape):
        if not self.inner.built:
            self.inner.build(shape)

    def call(self, x):
        return x + self.dropout(self.relu(self.inner(x)))


def residual_model(*blocks):
    x = inputs = keras.Input((4,))
    for block in blocks:
        x = block(x)
    model = keras.Model(inputs, layers.Dense(2, name="logits")(x))
    model.compile("sgd", loss="mse")
    return model


@pytest.mark.parametrize("with_targets", [False, True])
def test_a_kept_block_keeps_the_layers_without_a_path_in_it(with_targets):
    block = Residual(name="block")
    model = residual_model(block)
    plant(block, "underflow")
    x, y = np.ones((3, 4), "float32"), np.ones((3, 2), "float32")
    diagnosis = kmp.debug.diagnose(model, x, y if with_targets else None)
    assert diagnosis.float32_layers == ("block",)
    assert set(diagnosis.without_path) == {"relu", "dropout"}
    assert diagnosis.sqnr >= 40 > diagnosis.sqnr_before
    assert diagnosis.gradients_finite in ((True,) if with_targets else (None,))


def test_the_map_trains_a_model_of_which_one_block_is_kept():
    """A map finds none of the layers without a path; a conversion to it keeps those in the block.

    As in keras-hub's T5, whose blocks add what their dropout returns to what they were given.
    """
    blocks = [Residual(name=name) for name in ("one", "two")]
    model = residual_model(*blocks)
    plant(blocks[0], "underflow")
    x, y = np.ones((3, 4), "float32"), np.ones((3, 2), "float32")
    diagnosis = kmp.debug.diagnose(model, x, y)
    assert diagnosis.float32_layers == ("one",)
    rule = kmp.DynamicLossScale(initial_scale=diagnosis.loss_scale)
    model.compile(kmp.scaled("sgd", rule), loss="mse")
    kmp.to_mixed_precision(model, diagnosis.policy)
    assert [block.dropout.compute_dtype for block in blocks] == ["float32", "float16"]
    model.fit(x, y, verbose=0)
    assert int(model.optimizer.skipped_steps) == 0


class OnlyTrainsInFloat32(layers.Layer):
    """Raises in training alone, as TensorFlow does where an auxiliary loss mixes dtypes."""

    def call(self, x, training=False):
        if training and keras.backend.standardize_dtype(x.dtype) != "float32":
            raise TypeError("no float16 in training")
        return x


def test_a_layer_that_raises_in_training_is_kept():
    model = residual_model(OnlyTrainsInFloat32(name="fussy"))
    x, y = np.ones((3, 4), "float32"), np.ones((3, 2), "float32")
    assert kmp.debug.diagnose(model, x).float32_layers == ()
    diagnosis = kmp.debug.diagnose(model, x, y)
    assert diagnosis.float32_layers == ("fussy",) and diagnosis.gradients_finite
    kmp.to_mixed_precision(model, diagnosis.policy)
    model.fit(x, y, verbose=0)


def test_a_layer_with_an_activity_regularizer_is_kept_where_its_sum_would_raise():
    """TensorFlow adds no float16 regularizer to a float32 loss; the other backends do."""
    body = layers.Dense(4, activity_regularizer="l2", name="body")
    model = residual_model(layers.Dense(4, name="first"), body)
    x, y = np.ones((3, 4), "float32"), np.ones((3, 2), "float32")
    diagnosis = kmp.debug.diagnose(model, x, y)
    raises = keras.backend.backend() == "tensorflow"
    assert diagnosis.float32_layers == ("body",) * raises and diagnosis.gradients_finite


def test_a_loss_that_raises_in_half_precision_is_not_hidden():
    """No layer can be kept for it."""

    def loss(y, y_pred):  # Keras casts both to float32
        assert model.get_layer("logits").compute_dtype == "float32", "a loss in float32"
        return ops.mean(y_pred - y)

    model = residual_model()
    model.compile("sgd", loss)
    with pytest.raises(AssertionError, match="a loss in float32"):
        kmp.debug.diagnose(model, np.ones((3, 4), "float32"), np.ones((3, 2), "float32"))


class Contrastive(keras.Model):
    """Multiplies what it returned by 1e5 in the code of its loss."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = layers.Dense(4, name="encoder"), layers.Dense(4, name="head")

    def call(self, x):
        return self.head(self.encoder(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(ops.multiply(y_pred, 1e4)))


def test_the_layer_that_the_code_of_a_loss_takes_is_kept():
    model, x = Contrastive(), np.ones((2, 4), "float32")
    model(x)
    model.compile("sgd", None)
    diagnosis = kmp.debug.diagnose(model, x, np.zeros(2))
    assert diagnosis.float32_layers == (model.head.path,)
    assert diagnosis.gradients_finite
    kmp.to_mixed_precision(model, diagnosis.policy)
    model.compile(kmp.scaled("sgd", "none"), None)
    assert np.isfinite(model.fit(x, np.zeros(2), verbose=0).history["loss"]).all()


class LoudLoss(keras.Model):
    """A graph that ends in an operation, which has no dtype of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(ops.multiply(y_pred, 1e4)))


def test_the_layers_are_tried_where_the_loss_takes_what_an_operation_returns():
    """As `locate_nonfinite` advises there."""
    inputs = keras.Input((4,))
    outputs = layers.Dense(4, name="last")(layers.Dense(4, name="first")(inputs)) * 2.0
    model, x = LoudLoss(inputs, outputs), np.ones((2, 4), "float32")
    model.compile("sgd", None)
    diagnosis = kmp.debug.diagnose(model, x, np.zeros(2))
    assert diagnosis.float32_layers == ("last",) and diagnosis.gradients_finite
    for layer in model.layers[1:]:
        layer.dtype_policy = "mixed_float16"
    report = kmp.debug.locate_nonfinite(model, x, np.zeros(2), loss_scale=1.0)
    assert report.phase == "loss" and "kmp.debug.diagnose tries each of them" in report.cause


def test_two_kept_blocks_may_share_a_layer():
    shared = layers.Dense(4, name="shared")
    blocks = [Residual(shared, name=name) for name in ("one", "two")]
    model = residual_model(*blocks)
    for block in blocks:
        plant(block, "underflow")
    diagnosis = kmp.debug.diagnose(model, np.ones((3, 4), "float32"))
    assert set(diagnosis.float32_layers) == {"one", "two"}
    assert diagnosis.policy[shared.path].compute_dtype == "float32"
    assert diagnosis.sqnr >= 40


def test_outputs_that_cannot_be_compared_are_refused():
    """No map could be found for them: the search would keep every layer and report nan dB."""
    inputs = keras.Input((4,))
    outputs = layers.Lambda(lambda x: ops.argmax(x, -1), name="argmax")(layers.Dense(3)(inputs))
    with pytest.raises(
        ValueError, match=r"finite float outputs .* Received: outputs without floats"
    ):
        kmp.debug.diagnose(keras.Model(inputs, outputs), np.ones((2, 4)))
    logits = layers.Lambda(lambda x: ops.where(x > 0, x, np.nan), name="nan")(inputs)
    model = keras.Model(inputs, logits)
    model.compile("sgd", loss=lambda y, p: ops.mean(ops.where(ops.isnan(p), 0.0, p - y)))
    x = np.array([[1.0, -1.0, 2.0, 3.0]])
    with pytest.raises(ValueError, match=r"finite float outputs .* 1 NaN"):
        kmp.debug.diagnose(model, x, x)


def test_a_model_that_is_not_finite_in_float32_is_refused():
    model, x, _ = make("residual")
    plant(find(model, "outer0"), "nan")
    with pytest.raises(ValueError, match=r"must be finite in float32\. .*locate_nonfinite"):
        kmp.debug.diagnose(model, x)


def test_a_mask_that_the_loss_answers_is_meant():
    inputs = keras.Input((4,))
    logits = layers.Dense(4, kernel_initializer="ones", name="logits")(inputs)
    mask = np.array([0, 0, -np.inf, -np.inf], "float32")
    masked = layers.Lambda(lambda x: ops.add(x, ops.cast(mask, x.dtype)), name="mask")(logits)
    model = keras.Model(inputs, masked)
    model.compile("sgd", loss=lambda y, p: ops.mean(y * ops.softmax(p)))
    x, y = np.ones((2, 4)), np.array([[1.0, 0.0, 0.0, 0.0]] * 2)
    diagnosis = kmp.debug.diagnose(model, x, y)
    assert diagnosis.float32_layers == ()
    assert diagnosis.gradients_finite
    with pytest.raises(ValueError, match="mask of -inf, pass a y"):
        kmp.debug.diagnose(model, x)
    with pytest.raises(ValueError, match="must be finite in float32"):
        kmp.debug.diagnose(model, x, y * np.nan)


def test_the_target_must_be_a_number():
    model, x, _ = make("residual")
    with pytest.raises(ValueError, match="`target_sqnr` of diagnose must be a number"):
        kmp.debug.diagnose(model, x, target_sqnr="high")
