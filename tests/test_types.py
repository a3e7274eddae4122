"""What a type checker says of a user's code."""

import pathlib

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


@pytest.fixture
def errors(tmp_path, monkeypatch):
    """A function that returns mypy's errors in a source."""
    monkeypatch.setenv("MYPYPATH", str(ROOT))

    def check(source):
        file = tmp_path / "program.py"
        file.write_text(source)
        settings = [f"--config-file={ROOT}/setup.cfg", f"--cache-dir={ROOT}/.mypy_cache"]
        found, complaints, _ = api.run([*settings, str(file)])
        assert not complaints, complaints
        return [line for line in found.splitlines() if "program.py" in line and "error" in line]

    return check


@pytest.mark.only("tensorflow")
def test_a_typo_is_an_error_and_sound_code_is_none(errors):
    lines = SOUND.count("\n")
    found = errors(SOUND + "\n".join(TYPOS) + "\n")
    reported = {int(line.split("program.py:")[1].split(":")[0]) for line in found}
    assert reported == set(range(lines + 1, lines + len(TYPOS) + 1)), "\n".join(found)
