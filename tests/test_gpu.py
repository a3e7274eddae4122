"""`make gpu` in little: every part runs, and the page says what each printed."""

import pathlib
import subprocess
import sys

import pytest
from processes import environment

pytestmark = [pytest.mark.slow, pytest.mark.any_backend]

ROOT = pathlib.Path(__file__).parents[1]


def test_every_part_runs_without_a_gpu():
    script = ROOT / "benchmarks" / "gpu.py"
    done = subprocess.run(
        [sys.executable, script, "--smoke"],
        env=environment(needs=["sklearn"], KERAS_BACKEND="jax"),  # as on that machine
        capture_output=True,
        text=True,
    )
    page = (ROOT / "build" / "gpu_smoke" / "gpu.md").read_text()
    assert done.returncode == 0, done.stdout + page
    for heading in ("Numerics", "Step", "Memory", "Layers", "Peers", "Fit", "Modes", "Certify"):
        assert f"## {heading}\n" in page
    printed = ("passed in", "kmp, watched", "GB by XLA", "batch_norm", "PyTorch", "equivalent")
    assert [text for text in printed if text not in page] == []


def test_without_a_gpu_it_says_what_to_write(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    script = ROOT / "benchmarks" / "gpu.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "--smoke" in done.stderr
