"""Conversion: what stays behind, what comes along, and that it is all or nothing."""

import keras
import kinds
import numpy as np
import pytest
from keras import layers

import kmp
from kmp._keras import layers_of

X = kinds.VECTORS


def compute_dtypes(model):
    return {layer.name: layer.compute_dtype for layer in layers_of(model)}


def sequential():
    return kinds.sequential()[0]


def test_the_report_says_what_became_of_each_layer():
    model = sequential()
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    body, head = report.rows[1:]
    assert (body.layer, body.before, body.after) == ("Dense", "float32", "mixed_bfloat16")
    assert body.path == model.layers[0].path and body.reason == ""
    assert (head.before, head.after, head.reason) == ("float32", "float32", "output layer")
    assert report.converted == (model.path, body.path) and report.kept == {head.path: head.reason}
    header, *rows = str(report).splitlines()
    assert header.split() == ["layer", "class", "before", "after", "left", "alone", "because"]
    assert len(rows) == 3 and rows[2].endswith("output layer") and rows[1].endswith("bfloat16")


def test_the_default_is_what_the_hardware_is_good_at():
    model = sequential()
    kmp.to_mixed_precision(model)
    assert model.layers[0].compute_dtype == kmp.half_dtype()


@pytest.mark.parametrize("before", ["predict", "evaluate", "fit"])
def test_cached_functions_are_dropped(before):
    model = keras.Sequential([keras.Input((6,)), kinds.Block(2), layers.Dense(2)])
    model.compile("sgd", "mse")
    y = np.zeros((8, 2), "float32")
    float32 = model.predict(X, verbose=0)
    model.evaluate(X, y, verbose=0)
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    seen = []
    inner = model.layers[0].down
    inner.call = lambda x, call=inner.call, **kw: seen.append(str(x.dtype)) or call(x)
    {
        "predict": lambda: model.predict(X, verbose=0),
        "evaluate": lambda: model.evaluate(X, y, verbose=0),
        "fit": lambda: model.fit(X, y, verbose=0),
    }[before]()
    assert seen and all("bfloat16" in dtype for dtype in seen)
    assert not np.array_equal(float32, model.predict(X, verbose=0))


def test_filter_fn_excludes_a_layer_with_all_that_is_inside():
    model, _ = kinds.custom_composite_layer()
    seen = []

    def filter_fn(layer, path):
        seen.append((layer.name, path))
        return path != "body"

    report = kmp.to_mixed_precision(model, "mixed_bfloat16", filter_fn)
    assert compute_dtypes(model)["down"] == compute_dtypes(model)["body"] == "float32"
    assert report.kept["body"] == "excluded by filter_fn"
    assert report.kept["body/down"] == "inside body"
    assert ("body", "body") in seen and "down" not in dict(seen)


def test_heads_are_found_behind_softmax_dropout_and_merges():
    inputs = keras.Input((6,))
    trunk = layers.Dense(6, name="trunk")(inputs)
    left, right = layers.Dense(6, name="left")(trunk), layers.Dense(6, name="right")(trunk)
    merged = layers.Dropout(0.1)(layers.Add()([left, keras.ops.relu(right)]))
    model = keras.Model(inputs, layers.Softmax(name="softmax")(merged))
    kmp.to_mixed_precision(model, "mixed_float16")
    dtypes = compute_dtypes(model)
    assert dtypes["trunk"] == "float16"
    assert {dtypes[name] for name in ("left", "right", "softmax", "dropout")} == {"float32"}


def test_the_head_of_a_nested_model_is_found():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(4, name="a"), layers.Dense(2)])
    model = keras.Sequential([keras.Input((6,)), layers.Dense(6, name="b"), inner])
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert inner.layers[1].compute_dtype == "float32"
    assert {compute_dtypes(model)[name] for name in "ab"} == {"bfloat16"}


