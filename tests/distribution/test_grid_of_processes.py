"""A sample of benchmarks/experiments/processes.py: two processes agree, whatever goes wrong on one.

In `fit` on JAX and on PyTorch, where that needs Keras 3.16; in a custom loop on TensorFlow.
"""

import importlib.util
import pathlib

import older
import pytest
from conftest import BACKEND

pytestmark = [
    pytest.mark.only("tensorflow", "jax", "torch"),
    pytest.mark.slow,
    *([older.torch_fit_on_processes] if BACKEND == "torch" else []),
]

PATH = pathlib.Path(__file__).parents[2] / "benchmarks" / "experiments" / "processes.py"
ALONE, RESUMED = (
    ("loop", "loop, saved and resumed") if BACKEND == "tensorflow" else ("all", "finder")
)
SAMPLE = [("loss NaN, last rank", ALONE), ("overflow, rank 0", RESUMED)]


@pytest.fixture
def grid(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("grid_of_processes", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def test_two_processes_agree(grid, tmp_path):
    chosen = [grid.Case(BACKEND, 2, *each) for each in SAMPLE]
    assert set(chosen) <= set(grid.cases(BACKEND, 2))
    found = grid.run_together(chosen, tmp_path / "run")
    assert {name: grid.wrong_with(name, x) for name, x in found.items()} == {
        case.name: [] for case in chosen
    }
    for case in chosen:
        first = found[case.name]["ranks"][0]
        assert first["skipped"] == 1 and first["steps"] >= 30  # EarlyStopping may stop it
