"""Each danger is found where it is, nowhere else, and finding it changes nothing."""

import keras
import numpy as np
import pytest
from keras import layers
from oracle import BACKEND

import kmp
from kmp._keras import layers_of, path_of
from kmp.models.hazards import HAZARDS

CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy


def model_of(*stack, loss=None, optimizer=None, **compiled):
    model = keras.Sequential([keras.Input((8,)), *stack])
    if loss is not None:
        with_scaling = kmp.scaled("sgd") if optimizer is None else optimizer
        model.compile(with_scaling, loss, **compiled)
    return model


def kinds_of(model):
    return [finding.kind for finding in kmp.audit(model).findings]


@pytest.fixture(autouse=True)
def float16():
    keras.config.set_dtype_policy("mixed_float16")


def test_a_sound_model_has_no_findings():
    model = model_of(
        layers.Rescaling(1e-3, dtype="float32"),
        layers.Dense(16, "relu"),
        kmp.layers.Float32BatchNormalization(),
        kmp.layers.Float32OutputDense(8),
        loss=CROSSENTROPY(from_logits=True),
        metrics=["accuracy", "mse"],
    )
    report = kmp.audit(model)
    assert not report and report.findings == ()
    assert str(report) == "Nothing dangerous was found."


def test_a_float32_model_has_no_findings():
    keras.config.set_dtype_policy("float32")
    model = model_of(layers.Rescaling(1.0), layers.Dense(3, "softmax"), loss=CROSSENTROPY())
    assert kinds_of(model) == []


def test_a_converted_model_has_no_findings():
    keras.config.set_dtype_policy("float32")
    stack = [layers.Rescaling(1e-3), layers.Dense(8, activity_regularizer="l2"), layers.Dense(8)]
    model = model_of(*stack, layers.Dense(8, "softmax"), loss=CROSSENTROPY(), optimizer="sgd")
    kmp.to_mixed_precision(model, "mixed_float16")
    assert kinds_of(model) == []


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
    monkeypatch.setattr("kmp._backend.platform", lambda: "tpu")
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


@pytest.mark.parametrize("loss", [CROSSENTROPY(from_logits=True), "mse"], ids=["logits", "mse"])
def test_a_softmax_whose_logarithm_nobody_takes_is_harmless(loss):
    assert "half softmax" not in kinds_of(model_of(layers.Dense(8, "softmax"), loss=loss))


def test_half_loss():
    """Keras evaluates a function in the dtype of its inputs: 300 squared is inf."""
    model = model_of(layers.Dense(8), loss=keras.losses.mean_squared_error)
    (finding,) = kmp.audit(model).of_kind("half loss")
    assert "mean_squared_error is evaluated in float16" in finding.problem
    for loss in ("mse", keras.losses.MeanSquaredError()):
        assert "half loss" not in kinds_of(model_of(layers.Dense(8), loss=loss))


COUNTS = [
    "accuracy",
    "sparse_categorical_accuracy",
    "top_k_categorical_accuracy",
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


def test_keras_still_evaluates_metrics_in_half():
    model = model_of(layers.Dense(1, kernel_initializer="ones"), loss="mse", metrics=["mse"])
    x, y = np.full((4, 8), 40.0, "float32"), np.zeros((4, 1), "float32")
    loss, metric = model.evaluate(x, y, verbose=0)
    assert loss == pytest.approx(320**2) and metric == np.inf


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "scaled", "lamb"])
def test_half_weights(optimizer):
    keras.config.set_dtype_policy("bfloat16")
    made = {"scaled": lambda: kmp.scaled("adam"), "lamb": keras.optimizers.Lamb}
    optimizer = made[optimizer]() if optimizer in made else optimizer
    model = model_of(layers.Dense(8), layers.Dense(8), loss="mse", optimizer=optimizer)
    (finding,) = kmp.audit(model).of_kind("half weights")
    assert "beta_2=0.999 is 1" in finding.problem and "mixed_bfloat16" in finding.advice
    assert "4 variables are in bfloat16" in finding.problem


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


def test_half_statistics():
    keras.config.set_dtype_policy("bfloat16")
    sound = [layers.BatchNormalization(momentum=0.9), kmp.layers.Float32BatchNormalization()]
    model = model_of(layers.BatchNormalization(), *sound)
    (finding,) = kmp.audit(model).of_kind("half statistics")
    assert finding.path == path_of(model.layers[0])
    assert "within 20% of them" in finding.problem and "Float32BatchNorm" in finding.advice


def test_keras_still_stalls_in_bfloat16():
    """From 1 the moving mean of batches of 1.19 does not move, as the finding says."""
    layer = layers.BatchNormalization(dtype="bfloat16", moving_mean_initializer="ones")
    for mean, moves in ((1.19, False), (1.6, True)):
        layer(np.full((4, 2), mean, "float32"), training=True)
        assert moves == (float(keras.ops.convert_to_numpy(layer.moving_mean)[0]) != 1)


def test_activity_regularizer():
    model = model_of(layers.Dense(8, activity_regularizer="l2"))
    (finding,) = kmp.audit(model).findings
    assert (finding.kind, finding.path) == ("activity regularizer", path_of(model.layers[0]))


def test_half_preprocessing():
    model = model_of(layers.Rescaling(1e-5), layers.Dense(8))
    assert kinds_of(model) == ["half preprocessing"]


class Normalized(layers.Layer):
    def __init__(self, epsilon):
        super().__init__()
        self.epsilon = epsilon

    def call(self, x):
        return x / (keras.ops.mean(x, -1, keepdims=True) + self.epsilon)