class Raw(keras.Model):
    """Raw operations between the last layer and the output; a preprocessing layer inside."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(2, name="head")  # created first, called last
        self.rescale = layers.Rescaling(1e-5)
        self.body = layers.Dense(4, name="body")

    def call(self, x):
        return keras.ops.softmax(self.head(self.body(self.rescale(x))) * 2.0)


def test_the_head_of_a_subclassed_model_is_the_layer_called_last():
    model = Raw()
    model(X * 1e6)
    call = keras.Layer.__call__
    kmp.to_mixed_precision(model, "mixed_float16")
    assert keras.Layer.__call__ is call
    dtypes = compute_dtypes(model)
    assert (dtypes["body"], dtypes["head"]) == ("float16", "float32")
    assert model.compute_dtype == "float32"  # or it would cast 1e6 before it is rescaled
    assert np.isfinite(keras.ops.convert_to_numpy(model(X * 1e6))).all()


class Untraceable(Raw):
    def call(self, x):
        if isinstance(x, keras.KerasTensor) or not hasattr(x, "shape"):
            raise RuntimeError("cannot be traced")
        return self.body(self.head(keras.ops.convert_to_tensor(keras.ops.convert_to_numpy(x))))


@pytest.mark.only("tensorflow", "jax")  # torch traces with tensors that hold numbers
def test_where_the_model_cannot_be_traced_the_layer_created_last_is_the_head():
    model = Untraceable()
    for layer in (model.head, model.body):
        layer.build((None, 6 if layer is model.head else 2))
    model.built = True
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert (model.head.compute_dtype, model.body.compute_dtype) == ("bfloat16", "float32")


class NeedsData(Raw):
    """Looks at numbers, and computes on in float32 alone."""

    def call(self, x):
        assert float(keras.ops.max(keras.ops.abs(x))) > 0
        x = self.head(x)
        if keras.backend.standardize_dtype(x.dtype) != "float32":
            raise TypeError("float32 is needed")
        return self.body(x)


@pytest.mark.only("tensorflow", "jax")  # torch traces with tensors that hold numbers
def test_a_model_that_could_not_be_tried_is_said_to():
    model = NeedsData()
    model(X)
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert "was not tried in mixed_float16" in report.untried
    assert str(report).splitlines()[-1] == report.untried
    with pytest.raises(TypeError, match="float32 is needed"):
        model(X)
    assert kmp.to_mixed_precision(sequential(), "mixed_float16").untried == ""


class WithoutCall(keras.Model):
    """As keras.io's GANs: the train step calls the models inside, with optimizers of their own."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = sequential(), sequential()
        self.tracker = keras.metrics.Mean(name="loss")

    def compile(self, optimizer):
        super().compile()
        self.optimizer_of_generator = optimizer


def test_a_model_without_call_is_converted_and_audited():
    model = WithoutCall()
    model.compile(keras.optimizers.Adam())
    assert not model.built
    report = kmp.to_mixed_precision(model, "mixed_float16")
    parts = model.generator, model.discriminator
    assert [x.compute_dtype for part in parts for x in part.layers] == ["float16", "float32"] * 2
    assert report.untried == "" and isinstance(model.optimizer, keras.optimizers.RMSprop)
    assert "optimizer_of_generator (Adam) does not scale the loss" in report.optimizer
    (finding,) = kmp.audit(model).of_kind("unscaled float16")
    assert "optimizer_of_generator=kmp.scaled(Adam, ...)" in finding.advice
    model.compile(kmp.scaled("adam"))
    assert kmp.audit(model).of_kind("unscaled float16") == ()


