"""A state that was saved when other weights were trainable: what is shared is restored."""

import copy
import pickle

import keras
import numpy as np
import pytest
from keras import layers

import kmp
from kmp.scaling.converted import Layout
from kmp.scaling.restored import slots_by_path

X = np.random.default_rng(0).normal(size=(32, 16)).astype("float32")
Y = X[:, :3]
MEMORY = {
    "float32": {},
    "8 bits": {"slot_dtype": "int8"},
    "remainders": {"master_weights": 24, "slot_dtype": "int8"},
}


def freeze(model):
    model.layers[0].trainable = False


def quantize(model):
    model.quantize("int8")


def add_lora(model):
    model.layers[0].enable_lora(4)


CHANGES = {"frozen": freeze, "quantized": quantize, "LoRA": add_lora}


def trained(optimizer, policy="float32"):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential(
        [keras.Input((16,)), layers.Dense(32, "relu"), layers.Dense(32), layers.Dense(3)]
    )
    model.compile(optimizer, "mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    return model


def slots_of(model):
    return {
        "/".join(path.split("/")[-2:]): [keras.ops.convert_to_numpy(x) for x in slots]
        for path, slots in slots_by_path(model.optimizer).items()
    }


def weights_of(model):
    optimizer = model.optimizer
    stored = optimizer.stored.weights.values() if optimizer.stored else ()
    return {
        "/".join(view.variable.path.split("/")[-2:]): keras.ops.convert_to_numpy(view.read())
        for view in stored
    }


def loaded(model, tmp_path):
    model.save(tmp_path / "model.keras")
    return keras.models.load_model(tmp_path / "model.keras")


WAYS = {
    "file": loaded,
    "copy": lambda model, _: copy.deepcopy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`:UserWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_both_have_is_restored(change, way, tmp_path):
    model = trained(kmp.scaled("adam"))
    CHANGES[change](model)
    with pytest.warns(kmp.PrecisionWarning, match="saved when other weights were trainable"):
        again = WAYS[way](model, tmp_path)
    np.testing.assert_array_equal(again.predict(X, verbose=0), model.predict(X, verbose=0))
    mine, theirs = slots_of(model), slots_of(again)
    shared = mine.keys() & theirs.keys()
    assert {x for x in theirs if x.startswith("dense_2/")} <= shared
    for path in shared:
        assert any(slot.any() for slot in theirs[path])
        for a, b in zip(mine[path], theirs[path], strict=True):
            np.testing.assert_array_equal(a, b)
    assert int(again.optimizer.steps) == 4
    assert float(again.optimizer.dynamic_scale) == float(model.optimizer.dynamic_scale)
    again.fit(X, Y, verbose=0)
    assert int(again.optimizer.steps) == 5 and int(again.optimizer.skipped_steps) == 0


@pytest.mark.parametrize("memory", MEMORY)
def test_slots_of_8_bits_and_remainders_are_restored_too(memory, tmp_path):
    policy = "bfloat16" if memory == "remainders" else "float32"
    model = trained(kmp.scaled("adam", **MEMORY[memory]), policy)
    freeze(model)
    with pytest.warns(kmp.PrecisionWarning, match=r"Left out: .*dense/kernel, .*dense/bias\."):
        again = loaded(model, tmp_path)
    mine, theirs = slots_of(model), slots_of(again)
    assert theirs.keys() == {x for x in mine if not x.startswith("dense/")}
    for path in theirs:
        for a, b in zip(mine[path], theirs[path], strict=True):
            np.testing.assert_array_equal(a, b)
    exact, restored = weights_of(model), weights_of(again)
    assert bool(restored) == (memory == "remainders")
    for path, weight in restored.items():
        np.testing.assert_array_equal(weight, exact[path])


def test_an_optimizer_without_slots(tmp_path):
    model = trained(kmp.scaled("sgd"))
    freeze(model)
    with pytest.warns(kmp.PrecisionWarning, match="Measurements begin anew"):
        again = loaded(model, tmp_path)
    assert int(again.optimizer.steps) == 4
    assert not keras.ops.convert_to_numpy(again.optimizer.telemetry.health).any()


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")
def test_weights_of_other_names_are_refused_and_the_advice_works(tmp_path):
    model = trained(kmp.scaled("adam"))
    freeze(model)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    other = keras.Sequential(
        [keras.Input((16,)), *(layers.Dense(n, name=f"own_{i}") for i, n in enumerate((32, 32, 3)))]
    )
    other.layers[0].trainable = False
    other.compile(kmp.scaled("adam"), "mse")
    other.optimizer.build(other.trainable_variables)
    with pytest.raises(
        ValueError, match=r"compile=False\), and weights by load_weights\(path, skip"
    ):
        other.load_weights(tmp_path / "model.weights.h5")
    with pytest.warns(UserWarning, match="could not be loaded"):
        other.load_weights(tmp_path / "model.weights.h5", skip_mismatch=True)
    for mine, theirs in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not keras.models.load_model(tmp_path / "model.keras", compile=False).compiled


def test_weights_are_the_same_by_their_whole_paths_or_by_all_but_the_models_name():
    stored = Layout([], [], ["dense/kernel", "block/dense/kernel", "m/head/kernel"])
    live = Layout([], [], ["dense/kernel", "head/kernel", "other/head/bias"])
    shared = {"dense/kernel": "dense/kernel", "head/kernel": "m/head/kernel"}
    assert stored.shared_with(live) == shared
    assert (
        Layout([], [], ["a/x/kernel", "b/x/kernel"]).shared_with(Layout([], [], ["x/kernel"])) == {}
    )


def test_a_file_without_the_name_of_the_model_in_its_paths(tmp_path):
    loaded(trained(kmp.scaled("adam")), tmp_path).save_weights(tmp_path / "model.weights.h5")
    model = trained(kmp.scaled("adam"))
    freeze(model)
    model.compile(kmp.scaled("adam"), "mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.warns(kmp.PrecisionWarning, match="saved when other weights were trainable"):
        model.load_weights(tmp_path / "model.weights.h5")
    assert all(slot.any() for slots in slots_of(model).values() for slot in slots)
