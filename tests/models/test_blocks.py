"""Converted models whose blocks make their own layers: saved, loaded and cloned as they are."""

import copy
import json
import pickle

import blocks
import keras
import numpy as np
import pytest
from blocks import KINDS, functional
from keras import layers
from older import needs
from oracle import BACKEND
from processes import environment, run_all

import kmp
from kmp._keras import is_graph, layers_of

# Keras says the first of each block without a `build` that comes out of a file, converted or not,
# and Keras 3.16 the second of a Functional model inside another.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`build\(\)` was called on layer:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*was passed an input with a mask:UserWarning"),
    pytest.mark.slow,
]


def outputs(model, x):
    return keras.ops.convert_to_numpy(model(x))


def policies(model):
    """The policy of each layer, and of each model that is no graph: Keras saves none of those."""
    rows = [x for x in layers_of(model) if not isinstance(x, layers.InputLayer)]
    rows = [x for x in rows if not is_graph(x)]
    return [[type(x).__name__, str(kmp.get_policy(x.dtype_policy))] for x in rows]


def converted(kind, policy="mixed_float16", **arguments):
    model, x = KINDS[kind]()
    kmp.to_mixed_precision(model, policy, **arguments)
    assert len({policy for _, policy in policies(model)}) > 1
    return model, x


def check_same(made, model, x):
    assert policies(made) == policies(model)
    np.testing.assert_array_equal(outputs(made, x), outputs(model, x))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_brings_back_every_policy(tmp_path, kind):
    model, x = converted(kind)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [type(x).__name__ for x in layers_of(loaded)] == [
        type(x).__name__ for x in layers_of(model)
    ]
    check_same(loaded, model, x)
    loaded.save(tmp_path / "again.keras")
    check_same(keras.models.load_model(tmp_path / "again.keras"), model, x)


def test_a_block_that_two_layers_share_is_one_block_again(tmp_path):
    shared = blocks.InTime()
    both = [layers.TimeDistributed(shared), layers.TimeDistributed(shared)]
    model, x = functional(*both, x=blocks.SEQUENCES)
    kmp.to_mixed_precision(model, "mixed_float16")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    check_same(loaded, model, x)
    assert len(loaded.weights) == len(model.weights)