def test_a_model_without_call_whose_parts_are_not_built_is_refused():
    class Parts(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = sequential(), layers.Dense(2)

    with pytest.raises(ValueError, match="must be built"):
        kmp.to_mixed_precision(Parts(), "mixed_float16")


def test_an_output_dtype_is_honoured_at_the_outputs():
    for policy, expected in (
        ("p=f32,c=bf16,o=bf16", "bfloat16"),
        ("p=f32,c=bf16,o=f32", "float32"),
        ("p=f32,c=bf16,o=f16", "float16"),
        ("mixed_bfloat16", "float32"),
    ):
        model = sequential()
        kmp.to_mixed_precision(model, policy)
        assert keras.backend.standardize_dtype(model(X).dtype) == expected, policy
        assert str(model.predict(X, verbose=0).dtype) == expected
        assert model.layers[0].compute_dtype == "bfloat16"


def test_a_functional_model_hands_raw_inputs_on_as_they_are():
    seen = []

    class Raw(layers.Rescaling):
        def call(self, x):
            seen.append(keras.backend.standardize_dtype(x.dtype))
            return super().call(x)

    model = keras.Sequential([keras.Input((6,)), Raw(1e-5), layers.Dense(4), layers.Dense(2)])
    kmp.to_mixed_precision(model, "mixed_float16")
    raw = keras.ops.convert_to_tensor(X + 100_001.0)  # float16 would round it to inf
    assert np.isfinite(keras.ops.convert_to_numpy(model(raw))).all()
    assert model.layers[0].compute_dtype == "float32"


def test_activity_regularizers_are_left_in_float32():
    """Keras adds them up in half precision, which crashes `fit` on TensorFlow."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(300, activity_regularizer="l2"),
            layers.Dense(4),
            layers.Dense(2),
        ]
    )
    model.compile("sgd", "mse")
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert report.kept[model.layers[0].path] == "activity regularizer"
    assert np.isfinite(model.fit(X, X[:, :2], verbose=0).history["loss"]).all()


def test_layers_that_do_not_compute_in_floats_are_left_alone():
    inputs = keras.Input((), dtype="int64")
    one_hot = layers.CategoryEncoding(6, output_mode="one_hot", dtype="int64")(inputs)
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(3, name="body")(one_hot)))
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert report.kept["category_encoding"] == "computes in int64"
    assert model.get_layer("category_encoding").compute_dtype == "int64"
    assert model.get_layer("body").compute_dtype == "bfloat16"


def test_back_to_float32_and_on_to_another_policy():
    model = sequential()
    expected = keras.ops.convert_to_numpy(model(X))
    for policy in ("mixed_float16", "mixed_bfloat16", "float32"):
        report = kmp.to_mixed_precision(model, policy)
        assert model.layers[0].compute_dtype == kmp.Policy(policy).compute_dtype
    assert report.kept == {}
    assert np.array_equal(expected, keras.ops.convert_to_numpy(model(X)))


def test_a_converted_model_follows_autocast():
    model = sequential()
    kmp.to_mixed_precision(model, "autocast")
    plain = keras.ops.convert_to_numpy(model(X))
    assert model.layers[0].compute_dtype == "float32"
    with kmp.autocast("mixed_float16"):
        assert model.layers[0].compute_dtype == "float16"
        half = keras.ops.convert_to_numpy(model(X))
    assert half.dtype == plain.dtype == "float32" and not np.array_equal(half, plain)
    assert np.array_equal(plain, keras.ops.convert_to_numpy(model(X)))


def test_the_optimizer_is_wrapped_with_its_state():
    model = sequential()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], jit_compile=False)
    model.fit(X, X[:, :2], epochs=2, verbose=0)
    adam, state = model.optimizer, [v.numpy() for v in model.optimizer.variables]
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    assert model.optimizer.inner_optimizer is adam
    assert report.optimizer == "Adam was wrapped in kmp.LossScaleOptimizer, with its state."
    assert report.optimizer in str(report)
    assert model.optimizer.built  # so that it can be saved before it is trained
    for old, new in zip(state, adam.variables, strict=True):
        assert np.array_equal(old, new.numpy())
    history = model.fit(X, X[:, :2], verbose=0).history
    assert int(adam.iterations) == 3 and set(history) == {"loss", "mae"}


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: kmp.scaled("sgd"),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        lambda: keras.optimizers.SGD(loss_scale_factor=128.0),
    ],
    ids=["kmp", "keras", "factor"],
)
def test_an_optimizer_that_scales_the_loss_is_left_alone(optimizer):
    model = sequential()
    model.compile(optimizer(), "mse")
    mine = model.optimizer
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert model.optimizer is mine and report.optimizer == ""


def test_bfloat16_needs_no_loss_scaling_and_an_uncompiled_model_has_none():
    model = sequential()
    model.compile("sgd", "mse")
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert type(model.optimizer).__name__.endswith("SGD")
    model = sequential()
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert report.optimizer == "" and not model.compiled
    model.compile("sgd", "mse")  # Keras finds float16 by the name of the policy
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.parametrize("kind", ["sequential", "simple_functional", "subclassed"])
def test_a_model_compiled_with_strings_keeps_its_training_state_in_files(tmp_path, kind):
    model, x = kinds.KINDS[kind]()
    model.compile("adam", loss="mse", metrics=["mse"], jit_compile=False)
    kmp.to_mixed_precision(model, "mixed_float16")
    model.fit(x, x[:, :2], verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, kmp.LossScaleOptimizer)
    assert int(loaded.optimizer.inner_optimizer.iterations) == 1
    for old, new in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        assert np.array_equal(old.numpy(), new.numpy())
    loaded.fit(x, x[:, :2], verbose=0)


def test_a_subclassed_model_stays_of_its_class(tmp_path):
    model, x = kinds.subclassed()
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert isinstance(model, kinds.Subclassed) and type(model).__name__ == "Subclassed"
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, kinds.Subclassed) and loaded.body.compute_dtype == "bfloat16"
    loaded.save(tmp_path / "again.keras")
    again = keras.models.load_model(tmp_path / "again.keras")
    assert (again.body.compute_dtype, again.last.compute_dtype) == ("bfloat16", "float32")
    assert np.array_equal(*(keras.ops.convert_to_numpy(m(x)) for m in (model, again)))


def test_a_file_whose_class_has_changed_is_refused(tmp_path, monkeypatch):
    model, _ = kinds.subclassed()
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    model.save(tmp_path / "model.keras")
    original = kinds.Subclassed.__init__

    def one_layer_more(self, **kwargs):
        original(self, **kwargs)
        self.more = layers.ReLU()

    monkeypatch.setattr(kinds.Subclassed, "__init__", one_layer_more)
    with pytest.raises(ValueError, match=r"policies of 3 layers.*now creates 4"):
        keras.models.load_model(tmp_path / "model.keras")


@pytest.mark.only("tensorflow")
def test_a_converted_model_exports(tmp_path):
    import tensorflow as tf

    model = kinds.convolutions()[0]
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    model.export(tmp_path / "saved", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    served = loaded.serve(kinds.IMAGES).numpy()
    expected = keras.ops.convert_to_numpy(model(kinds.IMAGES))
    # XLA is not in it, but Grappler is: it may fuse one rounding of bfloat16 away.
    assert np.abs(served - expected).max() <= 2.0**-7 * np.abs(expected).max()


class Fussy(layers.Layer):
    def call(self, x):
        if keras.backend.standardize_dtype(x.dtype) != "float32":
            raise TypeError("Fussy wants float32")
        return x


def nothing_converted(model, convert, error, match):
    model.compile("sgd", "mse")
    optimizer, kind = model.optimizer, type(model)
    before = [(x, x.dtype_policy) for x in layers_of(model)]
    model.predict_function = marker = object()
    with pytest.raises(error, match=match):
        convert(model)
    assert all(layer.dtype_policy is policy for layer, policy in before)
    assert model.optimizer is optimizer and type(model) is kind
    assert model.predict_function is marker


def test_a_model_that_could_not_be_called_any_more_is_not_converted():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3), Fussy(), layers.Dense(2)])
    convert = lambda model: kmp.to_mixed_precision(model, "mixed_float16")  # noqa: E731
    nothing_converted(model, convert, ValueError, "cannot be called in mixed_float16")
    report = kmp.to_mixed_precision(
        model, "mixed_float16", lambda layer, path: not isinstance(layer, Fussy)
    )
    assert "excluded by filter_fn" in report.kept.values()


def test_an_error_in_filter_fn_converts_nothing():
    def filter_fn(layer, path):
        if layer.name == "head":
            raise RuntimeError("from filter_fn")
        return True

    convert = lambda model: kmp.to_mixed_precision(model, "mixed_float16", filter_fn)  # noqa: E731
    nothing_converted(sequential(), convert, RuntimeError, "from filter_fn")


@pytest.mark.parametrize(
    "policy, match",
    [
        ("float16", "weights stay as they are, in float32.*parameters are float16"),
        ("p=f64,c=bf16", "parameters are float64"),
        ("mixed_flaot16", "Received: 'mixed_flaot16'"),
        ("p=f32,q=f16", "unknown key 'q'"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(policy, match):
    convert = lambda model: kmp.to_mixed_precision(model, policy)  # noqa: E731
    nothing_converted(sequential(), convert, ValueError, match)


def test_quantized_layers_are_refused():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(2)])
    for layer in model.layers:
        layer.quantize("int8")
    with pytest.raises(ValueError, match=r"Quantized layers.*and 1 more.*before model\.quantize"):
        kmp.to_mixed_precision(model, "mixed_bfloat16")


def test_a_model_that_is_not_built_is_refused():
    with pytest.raises(ValueError, match=r"must be built.*model\.build\(input_shape\)"):
        kmp.to_mixed_precision(keras.Sequential([layers.Dense(2)]), "mixed_bfloat16")
    with pytest.raises(TypeError, match=r"must be a keras\.Model.*dtype_policy = kmp\.Policy"):
        kmp.to_mixed_precision(layers.Dense(2), "mixed_bfloat16")


def test_a_policy_map_is_replaced_not_written_to():
    policy_map = keras.dtype_policies.DTypePolicyMap(keras.DTypePolicy("float32"))
    keras.config.set_dtype_policy(policy_map)
    model = sequential()
    keras.config.set_dtype_policy("float32")
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert len(policy_map) == 0 and model.layers[0].compute_dtype == "bfloat16"


def test_the_map_of_a_diagnosis_converts_a_model():
    model = sequential()
    path = model.layers[0].path

    def map_of(policy):
        entries = {path: keras.DTypePolicy(policy)}
        return keras.dtype_policies.DTypePolicyMap(keras.DTypePolicy("mixed_float16"), entries)

    model.compile("sgd", "mse")
    report = kmp.to_mixed_precision(model, map_of("float32"))
    assert report.kept[path] == "float32 in the map" and model.dtype_policy.name == "mixed_float16"
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    with pytest.raises(ValueError, match="'mixed_float16' by default and 'mixed_bfloat16' for"):
        kmp.to_mixed_precision(model, map_of("mixed_bfloat16"))

    model, x = kinds.functional(X, layers.Dense(8, name="body"))
    model.compile("sgd", "mse")
    diagnosis = kmp.debug.diagnose(model, x, x[:, :2], target_sqnr=30.0)
    kmp.to_mixed_precision(model, diagnosis.policy)
    assert model.get_layer("body").compute_dtype == "float16"


def test_converting_reads_and_changes_no_state():
    model, _ = kinds.functional(X, lambda x: layers.Dropout(0.5)(layers.Dense(4, name="body")(x)))
    before = [v.numpy() for v in model.variables]
    nodes = [len(layer._inbound_nodes) for layer in layers_of(model)]
    call = keras.Layer.__call__
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, model.variables, strict=True))
    assert nodes == [len(layer._inbound_nodes) for layer in layers_of(model)]
    assert keras.Layer.__call__ is call
