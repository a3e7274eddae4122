"""Both layers in one model: another process, several replicas."""

import subprocess
import sys

import keras
import numpy as np
import pytest

from kmp.layers import Float32BatchNormalization, Float32OutputDense

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = np.arange(8) % 3


def model_of_both(**compile_arguments):
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8),
            Float32BatchNormalization(),
            Float32OutputDense(3, "softmax", activity_regularizer="l2"),
        ]
    )
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.SGD(0.3), loss, **compile_arguments)
    return model


LOAD = """
import sys
import keras, numpy
import kmp.layers

model = keras.models.load_model(sys.argv[1])
numpy.save(sys.argv[2], model(numpy.load(sys.argv[3])))
"""


@pytest.mark.only("tensorflow")  # files are the same code on all backends
def test_loads_in_another_process_that_imports_only_the_layers(tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = model_of_both(jit_compile=False)
    model.fit(X, Y, verbose=0)
    paths = [str(tmp_path / name) for name in ("model.keras", "y.npy", "x.npy")]
    model.save(paths[0])
    np.save(paths[2], X)
    subprocess.run([sys.executable, "-c", LOAD, *paths], check=True, timeout=120)
    np.testing.assert_array_equal(np.load(paths[1]), model(X))  # of no graph, optimized or not


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_fit_on_two_replicas(policy, two_replicas):
    keras.config.set_dtype_policy(policy)
    with two_replicas.scope():
        model = model_of_both(jit_compile=False)
    losses = model.fit(X, Y, epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
