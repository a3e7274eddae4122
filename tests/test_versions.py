"""What is older than what kmp was written for: an error at the call, and nothing at the import."""

import keras
import numpy as np
import pytest
from older import needs
from oracle import BACKEND

import kmp
from kmp._backend import backend
from kmp._keras import versions


@pytest.mark.parametrize(
    "version, expected",
    [
        ("3.10.0", (3, 10, 0)),
        ("3.15.1", (3, 15, 1)),
        ("3.16.0.dev20261120", (3, 16, 0)),
        ("3.16.0rc1", (3, 16)),
    ],
)
def test_release(version, expected):
    assert versions.release(version) == expected


@pytest.mark.parametrize("version, has", [("3.12.4", False), ("3.13.0", True), ("3.9.2", False)])
def test_releases_are_compared_as_numbers(version, has, monkeypatch):
    monkeypatch.setattr(keras, "__version__", version)
    assert versions.has("quantization_config") == has


def prepared():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    kmp.quantize_aware(model)
    model(np.ones((1, 3)), training=True)
    return model


def test_what_keras_lacks_is_said_by_the_call(monkeypatch):
    model = prepared()
    monkeypatch.setattr(keras, "__version__", "3.12.4")
    with pytest.raises(NotImplementedError) as caught:
        kmp.to_int8(model)
    message = str(caught.value)
    assert message.startswith("kmp.to_int8 needs keras.quantizers.Int8QuantizationConfig")
    assert "since 3.13.0. Received: Keras 3.12.4. Save the model as it is" in message
    assert model(np.ones((1, 3))).shape == (1, 2)  # it goes on as it was


@needs("quantization_config")
def test_what_keras_has_is_used():
    assert kmp.to_int8(prepared()).rows[0].after == "int8_from_float32"


def test_a_setting_of_the_inner_optimizer_is_refused_by_every_keras():
    """Before 3.12 Keras ignored it."""
    message = r"no `clipnorm` of its own. Received: clipnorm=1.0. Set `clipnorm` on the `inner_"
    with pytest.raises(ValueError, match=message):
        kmp.LossScaleOptimizer(keras.optimizers.SGD(), clipnorm=1.0)
    old_file = {"clipnorm": None, "use_ema": False, "ema_momentum": 0.99}
    kmp.LossScaleOptimizer(keras.optimizers.SGD(), **old_file)


def test_the_wrapper_knows_its_variables():
    """Before 3.12 Keras's wrapper did not, and `stateless_apply` refused."""
    optimizer = kmp.scaled("sgd", learning_rate=0.5, loss_scale="none")
    variable = keras.Variable([1.0, 2.0])
    optimizer.build([variable])
    if BACKEND == "jax":
        values = [v.value for v in optimizer.variables]
        (new,), _ = optimizer.stateless_apply(values, [np.float32([2, 2])], [variable.value])
        np.testing.assert_array_equal(new, [0.0, 1.0])
    optimizer.apply([keras.ops.convert_to_tensor([2.0, 2.0])])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), [0.0, 1.0])


def test_bitcast_is_that_of_numpy():
    x = np.array([0.0, -0.0, 1.5, np.inf, np.nan, 2.0**-149], "float32")
    bits = backend.bitcast(keras.ops.convert_to_tensor(x), "int32")
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(bits), x.view("int32"))
    back = keras.ops.convert_to_numpy(backend.bitcast(bits, "float32"))
    np.testing.assert_array_equal(back.view("int32"), x.view("int32"))


@pytest.mark.parametrize("bound", ["keras", "jax"])
def test_the_oldest_set_is_the_lower_bound(bound):
    """What setup.cfg asks for at least is what `make test-oldest` runs."""
    import configparser
    import pathlib

    root = pathlib.Path(kmp.__file__).parents[1]
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    options = {**setup["options.extras_require"], "keras": setup["options"]["install_requires"]}
    line = next(x for x in options[bound].splitlines() if x.startswith(bound + ">="))
    oldest = (root / "constraints-oldest.txt").read_text().splitlines()
    (pinned,) = [x.split("==")[1] for x in oldest if x.startswith(bound + "==")]
    asked = versions.release(line.split(">=")[1])
    assert versions.release(pinned)[: len(asked)] == asked
