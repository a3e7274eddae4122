"""Each change in upstream/ for Keras: its test fails on the nightly, and passes with its patch."""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

UPSTREAM = pathlib.Path(__file__).parents[1] / "upstream"
# Where the defect is, if TensorFlow does not have it, or not alone.
BACKENDS = {
    "adam_in_bfloat16": ["tensorflow", "torch"],
    "averages_of_their_own": ["jax"],
    "remat_in_mixed_precision": ["torch"],
    "variance_of_a_constant": ["torch"],
}
NAMES = sorted(path.stem for path in UPSTREAM.glob("*.patch"))
CASES = [(name, backend) for name in NAMES for backend in BACKENDS.get(name, ["tensorflow"])]
NIGHTLY = {x.metadata["Name"] for x in importlib.metadata.distributions()} & {"keras-nightly"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.any_backend,
    pytest.mark.skipif(not NIGHTLY, reason="keras-nightly is not installed"),
]


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A directory with the nightly's package in it."""
    directory = tmp_path_factory.mktemp("nightly")
    source = pathlib.Path(importlib.util.find_spec("keras").origin).parent
    shutil.copytree(source, directory / "keras", ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def find_test(name):
    """The file with the test of a change, and the test, as pytest names both."""
    for path in UPSTREAM.glob("*_test.py"):
        code = path.read_text()
        if f"def test_{name}(" in code:
            (group,) = re.findall(r"^class (\w+)", code, re.MULTILINE)
            return f"{path}::{group}::test_{name}"
    raise AssertionError(f"no test_{name} in {UPSTREAM}")


def run_test(directory, name, backend):
    """The output of the test of a change, by the package in a directory; whether it passed."""
    alone = ["-q", "-p", "no:cacheprovider", "-c", os.devnull]  # without kmp's own settings
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *alone, find_test(name)],
        env={**os.environ, "PYTHONPATH": str(directory), "KERAS_BACKEND": backend},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.stdout, done.returncode


@pytest.mark.parametrize("name, backend", CASES)
def test_red_without_the_patch_and_green_with_it(copied, name, backend):
    said, code = run_test(copied, name, backend)
    assert code == 1 and "AssertionError" in said and "1 failed" in said, said
    patch = ["git", "apply", UPSTREAM / f"{name}.patch"]
    subprocess.run(patch, cwd=copied, check=True)
    try:
        said, code = run_test(copied, name, backend)
        assert code == 0 and "1 passed" in said, said
    finally:
        subprocess.run([*patch, "--reverse"], cwd=copied, check=True)
