"""to_mixed_precision: which layers stay in float32, what comes along, what the report says."""

import keras
import kinds
import numpy as np
import pytest
from converted import X, compute_dtypes, sequential
from keras import layers

import kmp
from kmp._keras import layers_of

pytestmark = pytest.mark.slow


@pytest.mark.quick
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


@pytest.mark.quick
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


@pytest.mark.quick
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


@pytest.mark.quick
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
    with pytest.raises(ValueError, match=r"policies of 2 layers in 'subclassed.*now creates 3"):
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
