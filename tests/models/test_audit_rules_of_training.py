"""Each danger in optimizer, loss and metrics is found where it is, and nowhere else."""

import contextlib
import functools

import keras
import numpy as np
import pytest
from audited import CROSSENTROPY, Masked, float16, kinds_of, model_of  # noqa: F401
from keras import layers
from older import of_keras
from oracle import BACKEND, few

import kmp
from kmp._backend import backend
from kmp._keras import path_of


@pytest.mark.parametrize("policy", ["mixed_float16", "float16", "p=f32,c=f16,o=f32"])
def test_unscaled_float16(policy):
    model = model_of(layers.Dense(8, dtype=kmp.Policy(policy)), kmp.layers.Float32OutputDense(8))
    for optimizer in (keras.optimizers.SGD(), kmp.scaled("sgd", loss_scale="none")):
        model.compile(optimizer, "mse", auto_scale_loss=False)
        (finding,) = kmp.audit(model).of_kind("unscaled float16")
        assert "SGD does not scale the loss" in finding.problem
        assert finding.advice == "Compile with kmp.scaled(SGD, ...)."
    model.compile(keras.optimizers.SGD(loss_scale_factor=128.0), "mse", auto_scale_loss=False)
    assert "unscaled float16" not in kinds_of(model)


def test_float16_on_a_tpu(monkeypatch):
    model = model_of(layers.Dense(8), layers.Dense(8, dtype="float32"))
    assert kinds_of(model) == []
    monkeypatch.setattr(backend, "platform", lambda: "tpu")
    (finding,) = kmp.audit(model).findings
    assert finding.kind == "float16 on a TPU" and "mixed_bfloat16" in finding.advice
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert kinds_of(model_of(layers.Dense(8), layers.Dense(8, dtype="float32"))) == []


@pytest.mark.parametrize(
    "loss", [CROSSENTROPY(), "sparse_categorical_crossentropy"], ids=["object", "name"]
)
@pytest.mark.parametrize(
    "head",
    [layers.Softmax, lambda: layers.Activation("sigmoid"), None],
    ids=["softmax", "sigmoid", "dense"],
)
def test_half_softmax(head, loss):
    stack = [layers.Dense(8, None if head else "softmax"), *([head()] if head else [])]
    model = model_of(*stack, loss=loss)
    (finding,) = kmp.audit(model).of_kind("half softmax")
    assert finding.path == path_of(model.layers[-1]) and "Float32OutputDense" in finding.advice


@pytest.mark.parametrize(
    "dtype, probability, instead, side",
    [("float16", 2.9e-8, 0, "below 3e-8"), ("bfloat16", 0.99811, 1, "above 0.9981")],
)
def test_which_probabilities_are_rounded(dtype, probability, instead, side):
    keras.config.set_dtype_policy(f"mixed_{dtype}")
    model = model_of(layers.Dense(8, "softmax"), loss="categorical_crossentropy")
    (finding,) = kmp.audit(model).of_kind("half softmax")
    assert f"{side} are {instead} in {dtype}" in finding.problem
    assert float(keras.ops.cast(probability, dtype)) == instead


def test_an_embedding_that_is_a_float32_head():
    tokens = keras.Input((4,), dtype="int32")
    embedding = layers.ReversibleEmbedding(96, 8, reverse_dtype="float32")
    model = keras.Model(tokens, embedding(embedding(tokens), reverse=True))
    assert keras.backend.standardize_dtype(model(np.ones((2, 4))).dtype) == "float32"
    model.compile(kmp.scaled("sgd"), "mse", metrics=[keras.metrics.Mean("mean")])
    assert kmp.audit(model).of_kind("half output") == kmp.audit(model).of_kind("half metric") == ()


@pytest.mark.parametrize("loss", [CROSSENTROPY(from_logits=True), "mse"], ids=["logits", "mse"])
def test_a_softmax_whose_logarithm_nobody_takes_is_harmless(loss):
    assert "half softmax" not in kinds_of(model_of(layers.Dense(8, "softmax"), loss=loss))


MSE = keras.losses.MeanSquaredError


def squares(loss):
    """A model with float16 outputs of 320, whose squares are beyond float16, and its loss."""
    model = model_of(layers.Dense(1, kernel_initializer="ones"), loss=loss)
    x, y = np.full((4, 8), 40.0, "float32"), np.zeros((4, 1), "float32")
    return model, model.evaluate(x, y, verbose=0)


