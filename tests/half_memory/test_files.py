"""Weights, remainders and slots in files: of the same arguments, and of others."""

import pathlib

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import layers, ops
from oracle import few

import kmp
from kmp.half_memory import exact_weights, numbers_of

FOLDER = pathlib.Path(__file__).parent
BFLOAT16 = ml_dtypes.bfloat16
X = np.random.default_rng(0).normal(size=(8, 64)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 2)).astype("float32")

# A policy, and arguments of `kmp.scaled`.
MEMORY = {
    "mixed": ("mixed_bfloat16", {}),
    "mixed, bfloat16 slots": ("mixed_bfloat16", {"slot_dtype": "bfloat16"}),
    "bfloat16": ("bfloat16", {}),
    "float32 slots": ("bfloat16", {"slot_dtype": "float32"}),
    "remainders": ("bfloat16", {"master_weights": True}),
    "mixed, int8 slots": ("mixed_bfloat16", {"slot_dtype": "int8"}),
    "24 bits, int8 slots": ("bfloat16", {"master_weights": 24, "slot_dtype": "int8"}),
}
# Of a weight, to nearest.
BITS = dict.fromkeys(MEMORY, 8) | {"remainders": 32, "24 bits, int8 slots": 24}
BITS |= {name: 32 for name in MEMORY if "mixed" in name}


def model_of(memory, steps=3):
    policy, arguments = MEMORY[memory]
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(3)
    norm = layers.LayerNormalization(dtype="mixed_bfloat16", name="norm")  # in float32
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(64, "relu", name="body"), norm, layers.Dense(2)]
    )
    optimizer = kmp.scaled("adam", 1024, learning_rate=0.01, **arguments)
    model.compile(optimizer, "mse", run_eagerly=keras.backend.backend() == "tensorflow")
    optimizer.build(model.trainable_variables)
    fit(model, steps)
    return model


def fit(model, epochs=2):
    if epochs:
        model.fit(X, Y, batch_size=8, verbose=0, epochs=epochs, shuffle=False)


def as_float32(variable):
    return np.array(ops.convert_to_numpy(ops.cast(variable, "float32")))


def weights_of(model):
    """float32: of weights with a remainder or a master, what both make up."""
    exact = exact_weights(model.optimizer.stored)
    return [as_float32(exact.get(id(v), v)) for v in model.trainable_variables]


def slots_of(model):
    optimizer = model.optimizer
    return [as_float32(v) for v in numbers_of(optimizer.inner_optimizer, optimizer.stored)]


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("memory", few(MEMORY, "24 bits, int8 slots"))
def test_a_file_goes_on_bit_for_bit(memory, tmp_path):
    model = model_of(memory)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        fit(each)
    for part in (weights_of, slots_of):
        assert_equal(part(model), part(loaded))
    dtypes = [[v.dtype for v in each.optimizer.variables] for each in (model, loaded)]
    assert dtypes[0] == dtypes[1]


@pytest.mark.slow
@pytest.mark.parametrize("saved", few(MEMORY, "remainders", "mixed, int8 slots"))
@pytest.mark.parametrize("loaded", few(MEMORY, "remainders", "mixed, int8 slots"))
def test_every_file_loads_into_every_mode(saved, loaded, tmp_path):
    model = model_of(saved)
    model.save_weights(tmp_path / "state.weights.h5")
    other = model_of(loaded, steps=1)
    other.load_weights(tmp_path / "state.weights.h5")
    # Keras rounds the float32 weights of a file when it assigns them to bfloat16 ones.
    kept = min(BITS[saved], BITS[loaded] if "mixed" in loaded or saved == loaded else 8)
    for a, b in zip(weights_of(model), weights_of(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0 if kept == 32 else 2.0**-kept)
    for a, b in zip(slots_of(model), slots_of(other), strict=True):
        recoded = ("int8" in saved) != ("int8" in loaded)
        if recoded and a.size >= 4096:  # half a step of a code
            np.testing.assert_allclose(a, b, rtol=0.15, atol=1e-6 * np.abs(a).max())
        else:
            np.testing.assert_array_equal(a.astype(BFLOAT16), b.astype(BFLOAT16))
    assert int(other.optimizer.iterations.numpy()) == 3
    fit(other)
    assert all(np.isfinite(x).all() for x in (*weights_of(other), *slots_of(other)))


@pytest.mark.quick
@pytest.mark.core
def test_float32_masters_of_bfloat16_weights_load_exactly():
    """As kmp wrote them before it had remainders, at a tie and beside an assigned weight too."""
    model = keras.saving.load_model(FOLDER / "float32_masters.keras")
    with np.load(FOLDER / "float32_masters.npz") as saved:
        exact = [saved[f"exact {i}"] for i in range(4)]
        slots = [saved[key] for key in saved if key.startswith("slot ")]
    weights = [x for x in model.trainable_variables if x.dtype == "bfloat16"]
    found = exact_weights(model.optimizer.stored)
    assert_equal([as_float32(found[id(v)]) for v in weights], exact)
    assert_equal(slots_of(model), slots)
    remainders = [v for v in model.optimizer.variables if v.name.endswith("_remainder")]
    assert [v.dtype for v in remainders] == ["int16"] * 4
    before = weights_of(model)
    model.optimizer.apply([ops.zeros(v.shape) for v in model.trainable_variables])
    assert all(np.any(a != b) for a, b in zip(before, weights_of(model), strict=True))


@pytest.mark.slow
def test_a_conversion_keeps_what_the_weights_and_slots_are():
    model = model_of("24 bits, int8 slots")
    weights, slots = weights_of(model), slots_of(model)
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    kmp.to_mixed_precision(model, "bfloat16")
    assert "int8" in {v.dtype for v in model.optimizer.variables if "remainder" in v.name}
    body = [v.dtype for v in model.trainable_variables].index("bfloat16")
    assert_equal([weights_of(model)[body]], [weights[body]])
    for a, b in zip(slots_of(model), slots, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.15, atol=1e-6 * np.abs(b).max())
    fit(model)
    assert all(np.isfinite(x).all() for x in weights_of(model))
