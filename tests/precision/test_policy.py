"""Policies: the grammar, the casts, and what Keras makes of them."""

import copy
import json
import pickle

import keras
import numpy as np
import pytest
from keras import ops
from keras.src.backend.common import masking
from oracle import BACKEND, COMPILED_MODES, compiled
from processes import environment, run_all

import kmp
from kmp._backend import backend

F64, F32, F16, BF16 = "float64", "float32", "float16", "bfloat16"
HALF = kmp.half_dtype()

GRAMMAR = {
    "float32": (F32, F32, F32),
    "float16": (F16, F16, F16),
    "bfloat16": (BF16, BF16, BF16),
    "float64": (F64, F64, F64),
    "f16": (F16, F16, F16),
    "full": (F32, F32, F32),
    "half": (HALF, HALF, HALF),
    "mixed_float16": (F32, F16, F16),
    "mixed_bfloat16": (F32, BF16, BF16),
    "p=f32,c=bf16,o=f32": (F32, BF16, F32),
    "params=float32,compute=float16,output=float32": (F32, F16, F32),
    "c=f16": (F32, F16, F16),  # JMP's defaults
    "p=f16,c=f16": (F16, F16, F16),
    "p=f16,c=bf16": (F16, BF16, BF16),
    "p=f16": (F16, F16, F16),
    "o=f32": (F32, F32, F32),
    "c=half,o=full": (F32, HALF, F32),
    " p = f32 , c = bf16 ": (F32, BF16, BF16),
}


def dtypes(policy):
    return policy.param_dtype, policy.compute_dtype, policy.output_dtype


@pytest.mark.parametrize("name", GRAMMAR)
def test_the_grammar(name):
    policy = kmp.Policy(name)
    assert dtypes(policy) == GRAMMAR[name]
    assert policy == kmp.get_policy(name) == kmp.Policy(str(policy))
    assert policy.variable_dtype == policy.param_dtype
    assert policy.has_output_dtype == ("o=" in name.replace(" ", "") or "output" in name)


@pytest.mark.parametrize("name", GRAMMAR)
def test_a_policy_survives_strings_configs_copies_and_pickles(name):
    policy = kmp.Policy(name)
    config = json.loads(json.dumps(keras.dtype_policies.serialize(policy)))
    others = [
        kmp.Policy(str(policy)),
        kmp.Policy.from_config(policy.get_config()),
        keras.dtype_policies.deserialize(config),
        copy.deepcopy(policy),
        pickle.loads(pickle.dumps(policy)),
    ]
    for other in others:
        assert other == policy and policy == other
        assert (other.compute_dtype, other.variable_dtype) == dtypes(policy)[1::-1]
    assert all(dtypes(kmp.get_policy(other)) == dtypes(policy) for other in others)


def test_dtypes_come_in_jmps_order_or_by_name():
    expected = kmp.Policy("p=f32,c=f16,o=f32")
    assert kmp.Policy("float32", "float16", "float32") == expected
    assert expected == kmp.Policy(
        output_dtype="float32", param_dtype="float32", compute_dtype="float16"
    )
    assert kmp.Policy(compute_dtype="bfloat16") == kmp.Policy("mixed_bfloat16")
    assert kmp.Policy(param_dtype="float16") == kmp.Policy("float16")
    assert kmp.Policy(np.float32, np.dtype("float16")) == kmp.Policy("mixed_float16")


def test_nothing_given_is_the_global_policy():
    kmp.set_policy("p=f32,c=bf16,o=f32")
    assert kmp.Policy() == kmp.get_policy() == keras.config.dtype_policy()
    assert str(kmp.get_policy()) == "p=f32,c=bf16,o=f32"