@pytest.mark.parametrize(
    "loss", ["mse", keras.losses.mean_squared_error, MSE()], ids=["name", "function", "object"]
)
def test_a_loss_computes_in_float32_whatever_the_outputs_are_in(loss):
    model, value = squares(loss)
    assert value == pytest.approx(320**2)
    assert "half loss" not in kinds_of(model)


def test_half_loss():
    model, value = squares(MSE(dtype="float16"))
    assert value == np.inf
    (finding,) = kmp.audit(model).of_kind("half loss")
    assert "mean_squared_error is evaluated in float16" in finding.problem
    assert finding.advice == 'Give the loss dtype="float32".'
    model, value = squares(MSE(dtype="float32"))
    assert value == pytest.approx(320**2) and "half loss" not in kinds_of(model)


def test_half_loss_by_floatx():
    keras.config.set_floatx("float16")
    try:
        for loss in (keras.losses.mean_squared_error, MSE(dtype="float32")):
            model, value = squares(loss)
            assert value == np.inf  # the second is averaged in float16
            (finding,) = kmp.audit(model).of_kind("half loss")
            assert finding.advice.startswith('Write keras.config.set_floatx("float32")')
    finally:
        keras.config.set_floatx("float32")
    model, value = squares(keras.losses.mean_squared_error)
    assert value == pytest.approx(320**2) and "half loss" not in kinds_of(model)


COUNTS = [
    "accuracy",
    "sparse_categorical_accuracy",
    keras.metrics.categorical_accuracy,
    keras.metrics.SparseCategoricalAccuracy,
    "AUC",
    keras.metrics.Precision,
]


class Ranking(keras.metrics.Mean):
    """As keras-rs's NDCG: casts to its own dtype, then compares."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_pred = keras.ops.cast(y_pred, self.dtype)
        super().update_state(keras.ops.argmax(y_pred, -1), sample_weight=sample_weight)


class Squares(keras.metrics.Mean):
    """A metric that leaves its inputs in half precision."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_pred * y_pred, sample_weight=sample_weight)


@pytest.mark.parametrize("metric", ["mse", keras.metrics.MeanSquaredError, "mae", Squares])
def test_half_metric(metric):
    metric = metric if isinstance(metric, str) else metric()
    model = model_of(layers.Dense(8), loss="mse", metrics=["accuracy", metric])
    (finding,) = kmp.audit(model).of_kind("half metric")
    assert "accuracy" not in finding.problem and "evaluated in float16" in finding.problem


@pytest.mark.parametrize("metric", [*COUNTS, keras.metrics.RootMeanSquaredError, Ranking])
def test_metrics_that_no_half_output_changes(metric):
    """Accuracies count; other classes of Keras, and those that cast, compute in their own dtype."""
    metric = metric() if isinstance(metric, type) else metric
    model = model_of(layers.Dense(8), loss="mse", metrics=[metric])
    assert "half metric" not in kinds_of(model)


SPARSE = [
    "accuracy",
    "sparse_categorical_accuracy",
    keras.metrics.sparse_categorical_accuracy,
    keras.metrics.SparseCategoricalAccuracy,
]


def classifier(classes, policy, metric):
    """A model whose class is always the one after the label, and the share that it gets right."""
    keras.config.set_dtype_policy(policy)
    table = layers.Embedding(classes, classes, embeddings_initializer="identity")
    model = keras.Sequential([keras.Input((), dtype="int32"), table])
    metric = metric() if isinstance(metric, type) else metric
    loss = CROSSENTROPY(from_logits=True)
    model.compile(kmp.scaled("sgd"), loss, metrics=[metric], run_eagerly=True)
    labels = np.arange(classes - 1)
    return model, model.evaluate(labels + 1, labels, batch_size=256, verbose=0)[1]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_labels_beyond_the_whole_numbers_of_half_precision(policy):
    """Keras rounds the labels and the classes alike, and counts other classes as right."""
    exact = {"mixed_float16": 2048, "mixed_bfloat16": 256}[policy]
    for metric in SPARSE:
        model, right = classifier(exact, policy, metric)
        assert right == 0 and "half metric" not in kinds_of(model)
        model, right = classifier(exact + 40, policy, metric)
        assert right > 0  # the truth is 0
        (finding,) = kmp.audit(model).of_kind("half metric")
        assert f"every whole number only up to {exact}" in finding.problem
        model, right = classifier(exact + 40, "float32", metric)
        assert right == 0 and kinds_of(model) == []