@pytest.mark.parametrize("kind", KINDS)
def test_a_clone_has_every_policy(kind):
    model, x = converted(kind, "mixed_bfloat16")
    clone = keras.models.clone_model(model)
    clone(x)
    clone.set_weights(model.get_weights())
    check_same(clone, model, x)
    trained = keras.models.clone_model(clone)  # it remembers as well
    trained(x)
    assert policies(trained) == policies(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_holds_every_policy(kind):
    model, x = converted(kind)
    made = type(model).from_config(model.get_config())
    made(x)
    made.set_weights(model.get_weights())
    check_same(made, model, x)


@pytest.mark.parametrize("kind", ["nested", "subclassed"])
def test_a_pickle_and_a_deep_copy_hold_every_policy(kind):
    model, x = converted(kind)
    for made in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        check_same(made, model, x)


@pytest.mark.parametrize("kind", ["nested", "makes_in_build", "holder"])
def test_what_is_kept_in_float32_inside_a_block_stays_so(tmp_path, kind):
    """The first layer of each residual block is excluded: no rule could guess which."""

    def filter_fn(layer, path):
        return layer.name != "inner"

    model, x = converted(kind, "mixed_bfloat16", filter_fn=filter_fn)
    kept = [x for x in layers_of(model) if x.name == "inner"]
    assert kept and {x.compute_dtype for x in kept} == {"float32"}
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    check_same(loaded, model, x)


def test_the_policy_of_a_whole_functional_model_comes_back(tmp_path):
    """`compile` asks it whether losses are to be scaled."""
    model, _ = converted("inner_models")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    models = [x for x in layers_of(loaded) if isinstance(x, keras.Model)]
    assert len(models) == 3 and {x.dtype_policy.name for x in models} == {"mixed_float16"}


@pytest.mark.only("tensorflow", "torch")  # JAX would compile for a minute; files are the same
@pytest.mark.parametrize("kind", ["subclassed", "translation"])
def test_training_goes_on(tmp_path, kind):
    model, x = converted(kind)
    model.compile(kmp.scaled("adam", 8.0), "mse", jit_compile=False)
    model.run_eagerly = BACKEND == "tensorflow"  # tracing would take longer
    y = outputs(model, x) + 1
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.run_eagerly = model.run_eagerly
    assert int(loaded.optimizer.iterations) == 1
    for old, new in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(old.numpy(), new.numpy())
    loaded.fit(x, y, verbose=0)
    assert int(loaded.optimizer.iterations) == 2


def prepared(kind):
    """A model that trains with the rounding of int8, and has seen a batch."""
    model, x = KINDS[kind]()
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    kmp.quantize_aware(model, filter_fn=lambda layer, path: type(layer).__name__ != "Sequential")
    model(x, training=True)
    return model, x


def classes(model):
    return [type(layer).__name__ for layer in layers_of(model)]


@pytest.mark.parametrize("kind", ["residual", "nested", "subclassed", "model_inside"])
def test_quantized_blocks_come_back(tmp_path, kind):
    model, x = prepared(kind)
    assert "FakeQuantizedDense" in classes(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    clone = type(model).from_config(model.get_config())
    clone(x)
    clone.set_weights(model.get_weights())
    for made in (loaded, clone):
        assert classes(made) == classes(model)
        check_same(made, model, x)


@needs("quantization_config")
@pytest.mark.parametrize("kind", ["residual", "nested", "model_inside"])
def test_int8_blocks_come_back(tmp_path, kind):
    model, x = prepared(kind)
    kmp.to_int8(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert "int8" in {v.dtype for v in loaded.variables}
    names = [[x.dtype_policy.name for x in layers_of(each)] for each in (loaded, model)]
    assert names[0] == names[1]
    np.testing.assert_array_equal(outputs(loaded, x), outputs(model, x))


LOAD = r"""
import json, pathlib, sys, warnings
warnings.simplefilter("error", UserWarning)
warnings.filterwarnings("ignore", r"`build\(\)` was called")
import keras, blocks, kmp
import numpy as np
from test_blocks import outputs, policies

keras.config.set_dtype_policy("mixed_bfloat16")  # of the process: the files say otherwise
for file in sorted(pathlib.Path(sys.argv[1]).glob("*.keras")):
    model = keras.models.load_model(file)
    assert policies(model) == json.loads(file.with_suffix(".json").read_text()), file.stem
    keras.config.set_dtype_policy("float32")
    x = blocks.KINDS[file.stem]()[1]
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert np.array_equal(outputs(model, x), np.load(file.with_suffix(".npy"))), file.stem
    print("loaded", file.stem)
"""


@pytest.mark.only("tensorflow")  # files are the same code on all backends
def test_files_come_back_in_a_new_process(tmp_path):
    kinds = ("nested", "makes_in_build", "holder", "translation")
    for kind in kinds:
        model, x = converted(kind)
        model.save(tmp_path / f"{kind}.keras")
        (tmp_path / f"{kind}.json").write_text(json.dumps(policies(model)))
        np.save(tmp_path / f"{kind}.npy", outputs(model, x))
    program = tmp_path / "load.py"
    program.write_text(LOAD)
    environ = environment(KERAS_BACKEND=BACKEND)
    environ["PYTHONPATH"] += f":{blocks.__file__.rpartition('/')[0]}"
    run_all([[program, tmp_path]], [environ], tmp_path, timeout=200)
    said = (tmp_path / "process_0.log").read_text()
    assert said.count("loaded") == len(kinds)


# Classes that are not registered


class Stranger(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(6)

    def build(self, input_shape):
        self.inner.build(input_shape)

    def call(self, x):
        return x + self.inner(x)


class StrangeModel(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.block, self.head = Stranger(), layers.Dense(2)

    def call(self, x):
        return self.head(self.block(x))


STRANGE = {
    "Stranger": lambda: functional(Stranger()),
    "StrangeModel": lambda: blocks.called(StrangeModel()),
}


@pytest.mark.parametrize("name", STRANGE)
def test_custom_objects_name_the_classes(tmp_path, name):
    model, x = STRANGE[name]()
    kmp.to_mixed_precision(model, "mixed_float16")
    model.save(tmp_path / "model.keras")
    names = {"Stranger": Stranger, "StrangeModel": StrangeModel}
    check_same(keras.models.load_model(tmp_path / "model.keras", names), model, x)
    with keras.saving.custom_object_scope(names):
        check_same(keras.models.load_model(tmp_path / "model.keras"), model, x)
    clone = keras.models.clone_model(model)
    clone(x)
    assert policies(clone) == policies(model)


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_not_registered_is_named_at_once(tmp_path, name):
    """In Keras's own words, and not behind the name of a class of kmp."""
    model, _ = STRANGE[name]()
    kmp.to_mixed_precision(model, "mixed_float16")
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match=f"^Could not locate class '{name}'. Make sure custom"):
        keras.models.load_model(tmp_path / "model.keras")


def test_a_class_that_cannot_be_made_from_its_config_is_named_at_once(tmp_path, monkeypatch):
    model, _ = converted("residual")
    model.save(tmp_path / "model.keras")
    monkeypatch.delattr(blocks.Residual, "get_config")
    monkeypatch.setattr(blocks.Residual, "__init__", lambda self, other: None)
    with pytest.raises(ValueError, match=r"^<class 'blocks.Residual'> could not be deserialized"):
        keras.models.load_model(tmp_path / "model.keras")


def test_a_block_that_has_changed_is_refused(tmp_path, monkeypatch):
    model, _ = converted("makes_in_build")
    model.save(tmp_path / "model.keras")
    original = blocks.MakesInBuild.build

    def with_one_layer_more(self, input_shape):
        original(self, input_shape)
        self.more = layers.ReLU()

    monkeypatch.setattr(blocks.MakesInBuild, "build", with_one_layer_more)
    message = r"policies of 3 layers in 'makes_in_build.*'MakesInBuild' now creates 4.*convert"
    with pytest.raises(ValueError, match=message):
        keras.models.load_model(tmp_path / "model.keras")