BAD = {
    "p=f32,x=f16": "unknown key 'x'",
    "p=f32,p=f16": "repeated key 'p'",
    "params=f32,p=f32": "repeated key 'p'",
    "p=f32,": "unknown key ''",
    "c=int8": "float32.*Received: 'int8'.*model.quantize",
    "int32": "Received: 'int32'",
    "float8_e4m3fn": "Received: 'float8_e4m3fn'.*model.quantize",
    "int8_from_mixed_bfloat16": "model.quantize",
    "p=float8_e5m2": "model.quantize",
    "mixed_half": "Received: 'mixed_half'",
    "bool": "Received: 'bool'",
    "": "Received: ''",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_policy_is_refused_and_changes_nothing(name):
    for construct in (kmp.Policy, kmp.get_policy, kmp.set_policy, kmp.autocast):
        with pytest.raises(ValueError, match=BAD[name]):
            construct(name)
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.parametrize("value", [3, object(), ["float16"], keras.layers.Dense])
def test_what_is_no_policy_is_refused(value):
    with pytest.raises(ValueError, match="A policy's dtypes are"):
        kmp.Policy(value)


def test_a_name_and_a_param_dtype_contradict_each_other():
    with pytest.raises(ValueError, match="by `name` or by `param_dtype`"):
        kmp.Policy("mixed_float16", param_dtype="float32")
    with pytest.raises(ValueError, match="Received: 'mixed_float16'"):
        kmp.Policy("mixed_float16", "float16")


def test_quantized_policies_and_maps_are_no_policies():
    with pytest.raises(ValueError, match="quantize"):
        kmp.get_policy(keras.dtype_policies.get("float8_from_mixed_bfloat16"))
    policy_map = keras.dtype_policies.DTypePolicyMap(keras.DTypePolicy("float32"))
    with pytest.raises(ValueError, match="gives each layer a policy of its own"):
        kmp.get_policy(policy_map)


def test_equality_is_of_dtypes():
    mixed = kmp.Policy("mixed_bfloat16")
    assert mixed == keras.DTypePolicy("mixed_bfloat16") == mixed
    assert mixed == kmp.Policy("p=f32,c=bf16,o=bf16") and hash(mixed) == hash(kmp.Policy("c=bf16"))
    different = ["mixed_float16", "p=f32,c=bf16,o=f32", "bfloat16", "autocast", "float32"]
    for other in map(kmp.Policy, different):
        assert mixed != other and other != mixed
    assert kmp.Policy("autocast") != kmp.Policy("float32")
    assert kmp.Policy("float32") != keras.DTypePolicy("int32")
    assert mixed != keras.DTypePolicy("mixed_float16") and mixed != "mixed_float16"
    assert mixed == "mixed_bfloat16"  # as a loaded policy stands in for its name
    assert mixed != keras.dtype_policies.get("int8_from_mixed_bfloat16")
    assert kmp.Policy("p=f32,c=bf16,o=f32") != keras.DTypePolicy("mixed_bfloat16")


def test_with_output_dtype():
    policy = kmp.Policy("mixed_float16").with_output_dtype("float32")
    assert dtypes(policy) == (F32, F16, F32) and policy.name == "mixed_float16"
    with pytest.raises(ValueError, match="output dtype of the scope"):
        kmp.Policy("autocast").with_output_dtype("float32")


@pytest.mark.parametrize("name", ["p=f32,c=f16,o=f32", "mixed_float16", "c=f16"])
def test_keras_finds_float16_by_the_name(name):
    """`compile` wraps the optimizer in loss scaling only where the name is this one."""
    kmp.set_policy(name)
    model = keras.Sequential([keras.layers.Dense(1)])
    assert model.dtype_policy.name == "mixed_float16"
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def test_the_casts_touch_floats_alone():
    policy = kmp.Policy("p=f32,c=f16,o=bf16")
    text, ids = np.array(["a"]), np.arange(3)
    tree = {"x": [ops.ones(2), np.ones(2, "float32")], "ids": ids, "b": (True, None, "s", 1.5, 2)}
    tree |= {"text": text, "mask": ops.ones(2, "bool"), "i": ops.ones(2, "int32")}
    cast = policy.cast_to_compute(tree)
    assert [str(keras.backend.standardize_dtype(x.dtype)) for x in cast["x"]] == [F16, F16]
    assert isinstance(cast["x"][1], np.ndarray)
    assert cast["b"] == (True, None, "s", 1.5, 2)
    for key in ("ids", "text", "mask", "i"):
        assert cast[key] is tree[key]
    assert policy.cast_to_output(tree)["x"][1].dtype == "bfloat16"
    assert policy.cast_to_param(cast)["x"][1].dtype == F32
    assert kmp.cast_to_half(tree)["x"][1].dtype == HALF
    assert kmp.cast_to_full(cast)["x"][1].dtype == F32


def test_the_casts_work_on_keras_tensors_variables_and_scalars():
    policy = kmp.Policy("mixed_bfloat16")
    symbolic = policy.cast_to_compute(
        {"x": keras.Input((3,)), "i": keras.Input((3,), dtype="int32")}
    )
    assert (symbolic["x"].dtype, symbolic["i"].dtype) == (BF16, "int32")
    variable = policy.cast_to_compute(keras.Variable([1.0, 2.0]))
    assert keras.backend.standardize_dtype(variable.dtype) == BF16
    assert policy.cast_to_compute(np.float32(1.5)).dtype == BF16


def test_the_casts_keep_the_mask():
    x = keras.layers.Embedding(4, 3, mask_zero=True)(np.array([[1, 2, 0]]))
    mask = masking.get_keras_mask(x)
    cast = masking.get_keras_mask(kmp.Policy("mixed_bfloat16").cast_to_compute(x))
    assert mask is not None and cast is mask


@pytest.mark.parametrize("mode", COMPILED_MODES)
def test_the_casts_work_in_compiled_code(mode):
    def function(tree):
        cast = kmp.Policy("c=bf16").cast_to_compute(tree)
        return {"x": cast["x"] + cast["x"], "i": cast["i"]}

    done = compiled(function, mode)({"x": ops.ones(2) / 3, "i": ops.ones(2, "int32")})
    assert keras.backend.standardize_dtype(done["x"].dtype) == BF16
    assert keras.backend.standardize_dtype(done["i"].dtype) == "int32"


@pytest.mark.only("tensorflow")
def test_sparse_gradients_stay_sparse():
    import tensorflow as tf

    sparse = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([3]), tf.constant([5, 2]))
    cast = kmp.Policy("mixed_float16").cast_to_compute([sparse])[0]
    assert isinstance(cast, tf.IndexedSlices) and cast.values.dtype == tf.float16


