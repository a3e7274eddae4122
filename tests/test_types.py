"""What type checkers say of a user's code, and of a backend that overrides wrongly."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
from mypy import api

ROOT = pathlib.Path(__file__).parents[1]

SOUND = """
import kmp

optimizer: kmp.LossScaleOptimizer = kmp.scaled("adam", learning_rate=0.1)
scale: kmp.ScaleState = optimizer.scale_state
paths: tuple[str, ...] = optimizer.variable_paths
report: kmp.GradientReport = optimizer.gradient_report()
norm: float = report.grad_norm
with kmp.protect(object()) as protection:
    protection.remove()
"""
TYPOS = [
    "kmp.scaled('adam').skiped_steps",
    "kmp.scaled('adam').lerning_rate",
    "kmp.scaled('adam').gradient_report().grad_nrom",
    "kmp.scaled('adam', loss_scael='none').sample_gradients(update_frequency=2)",
    "kmp.DynamicLossScale(growth_intervall=3)",
    "kmp.callbacks.GradientHealth(update_frequency=3)",
    "kmp.callbacks.Limits(max_gradient_norm=3.0)",
    "kmp.sclaed('adam')",
]


BACKEND = """
from kmp._backend.base import Backend
from kmp._backend.types import Tensor

class NewBackend(Backend):
    def inside_xla(self) -> bool: return True
    def segment_sum(self, values: Tensor, keys: Tensor, number: int) -> Tensor: return values
"""
WRONG_OVERRIDES = [
    "    def platform(self, device: str) -> str: return device",
    "    def compiled(self, function): return function",
    "    def writes_logs(self, model: object) -> str: return ''",
    "    END_OF_DATA = 3",
    "NewBackend()  # which lacks functions without a default",
]

PYRIGHT = shutil.which("pyright") or shutil.which("basedpyright")


def errors_of_mypy(file, monkeypatch):
    """The numbers of the lines in which mypy finds an error."""
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    settings = [f"--config-file={ROOT}/setup.cfg", f"--cache-dir={ROOT}/.mypy_cache"]
    found, complaints, _ = api.run([*settings, str(file)])
    assert not complaints, complaints
    lines = [line for line in found.splitlines() if file.name in line and "error" in line]
    return {int(line.split(f"{file.name}:")[1].split(":")[0]) for line in lines}


def errors_of_pyright(file, monkeypatch):
    """The numbers of the lines in which pyright finds an error."""
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (file.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [PYRIGHT, "--outputjson", "--pythonpath", sys.executable, "-p", str(file.parent)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    errors = [x for x in found["generalDiagnostics"] if x["severity"] == "error"]
    return {x["range"]["start"]["line"] + 1 for x in errors}


without_pyright = pytest.mark.skipif(PYRIGHT is None, reason="pyright is not installed")


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize(
    "errors", [errors_of_mypy, pytest.param(errors_of_pyright, marks=without_pyright)]
)
def test_a_typo_is_an_error_and_sound_code_is_none(errors, tmp_path, monkeypatch):
    file = tmp_path / "program.py"
    file.write_text(SOUND + "\n".join(TYPOS) + "\n")
    lines = SOUND.count("\n")
    assert errors(file, monkeypatch) == set(range(lines + 1, lines + len(TYPOS) + 1))


@pytest.mark.only("tensorflow")
def test_a_wrong_override_of_a_backend_is_an_error(tmp_path, monkeypatch):
    file = tmp_path / "backend.py"
    file.write_text(BACKEND + "\n".join(WRONG_OVERRIDES) + "\n")
    lines = BACKEND.count("\n")
    expected = set(range(lines + 1, lines + len(WRONG_OVERRIDES) + 1))
    assert errors_of_mypy(file, monkeypatch) == expected