@pytest.mark.parametrize("name", [f"{kind}top_k_categorical_accuracy" for kind in ("", "sparse_")])
def test_tensorflow_ranks_no_half_outputs(name):
    for output, raises in ((layers.Dense(8), True), (kmp.layers.Float32OutputDense(8), False)):
        loss = CROSSENTROPY(from_logits=True) if "sparse" in name else "mse"
        model = model_of(output, loss=loss, metrics=[name])
        y = np.zeros(4) if "sparse" in name else np.eye(8)[:4]
        raises = raises and BACKEND == "tensorflow"
        with pytest.raises(TypeError, match="TopK") if raises else contextlib.nullcontext():
            model.evaluate(np.ones((4, 8)), y, verbose=0)
        assert ("half metric" in kinds_of(model)) == raises


def test_keras_still_evaluates_metrics_in_half():
    model = model_of(layers.Dense(1, kernel_initializer="ones"), loss="mse", metrics=["mse"])
    x, y = np.full((4, 8), 40.0, "float32"), np.zeros((4, 1), "float32")
    loss, metric = model.evaluate(x, y, verbose=0)
    assert loss == pytest.approx(320**2) and metric == np.inf


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "lamb"])
def test_half_weights(optimizer):
    keras.config.set_dtype_policy("bfloat16")
    optimizer = keras.optimizers.Lamb() if optimizer == "lamb" else optimizer
    model = model_of(layers.Dense(8), layers.Dense(8), loss="mse", optimizer=optimizer)
    (finding,) = kmp.audit(model).of_kind("half weights")
    assert "beta_2=0.999 is 1" in finding.problem and "mixed_bfloat16" in finding.advice
    assert "4 variables are in bfloat16" in finding.problem


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory", few([{}, {"master_weights": True}, {"slot_dtype": "float32"}], {})
)
def test_half_weights_that_kmp_updates_in_float32(memory):
    keras.config.set_dtype_policy("bfloat16")
    model = model_of(layers.Dense(8), loss="mse", optimizer=kmp.scaled("adam", "none", **memory))
    assert "half weights" not in kinds_of(model)
    model.fit(np.ones((8, 8)), np.ones((8, 8)), epochs=3, verbose=0)
    assert "half weights" not in kinds_of(model)


def test_half_weights_of_an_optimizer_that_was_built_before():
    keras.config.set_dtype_policy("bfloat16")
    model = model_of(layers.Dense(8), loss="mse", optimizer="adam")
    model.optimizer.build(model.trainable_variables)
    with pytest.warns(kmp.PrecisionWarning, match="built before"):
        model.compile(kmp.scaled(model.optimizer, "none"), "mse")
        model.optimizer.build(model.trainable_variables)
    assert "half weights" in kinds_of(model)


@pytest.mark.filterwarnings("ignore:Weights in float16")
@pytest.mark.parametrize("policy", few(["bfloat16", "float16"], "bfloat16"))
@pytest.mark.parametrize("kind", few(["Lion", "Adam", "Adamax"], "Adam"))
def test_half_weights_whose_steps_are_rounded_away(kind, policy):
    """1 - 1e-4 is 1 in both; only the bias, which is 0, can move."""
    keras.config.set_dtype_policy(policy)
    optimizer = getattr(keras.optimizers, kind)(1e-4, **({"beta_2": 0.9} if kind == "Adam" else {}))
    dense = layers.Dense(8, kernel_initializer="ones")
    model = model_of(dense, loss="mse", optimizer=kmp.scaled(optimizer, rounding="nearest"))
    (finding,) = kmp.audit(model).of_kind("half weights")
    assert "89% of their weights" in finding.problem and f"step of {kind}" in finding.problem
    before = model.get_weights()
    model.fit(np.ones((8, 8)), np.ones((8, 8)), epochs=2, verbose=0)
    assert np.array_equal(before[0], model.get_weights()[0])
    optimizer.learning_rate = 0.1
    assert kmp.audit(model).of_kind("half weights") == ()


