"""The advice for each kind of device, and the command that prints it."""

import pathlib
import sys
from importlib import metadata

import keras
import pytest
from oracle import BACKEND

import kmp.__main__
from kmp._backend import backend
from kmp._backend.types import Device
from kmp.cli.doctor import (
    Advice,
    advise,
    conclusion,
    environment,
    product_times,
    report,
    slower,
    what_xla_will_do,
)

DEVICES = {
    ("tpu", None): ("mixed_bfloat16", "float16 does not compile"),
    ("gpu", (9, 0)): ("mixed_bfloat16", ""),
    ("gpu", (8, 0)): ("mixed_bfloat16", ""),
    ("gpu", (7, 5)): ("mixed_float16", "bfloat16 will be slower"),
    ("gpu", (7, 0)): ("mixed_float16", "bfloat16 will be slower"),
    ("gpu", (6, 1)): ("float32", "will be slower than float32"),
    ("gpu", None): ("mixed_bfloat16", "measure before you rely on it"),
}


@pytest.mark.parametrize("platform, capability", DEVICES)
def test_the_advice(platform, capability):
    policy, warning = DEVICES[platform, capability]
    advice = advise(Device(platform, "test", capability), {"float32": 1.0})
    assert advice.policy == policy and advice.why
    assert warning in " ".join(advice.warnings) and bool(advice.warnings) == bool(warning)
    kmp.set_policy(advice.policy)


CPUS = {  # seconds of float32, bfloat16, float16
    (1.0, 1.1, 1.2): "float32",
    (1.0, 0.9, 0.85): "float32",  # not clearly faster
    (1.0, None, None): "float32",
    (None, 0.5, 0.5): "float32",
    (1.0, 0.5, 0.48): "mixed_bfloat16",  # as fast, and simpler
    (1.0, 0.5, None): "mixed_bfloat16",
    (1.0, 1.1, 0.6): "mixed_float16",
    (1.0, 0.7, 0.3): "mixed_float16",
}


@pytest.mark.parametrize("seconds", CPUS)
def test_the_advice_for_a_cpu_follows_from_what_was_measured(seconds):
    times = dict(zip(("float32", "bfloat16", "float16"), seconds, strict=True))
    advice = advise(Device("cpu", "test", None), times)
    assert advice.policy == CPUS[seconds]
    said = " ".join([advice.why, *advice.warnings, *conclusion(advice, times).values()])
    assert "emulate" not in said
    fastest = advice.policy.removeprefix("mixed_")
    assert (fastest == "float32") == (f"{fastest} was" not in advice.why)


@pytest.mark.parametrize(
    "policy, times, write, gain, watch",
    [
        (
            "mixed_float16",
            {"float32": 1.0, "float16": 0.25, "bfloat16": 3.0},
            'kmp.set_policy("mixed_float16") before you build the model, then '
            'model.compile(kmp.scaled("adam"), ...)',
            "activations take half the memory; a matrix product takes 0.25 times as long",
            "Beware. bfloat16 took 3.0 times as long as float32. kmp.callbacks.GradientHealth() in "
            "fit shows loss scale and skipped steps. Measure",
        ),
        (
            "mixed_bfloat16",
            {"float32": 1.0, "float16": None, "bfloat16": None},
            'kmp.set_policy("mixed_bfloat16") before you build the model',
            "activations take half the memory",
            "Beware. Measure your own model: kmp bench --model my_package.train:build",
        ),
        (
            "float32",
            {"float32": 1.0, "float16": 1.5, "bfloat16": 1.0},
            "nothing: Keras trains in float32",
            "no conversions; a matrix product would take 1.50 times as long in float16 and 1.00 "
            "times as long in bfloat16",
            "Beware. Measure",
        ),
        ("float32", {"float32": 1.0}, "nothing", "no conversions", "Beware. Measure"),
    ],
)
def test_what_to_write_what_it_gains_and_what_to_watch(policy, times, write, gain, watch):
    order = ("float32", "bfloat16", "float16")
    times = {dtype: times.get(dtype) for dtype in order}
    said = conclusion(Advice(policy, "because.", ("Beware.",)), times)
    assert list(said) == ["write", "gain", "watch"]
    assert said["write"].startswith(write) and said["gain"] == gain
    assert said["watch"].startswith(watch) and "\n" not in "".join(said.values())


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (9, 0)])
def test_the_advice_and_half_dtype_agree(monkeypatch, capability):
    device = Device("gpu", "test", capability)
    monkeypatch.setattr(backend, "device", lambda: device)
    assert kmp.Policy(advise(device, {"float32": 1.0}).policy).compute_dtype == kmp.half_dtype()


@pytest.mark.only("tensorflow", "jax")
def test_what_xla_will_do_is_what_keras_does():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    said = what_xla_will_do(BACKEND, backend.platform())
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


def test_the_report_ends_in_what_follows_from_it():
    lines = report().splitlines()
    names = [line[:20].rstrip() for line in lines]
    assert names[:4] == ["device", "compute capability", "backend", "XLA will"]
    assert names[-4:] == ["advised policy", "write", "gain", "watch"]
    assert f"{BACKEND}, Keras {keras.__version__}" in lines[2]


def test_the_command_prints_the_report(monkeypatch, capsys):
    monkeypatch.setattr("kmp.cli.commands.report", lambda: "the report")
    monkeypatch.setattr(sys, "argv", ["kmp", "doctor"])
    with pytest.raises(SystemExit) as ended:
        kmp.__main__.main()
    assert ended.value.code == 0 and capsys.readouterr().out == "the report\n"


def test_versions_are_those_of_the_packages(monkeypatch):
    """TensorFlow may be installed as tensorflow-cpu, whose metadata has that name."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    facts = environment()
    assert facts["keras"] == keras.__version__ and facts[BACKEND] and facts["numpy"]


@pytest.mark.only("tensorflow")
def test_benchmarks_ask_the_packages_too():
    pages = pathlib.Path(kmp.__file__).parents[1].glob("benchmarks/*.py")
    assert [path.name for path in pages if "metadata.version" in path.read_text()] == []