@pytest.mark.parametrize("epsilon, found", [(1e-8, True), (1e-7, False), (1e-3, False)])
def test_epsilon_of_a_layer(epsilon, found):
    model = model_of(Normalized(epsilon), layers.LayerNormalization(epsilon=epsilon))
    findings = kmp.audit(model).of_kind("epsilon")
    assert [x.path for x in findings] == [path_of(model.layers[0])] * found  # Keras's is float32's
    assert not found or "epsilon=1e-08 is below 5.96e-08" in findings[0].problem


def test_epsilon_of_an_optimizer_of_half_weights():
    keras.config.set_dtype_policy("float16")
    adam = kmp.scaled("adam", epsilon=1e-9)
    model = model_of(layers.Dense(8), loss="mse", optimizer=adam)
    assert [x.path for x in kmp.audit(model).of_kind("epsilon")] == ["optimizer"]
    keras.config.set_dtype_policy("mixed_float16")
    model = model_of(layers.Dense(8), loss="mse", optimizer=kmp.scaled("adam", epsilon=1e-9))
    assert kmp.audit(model).of_kind("epsilon") == ()


class Masked(layers.Layer):
    def call(self, x):
        return keras.ops.where(x > 0, x, -1e9)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_constants():
    model = model_of(Masked(), layers.Masking(mask_value=-1e6), layers.ReLU(negative_slope=0.1))
    found = kmp.audit(model).of_kind("constant")
    assert [x.path for x in found] == [path_of(layer) for layer in model.layers[:2]]
    assert "-1e+09 is beyond 65504" in found[0].problem and "-32752" in found[0].advice
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert kinds_of(model_of(Masked())) == []


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("error", [AttributeError, NotImplementedError, KeyError])
def test_a_layer_whose_config_cannot_be_read_is_audited(error):
    """keras-hub's Llama reads an attribute that it does not set."""

    class WithoutConfig(Masked):
        def get_config(self):
            raise error("there is no config")

    model = model_of(WithoutConfig())
    assert kinds_of(model) == ["constant"]


def test_tensor_cores():
    model = model_of(layers.Dense(13), layers.Dense(16), layers.Dense(8, dtype="float32"))
    found = kmp.audit(model).of_kind("tensor cores")
    assert [x.path for x in found] == [path_of(layer) for layer in model.layers[:2]]
    assert "8 x 13" in found[0].problem and found[0].advice == "Round 13 up to 16."


def test_tensor_cores_have_nothing_to_say_of_heads_biases_colours_and_look_ups():
    """12 heads of 64 features are one axis of 768 in the product; of 5 heads of 5 it is 25."""
    images, tokens = keras.Input((8, 8, 3)), keras.Input((4,), dtype="int32")
    x = layers.Embedding(1001, 768)(tokens)
    x = layers.MultiHeadAttention(12, 64)(x, x)
    y = layers.Flatten()(layers.Conv2D(16, 3)(images))
    outputs = layers.Dense(8)(layers.Concatenate()([layers.Flatten()(x), y]))
    assert kinds_of(keras.Model([images, tokens], outputs)) == []
    x = keras.Input((4, 8))
    odd = keras.Model(x, layers.MultiHeadAttention(5, 5, name="mha")(x, x))
    found = kmp.audit(odd).of_kind("tensor cores")
    names = {each.path.split("/")[-1] for each in found}
    assert names == {"query", "key", "value", "attention_output"}
    assert {each.advice for each in found} == {"Round 25 up to 32."}


def test_tensor_cores_multiply_by_a_tied_embedding():
    tokens = keras.Input((4,), dtype="int32")
    embedding = layers.ReversibleEmbedding(1001, 8)
    model = keras.Model(tokens, embedding(embedding(tokens), reverse=True))
    (finding,) = kmp.audit(model).of_kind("tensor cores")
    assert finding.advice == "Round 1001 up to 1008."


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


def test_a_report_prints_a_line_a_finding_and_selects():
    model = model_of(layers.Rescaling(1.0), layers.Dense(13), loss="mse")
    report = kmp.audit(model)
    assert [line.split(": ")[1] for line in str(report).splitlines()] == kinds_of(model)
    with pytest.raises(ValueError, match="`kind` must be one of"):
        report.of_kind("half-softmax")


def test_every_kind_is_documented():
    assert all(f'"{kind}"' in kmp.audit.__doc__ for kind in HAZARDS)


@pytest.mark.parametrize("model", [layers.Dense(1), None, "model"], ids=["layer", "None", "str"])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=r"must be a keras\.Model"):
        kmp.audit(model)


def test_a_model_that_is_not_built_is_refused():
    with pytest.raises(ValueError, match="must be built"):
        kmp.audit(keras.Sequential([layers.Dense(1)]))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_nothing_is_changed():
    model = model_of(Masked(), layers.Dropout(0.5), layers.Dense(13, "softmax"), loss="mse")
    model.optimizer.build(model.trainable_variables)
    variables = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    policies = [layer.dtype_policy for layer in layers_of(model)]
    assert kmp.audit(model)
    after = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    assert all(np.array_equal(a, b) for a, b in zip(variables, after, strict=True))
    assert all(x.dtype_policy is p for x, p in zip(layers_of(model), policies, strict=True))


def test_a_subclassed_model_without_a_config_is_audited():
    class Model(keras.Model):
        def __init__(self, units):
            super().__init__()
            self.dense = layers.Dense(units)

        def call(self, x):
            return self.dense(x) * 1e9

    model = Model(13)
    model(np.ones((2, 8), "float32"))
    assert kinds_of(model) == ["constant", "tensor cores"], BACKEND
