"""What the import of kmp brings with it, and what is said where an extra is missing."""

import subprocess
import sys

import pytest
from oracle import BACKEND
from processes import environment

import kmp
from kmp.summaries import SummaryWriter

COUNT = """
import sys, keras
before = set(sys.modules)
import kmp
new = set(sys.modules) - before
print(len(before), len(new), *sorted({name.partition(".")[0] for name in new}))
"""


@pytest.mark.quick
@pytest.mark.slow
def test_an_import_adds_a_tenth_of_kerass_modules_and_no_package():
    done = subprocess.run(
        [sys.executable, "-c", COUNT], env=environment(), capture_output=True, text=True, check=True
    )
    before, new, *names = done.stdout.split()
    assert int(new) <= 0.1 * int(before)
    # What Keras has not imported of a backend that it has, and Python's own.
    allowed = {"kmp", "statistics", "_statistics", "jax", *sys.stdlib_module_names}
    assert set(names) <= allowed, BACKEND


@pytest.fixture(params=["tensorboard.compat.proto.event_pb2", "google_crc32c", "PIL"])
def missing(request, monkeypatch):
    monkeypatch.setitem(sys.modules, request.param, None)
    return request.param.partition(".")[0]


@pytest.mark.any_backend
def test_what_writes_for_tensorboard_says_at_construction_what_to_install(missing, tmp_path):
    said = rf"needs the package {missing}, which is not installed.*pip install 'kmp\[tensorboard\]'"
    log_dir = tmp_path / "logs"
    for make in (
        SummaryWriter,
        lambda path: kmp.callbacks.GradientHealth(log_dir=path),
        lambda path: kmp.callbacks.LearningRateFinder(log_dir=path),
    ):
        with pytest.raises(ModuleNotFoundError, match=said):
            make(log_dir)
    assert not log_dir.exists()
    kmp.callbacks.GradientHealth(), kmp.callbacks.LearningRateFinder()
