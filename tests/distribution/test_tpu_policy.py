"""float16 on a TPU: refused before the compiler is."""

import re

import keras
import numpy as np
import pytest

import kmp
from kmp._backend import backend


@pytest.fixture
def on_a_tpu(monkeypatch):
    monkeypatch.setattr(backend, "platform", lambda: "tpu")


def build(dtype="float32"):
    kmp.scaled("sgd").build([keras.Variable(np.zeros(2, dtype), dtype=dtype, name="kernel")])


@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_a_float16_policy_is_refused(on_a_tpu, policy):
    keras.config.set_dtype_policy(policy)
    message = f"float16 in the policy '{policy}'. Write keras.config.set_dtype_policy(\"mixed_bfl"
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


def test_a_float16_variable_is_refused(on_a_tpu):
    with pytest.raises(ValueError, match="Received: float16 in kernel"):
        build("float16")


def test_fit_is_refused(on_a_tpu):
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd"), loss="mse")
    with pytest.raises(ValueError, match="Write keras"):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "bfloat16"])
def test_everything_else_is_welcome(on_a_tpu, policy):
    keras.config.set_dtype_policy(policy)
    build("bfloat16" if policy == "bfloat16" else "float32")


def test_elsewhere_float16_is_welcome():
    assert backend.platform() in ("cpu", "gpu", "tpu")
    keras.config.set_dtype_policy("mixed_float16")
    if backend.platform() != "tpu":
        build()
