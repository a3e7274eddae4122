"""Each change in upstream/ for Keras: its test fails on the nightly, and passes with its patch."""

import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

UPSTREAM = pathlib.Path(__file__).parents[1] / "upstream"
TESTS = UPSTREAM / "loss_scale_optimizer_test.py::LossScaleOptimizerChangesTest"
NAMES = sorted(path.stem for path in UPSTREAM.glob("*.patch"))
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


def run_test(directory, name):
    """The output of the test of a change, by the package in a directory; whether it passed."""
    alone = ["-q", "-p", "no:cacheprovider", "-c", os.devnull]  # without kmp's own settings
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *alone, f"{TESTS}::test_{name}"],
        env={**os.environ, "PYTHONPATH": str(directory), "KERAS_BACKEND": "tensorflow"},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.stdout, done.returncode


@pytest.mark.parametrize("name", NAMES)
def test_red_without_the_patch_and_green_with_it(copied, name):
    said, code = run_test(copied, name)
    assert code == 1 and "AssertionError" in said and "1 failed" in said, said
    patch = ["git", "apply", UPSTREAM / f"{name}.patch"]
    subprocess.run(patch, cwd=copied, check=True)
    try:
        said, code = run_test(copied, name)
        assert code == 0 and "1 passed" in said, said
    finally:
        subprocess.run([*patch, "--reverse"], cwd=copied, check=True)
