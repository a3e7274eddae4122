"""Files that kmp 0.1.0 wrote on TensorFlow load on every backend, whatever has moved since.

`write.py` made them; each stands beside an .npz with what its model gave and held.
"""

import dataclasses
import pathlib

import keras
import numpy as np
import pytest
from older import since_keras
from oracle import BACKEND
from saved_files import models

pytestmark = pytest.mark.slow

FOLDER = pathlib.Path(__file__).parent
FILES = sorted(path.stem for path in FOLDER.glob("*.keras"))

# How far predictions may be from those in the files, which TensorFlow computed, relative to the
# largest of them.
# 0: every product and sum is exact. Otherwise one float32 rounding may differ for each of the at
# most 36 products of a sum; in "kmp_layers" it may also take a number to the next float16.
TOLERANCE = {
    "kmp_layers": 4 * 2.0**-11,
    **dict.fromkeys([name for name in FILES if "quantize" in name], 36 * 2.0**-24),
}


def check_predictions(name, model, expected):
    received = model.predict(models.inputs_of(name), verbose=0)
    # On TensorFlow only the sums of quantized models have been seen to depend on the machine.
    exact = BACKEND == "tensorflow" and "quantize" not in name
    atol = 0 if exact else TOLERANCE.get(name, 0) * np.abs(expected).max()
    assert received.dtype == expected.dtype
    np.testing.assert_allclose(received, expected, rtol=0, atol=atol)


def check_state(model, saved):
    """Each number that the file holds, to the bit."""
    expected = {key.removeprefix("state "): saved[key] for key in saved if key.startswith("state ")}
    received = models.state(model)
    if "own loss_scale_wait" in received:  # what 0.1.0 had in one counter with a sign
        count = expected["own step_counter"]
        expected |= {
            "own step_counter": count * 0,
            "own loss_scale_wait": np.maximum(count, 0),
            "own loss_scale_zero_steps": np.maximum(-count, 0),
        }
    assert received.keys() == expected.keys()
    for key, x in expected.items():
        np.testing.assert_array_equal(received[key], x, err_msg=key)


def settings(model):
    """What of the optimizer is not a number in its state."""
    optimizer = model.optimizer
    names = ("loss_scale", "on_overflow", "gradient_accumulation_steps")
    return {"class": type(optimizer), **{name: getattr(optimizer, name, None) for name in names}}


@pytest.mark.quick
def test_no_file_is_missing():
    made = {stem for name in models.MODELS for stem in models.stems(name)}
    assert set(FILES) == made
    weights = {path.name.split(".")[0] for path in FOLDER.glob("*.weights.h5")}
    assert weights == set(models.WEIGHTS_ALONE)


@since_keras("3.15.0", "Keras cannot load all that 3.15 saves")
@pytest.mark.parametrize("name", FILES)
def test_a_model_comes_back(name, tmp_path):
    model = keras.models.load_model(FOLDER / f"{name}.keras")
    model.save(tmp_path / "again.keras")
    again = keras.models.load_model(tmp_path / "again.keras")
    with np.load(FOLDER / f"{name}.npz") as saved:
        for each in (model, again):
            assert models.policies(each) == saved["policies"].tolist()
            check_state(each, saved)
            check_predictions(name, each, saved["predictions"])
    made = models.MODELS[name.removesuffix("_int8")]()
    expected = settings(made)
    if hasattr(expected["loss_scale"], "min_scale"):  # the floor of 0.1.0, which its files keep
        expected["loss_scale"] = dataclasses.replace(expected["loss_scale"], min_scale=1.0)
    assert settings(model) == expected


@pytest.mark.parametrize("name", models.WEIGHTS_ALONE)
def test_weights_come_back_with_the_state_of_the_optimizer(name):
    model = models.MODELS[name]()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(FOLDER / f"{name}.weights.h5")
    with np.load(FOLDER / f"{name}.npz") as saved:
        check_state(model, saved)
        check_predictions(name, model, saved["predictions"])