@pytest.mark.parametrize("capability, expected", [((7, 0), F16), ((7, 5), F16), ((6, 1), F16)])
def test_half_is_float16_before_ampere(monkeypatch, capability, expected):
    assert half_on(monkeypatch, "gpu", capability) == expected


@pytest.mark.parametrize(
    "platform, capability",
    [("gpu", (8, 0)), ("gpu", (9, 0)), ("gpu", None), ("tpu", None), ("cpu", None)],
)
def test_half_is_bfloat16_elsewhere(monkeypatch, platform, capability):
    assert half_on(monkeypatch, platform, capability) == BF16


def half_on(monkeypatch, platform, capability):
    from kmp._backend.types import Device

    monkeypatch.setattr(backend, "device", lambda: Device(platform, "test", capability))
    assert kmp.Policy("half").compute_dtype == kmp.half_dtype()
    return kmp.half_dtype()


def test_the_device_is_described():
    device = backend.device()
    assert device.platform == backend.platform() and device.name
    assert device.compute_capability is None or len(device.compute_capability) == 2


@pytest.mark.parametrize("name", ["mixed_bfloat16", "p=f32,c=bf16,o=f32", "autocast"])
def test_layers_take_a_policy(name):
    policy = kmp.Policy(name)
    layer = keras.layers.Dense(2, dtype=policy)
    y = layer(np.ones((1, 3), "float32"))
    assert layer.dtype_policy is policy and layer.kernel.dtype == F32
    assert keras.backend.standardize_dtype(y.dtype) == policy.compute_dtype


def test_batch_normalization_returns_the_output_dtype():
    x = np.ones((4, 3), "float32")
    for name, expected in (("mixed_bfloat16", BF16), ("p=f32,c=bf16,o=f32", F32)):
        layer = kmp.layers.Float32BatchNormalization(dtype=kmp.Policy(name))
        assert keras.backend.standardize_dtype(layer(x).dtype) == expected
        assert layer(keras.Input((3,))).dtype == expected
    layer = kmp.layers.Float32BatchNormalization(dtype="mixed_bfloat16")
    assert keras.backend.standardize_dtype(layer(x).dtype) == BF16


LOAD = """
import pathlib, sys
import keras, numpy as np
for path in map(pathlib.Path, sys.argv[1:]):
    if path.stem == "needs_kmp":
        assert "kmp" not in sys.modules
        import kmp
    model = keras.models.load_model(path)
    layer = model.layers[0]
    assert (layer.compute_dtype, layer.variable_dtype) == ("bfloat16", "float32")
    y = model.predict(np.ones((2, 3), "float32"), verbose=0)
    assert np.array_equal(np.load(path.with_suffix(".npy")), y)
assert layer.dtype_policy.output_dtype == "float32"
"""


@pytest.mark.slow
def test_a_saved_model_comes_back_with_its_policies(tmp_path):
    """In a new process, whose global policy is float32, and without kmp where Keras's words do."""
    names = {
        "keras": "mixed_bfloat16",
        "in_short": "c=bf16",
        "needs_kmp": "p=f32,c=bf16,o=f32",
    }
    files = [tmp_path / f"{file}.keras" for file in names]
    for file, name in zip(files, names.values(), strict=True):
        dense = keras.layers.Dense(2, dtype=kmp.Policy(name))
        model = keras.Sequential([keras.Input((3,)), dense, keras.layers.ReLU()])
        model.save(file)
        np.save(file.with_suffix(".npy"), model.predict(np.ones((2, 3), "float32"), verbose=0))
    program = tmp_path / "load.py"
    program.write_text(LOAD)
    run_all([[program, *files]], [environment(KERAS_BACKEND=BACKEND)], tmp_path, timeout=120)


def test_training_under_a_policy():
    kmp.set_policy("p=f32,c=bf16,o=f32")
    layers = [keras.layers.Dense(4), kmp.layers.Float32BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(kmp.scaled("sgd", learning_rate=0.01), "mse", jit_compile=BACKEND == "jax")
    x = np.ones((8, 3), "float32")
    losses = model.fit(x, x[:, :1], epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert {v.dtype for v in model.trainable_variables} == {F32}
