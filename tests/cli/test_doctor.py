"""The advice for each kind of device, and the command that prints it."""

import subprocess
import sys

import keras
import pytest
from oracle import BACKEND
from processes import environment

import kmp
from kmp._backend.types import Device
from kmp.cli.doctor import advise, product_times, report, slower, what_xla_will_do

DEVICES = {
    ("tpu", None): ("mixed_bfloat16", "float16 does not compile"),
    ("gpu", (9, 0)): ("mixed_bfloat16", ""),
    ("gpu", (8, 0)): ("mixed_bfloat16", ""),
    ("gpu", (7, 5)): ("mixed_float16", "bfloat16 will be slower"),
    ("gpu", (7, 0)): ("mixed_float16", "bfloat16 will be slower"),
    ("gpu", (6, 1)): ("float32", "will be slower than float32"),
    ("gpu", None): ("mixed_bfloat16", "measure before you rely on it"),
    ("cpu", None): ("float32", "emulated"),
}


@pytest.mark.parametrize("platform, capability", DEVICES)
def test_the_advice(platform, capability):
    policy, warning = DEVICES[platform, capability]
    advice = advise(Device(platform, "test", capability))
    assert advice.policy == policy and advice.why
    assert warning in " ".join(advice.warnings) and bool(advice.warnings) == bool(warning)
    kmp.set_policy(advice.policy)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (9, 0)])
def test_the_advice_and_half_dtype_agree(monkeypatch, capability):
    device = Device("gpu", "test", capability)
    monkeypatch.setattr("kmp._backend.device", lambda: device)
    assert kmp.Policy(advise(device).policy).compute_dtype == kmp.half_dtype()


@pytest.mark.only("tensorflow", "jax")
def test_what_xla_will_do_is_what_keras_does():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    said = what_xla_will_do(BACKEND, kmp._backend.platform())
    assert model.jit_compile == said.startswith("compile")


def test_products_are_timed_or_missing():
    times = product_times(("float32", "bfloat16"), repeats=1)
    assert times["float32"] > 0 and times["bfloat16"] > 0


def test_a_missing_product_is_no_error(monkeypatch):
    def none(x, y):
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr("keras.ops.matmul", none)
    assert product_times(("float16",)) == {"float16": None}


def test_slower_is_a_tenth_slower():
    assert slower({"float32": 1.0, "bfloat16": 1.05, "float16": None}) == ()
    assert slower({"float32": 2.0, "float16": 5.0}) == (
        "float16 took 2.5 times as long as float32.",
    )


def test_the_command_prints_the_report():
    done = subprocess.run(
        [sys.executable, "-m", "kmp", "doctor"],
        env=environment(KERAS_BACKEND=BACKEND),
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [line.split("  ")[0] for line in report().splitlines()]
    said = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert set(expected) | {"warning"} == set(said) | {"warning"}
    assert {"device", "compute capability", "backend", "XLA will", "advised policy"} <= set(said)
    assert f"{BACKEND}, Keras {keras.__version__}" in done.stdout
