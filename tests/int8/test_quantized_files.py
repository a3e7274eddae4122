"""Prepared and int8 models in files."""

import pathlib
import subprocess
import sys

import keras
import numpy as np
import processes
import pytest
from conftest import BACKEND
from older import needs
from quantized_models import (
    IMAGES,
    MODELS,
    TARGETS,
    observers,
    optimizer,
    prepared,
    values,
)

import kmp

pytestmark = [needs("quantization_config"), pytest.mark.slow]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of each model, prepared and int8, and what they give for the images."""
    folder = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        model = make()
        model.compile(optimizer(), "mse")
        kmp.to_mixed_precision(model, "mixed_bfloat16")
        kmp.quantize_aware(model, weight_bits=5, freeze_after=3)
        model.run_eagerly = BACKEND == "tensorflow"  # tracing would take longer
        model.fit(IMAGES, TARGETS, epochs=2, verbose=0)
        kmp.to_mixed_precision(model, "float32")  # where files give what was given, to the bit
        for kind in ("prepared", "int8"):
            if kind == "int8":
                kmp.to_int8(model)
            model.save(folder / f"{name}_{kind}.keras")
        np.save(folder / f"{name}_int8.npy", model.predict(IMAGES, verbose=0))
        np.savez(folder / f"{name}_int8.npz", *values(model.variables))
    return folder


LOAD = """
import sys, keras, numpy as np, kmp, quantized_models
keras.config.set_dtype_policy("mixed_float16")  # of the process, which the files need not care for
for path in sys.argv[1:]:
    model = keras.models.load_model(path)
    given = model.predict(quantized_models.IMAGES, verbose=0)
    np.testing.assert_array_equal(given, np.load(path.replace(".keras", ".npy")))
"""


@pytest.mark.only("tensorflow")  # files are the same code on all backends
def test_files_load_in_a_new_process(files):
    paths = [str(files / f"{name}_int8.keras") for name in MODELS]
    environ = processes.environment()
    environ["PYTHONPATH"] += f":{pathlib.Path(__file__).parent}"
    subprocess.run([sys.executable, "-c", LOAD, *paths], check=True, env=environ)


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_file_goes_on_where_its_model_was(files, name):
    model = keras.models.load_model(files / f"{name}_prepared.keras")
    layer = prepared(model)[0]
    assert (layer.weight_bits, *values(observers(model)[1:3])) == (5, 2, 3)
    kmp.to_int8(model)
    with np.load(files / f"{name}_int8.npz") as expected:
        for got, key in zip(values(model.variables), expected, strict=True):
            np.testing.assert_array_equal(got, expected[key])


def test_int8_is_a_quarter_and_cannot_be_converted_further(files):
    model = keras.models.load_model(files / "functional_int8.keras")
    kernels = [v for v in model.variables if v.path.endswith("kernel")]
    assert {v.dtype for v in kernels} == {"int8"}
    with pytest.raises(ValueError, match="Quantized layers cannot change their policy"):
        kmp.to_mixed_precision(model, "mixed_bfloat16")
    for layer in model.layers[-1], model.get_layer("conv2"):
        with pytest.raises(ValueError, match="already quantized"):
            layer.quantize("int8")