@pytest.mark.parametrize("is_built", [False, True])
def test_half_weights_of_some_of_several_optimizers(is_built):
    """Adam does not move the kernels; SGD moves the biases. What the advice says moves both."""
    keras.config.set_dtype_policy("bfloat16")
    adam, sgd = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01)
    several = of_keras("optimizers.MultiOptimizer")(lambda v: adam if "kernel" in v.path else sgd)
    head = layers.Dense(8, dtype="float32")  # no half weights, and Adam's as well
    model = model_of(layers.Dense(8), layers.Dense(8), head, loss="mse", optimizer=several)
    if is_built:
        several.build(model.trainable_variables)
    (finding,) = kmp.audit(model).of_kind("half weights")
    assert "2 variables are in bfloat16, in which Adam's beta_2" in finding.problem
    assert finding.path == model.layers[-2].kernel.path
    assert "kmp.scaled(MultiOptimizer(...), master_weights=True)" in finding.advice
    adam, sgd = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01)
    several = keras.optimizers.MultiOptimizer(lambda v: adam if "kernel" in v.path else sgd)
    model.compile(kmp.scaled(several, master_weights=True), "mse")
    before = model.get_weights()
    model.fit(np.ones((8, 8)), np.ones((8, 8)), verbose=0)
    assert not any(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    assert "half weights" not in kinds_of(model)


def test_half_weights_of_an_optimizer_for_each_variable():
    keras.config.set_dtype_policy("bfloat16")
    several = of_keras("optimizers.MultiOptimizer")(lambda v: keras.optimizers.Adam())
    model = model_of(layers.Dense(8), layers.Dense(8), loss="mse", optimizer=several)
    (finding,) = kmp.audit(model).of_kind("half weights")
    assert "4 variables" in finding.problem
    several.build(model.trainable_variables)
    for part in several.optimizers:  # those in use count, not what the function would make now
        part.beta_2, part.learning_rate = 0.9, 0.5
    assert kmp.audit(model).of_kind("half weights") == ()


def test_half_weights_that_move():
    for policy, optimizer in (("bfloat16", "sgd"), ("bfloat16", keras.optimizers.Adam(beta_2=0.9))):
        keras.config.set_dtype_policy(policy)
        model = model_of(layers.Dense(8), loss="mse", optimizer=optimizer)
        assert "half weights" not in kinds_of(model)
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert "half weights" not in kinds_of(model_of(layers.Dense(8), loss="mse", optimizer="adam"))


def test_keras_still_moves_no_bfloat16_weight_with_adam():
    keras.config.set_dtype_policy("bfloat16")
    model = model_of(layers.Dense(8), loss="mse", optimizer="adam")
    before = model.get_weights()
    model.fit(np.ones((8, 8)), np.ones((8, 8)), epochs=3, verbose=0)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


RECURRENT = few([layers.LSTM, layers.GRU, layers.SimpleRNN], layers.LSTM)


@pytest.mark.parametrize("kind", RECURRENT)
def test_keras_still_builds_no_recurrent_layer_in_bfloat16(kind):
    """Their weights begin orthogonal, and no backend decomposes a matrix in half precision."""
    with pytest.raises(Exception, match=r"(?i)bfloat16"):
        kind(4, dtype="bfloat16").build((None, 3, 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrent_layer_trains_in_bfloat16_once_converted(kind):
    model = keras.Sequential([keras.Input((3, 2)), kind(4), layers.Dense(2)])
    kmp.to_mixed_precision(model, "bfloat16")
    assert {v.dtype for v in model.layers[0].weights} == {"bfloat16"}
    model.compile(kmp.scaled("adam", learning_rate=0.1), "mse")
    losses = model.fit(np.ones((8, 3, 2)), np.ones((8, 2)), epochs=9, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2


def test_loss_scaling_that_is_lost_on_reload():
    model = model_of(layers.Dense(8), loss="mse", optimizer=keras.optimizers.Adam())
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    (finding,) = kmp.audit(model).of_kind("lost on reload")
    assert "goes on without" in finding.problem and "kmp.scaled(Adam" in finding.advice


def test_keras_still_loses_it(tmp_path):
    model = model_of(layers.Dense(8), loss="mse", optimizer=keras.optimizers.Adam())
    model.save(tmp_path / "model.keras")
    keras.config.set_dtype_policy("float32")
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not isinstance(loaded.optimizer, keras.optimizers.LossScaleOptimizer)
    assert loaded.layers[0].compute_dtype == "float16"


class OfWords(keras.Model):
    """An embedding of its own, and one inside a layer, whose scope it is called in."""

    def __init__(self, last=lambda x: x):
        super().__init__()
        self.last = last
        self.words = layers.Embedding(4, 2, name="words")
        self.nested = layers.TimeDistributed(layers.Embedding(4, 2))

    def call(self, x):
        return self.last(self.words(x) + keras.ops.sum(self.nested(x[..., None]), axis=-2))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32", "bfloat16"])
def test_the_gradient_of_an_embedding_is_a_sum_in_half_precision(policy):
    keras.config.set_dtype_policy(policy)
    model = OfWords()
    model(np.zeros((2, 3), "int32"))
    found = kmp.audit(model).of_kind("half gradient")
    assert len(found) == (BACKEND == "jax" and policy.startswith("mixed"))
    if found:
        assert found[0].path.endswith("words") and "kmp.protect(model)" in found[0].advice
        counted = {"mixed_float16": "2048", "mixed_bfloat16": "256"}[policy]
        assert f"stalls at {counted}." in found[0].problem
    model.compile(kmp.scaled("sgd"), "mse")
    with kmp.protect(model):
        assert not kmp.audit(model).of_kind("half gradient")
    assert kmp.audit(model).of_kind("half gradient") == found
    model.make_train_function = functools.partial(model.make_train_function)  # of the user's
    assert kmp.audit(model).of_kind("half gradient") == found
    model.compile("sgd", "mse", auto_scale_loss=False)  # which `kmp.protect` refuses
    advised = [finding.advice for finding in kmp.audit(model).of_kind("half gradient")]
    callbacks = 'Give fit one of kmp\'s callbacks, or give the layer dtype="float32".'
    assert advised == [callbacks] * len(found)
    model.words.trainable = False
    assert not kmp.audit(model).of_kind("half gradient")


@pytest.mark.only("jax")
def test_it_is_none_in_a_protected_model_where_other_weights_are_in_half_precision():
    """They would not be cast in the scope in which an embedding casts nothing."""
    model = OfWords(layers.Dense(2, dtype=kmp.Policy("p=bf16,c=f32"), trainable=False))
    model(np.zeros((2, 3), "int32"))
    model.compile(kmp.scaled("sgd"), "mse")
    assert len(kmp.audit(model).of_kind("half gradient")) == 1
    with kmp.protect(model):
        assert not kmp.audit(model).of_kind("half gradient")


class Position(layers.Layer):
    """Adds a number that bfloat16 has not; `where` says whether the layer or its variable tells."""

    def __init__(self, where):
        super().__init__(autocast=where != "layer")
        self.of_variable = where != "variable"

    def build(self, shape):
        begins = keras.initializers.Constant(257.0)
        self.offset = self.add_weight((), begins, autocast=self.of_variable, name="offset")

    def call(self, x):
        return keras.ops.cast(x, "float32") + keras.ops.cast(self.offset, "float32")


@pytest.mark.parametrize("where", ["layer", "variable"])
def test_variables_that_keras_rounds_although_the_layer_forbids_it(where):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((1,)), Position(where), layers.Flatten(dtype="float32")])
    x = np.zeros((2, 1))
    assert keras.ops.convert_to_numpy(model(x)).tolist() == [[257.0]] * 2
    found = kmp.audit(model).of_kind("rounded variables")
    is_rounded = BACKEND == "jax" and where == "layer"
    assert len(found) == is_rounded
    assert model.predict(x, verbose=0).tolist() == [[256.0 if is_rounded else 257.0]] * 2
    if found:
        assert "offset in bfloat16" in found[0].problem
        keras.config.set_dtype_policy("float32")
        assert not kmp.audit(keras.Sequential([keras.Input((1,)), Position(where)]))


@pytest.mark.parametrize(
    "loss", ["mse", "huber", keras.losses.mean_absolute_error, keras.losses.LogCosh()]
)
def test_regressions_that_end_in_half_precision_are_named_and_the_advice_works(loss):
    keras.config.set_dtype_policy("mixed_bfloat16")
    years = np.arange(1995, 2026, dtype="float32")[:, None]

    def of_years(last):
        model = keras.Sequential([keras.Input((1,), dtype="float32"), layers.Dense(1), last])
        model.compile(kmp.scaled("sgd"), loss)
        kernel, bias = model.layers[0].weights
        kernel.assign([[0.0625]]), bias.assign([0])
        model.layers[1].kernel.assign([[1.0]])
        return model, len(np.unique(model.predict(years - 1995, verbose=0) + 0))

    ends = {"kernel_initializer": "ones", "bias_initializer": keras.initializers.Constant(2000)}
    rounded, few_numbers = of_years(layers.Dense(1, **ends))
    (finding,) = kmp.audit(rounded).of_kind("half output")
    assert finding.path == path_of(rounded.layers[-1]) and "have 2 digits" in finding.problem
    advised, numbers = of_years(kmp.layers.Float32OutputDense(1, **ends))
    assert kmp.audit(advised).of_kind("half output") == ()
    assert few_numbers == 1 and numbers == len(years)
    rounded.compile(kmp.scaled("sgd"), keras.losses.BinaryCrossentropy(from_logits=True))
    assert kmp.audit(rounded).of_kind("half output") == ()
