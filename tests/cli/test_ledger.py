"""The file that keeps finished trainings: what it takes up again, and what it refuses."""

import math

import pytest

from kmp.cli.costs import StepMemory
from kmp.cli.ledger import Ledger, Training
from kmp.cli.options import UsageError
from kmp.cli.tasks import Task

pytestmark = pytest.mark.any_backend

TASK = Task("line", len, "mae", 0.02, True, epochs=2, batch_size=32, seeds=3)
HERE = {"backend": "jax", "keras": "3.15.1"}
FIRST = Training(0.1, 8, 1, 2.5, StepMemory(1024, "XLA"))
SECOND = Training(math.inf, 8, 0, 3.5, StepMemory(None, "unknown"))


@pytest.fixture
def path(tmp_path):
    path = str(tmp_path / "ledger.jsonl")
    ledger = Ledger(path, HERE)
    ledger.add(TASK, "float32", 0, FIRST)
    ledger.add(TASK, "mixed_float16", 0, SECOND)
    return path


def test_what_was_kept_is_taken_up_once(path):
    ledger = Ledger(path, HERE)
    assert len(ledger) == 2
    assert ledger.take(TASK, "float32", 0) == FIRST
    assert ledger.take(TASK, "float32", 0) is None  # float32 may be asked for twice
    assert ledger.take(TASK, "mixed_float16", 0) == SECOND
    assert ledger.take(TASK, "float32", 1) is None


@pytest.mark.parametrize("change", [{"epochs": 3}, {"batch_size": 16}, {"metric": "loss"}])
def test_another_training_is_not_taken_up(path, change):
    other = TASK.__class__(**{**vars(TASK), **change})
    assert Ledger(path, HERE).take(other, "float32", 0) is None


def test_the_margin_and_the_number_of_seeds_may_change(path):
    other = TASK.__class__(**{**vars(TASK), "margin": 0.01, "relative": False, "seeds": 9})
    assert Ledger(path, HERE).take(other, "float32", 0) == FIRST


def test_a_line_that_was_cut_short_is_left_out(path):
    with open(path, "a") as file:
        file.write('{"name": "line", "metr')
    ledger = Ledger(path, HERE)
    ledger.add(TASK, "float32", 1, FIRST)
    assert len(Ledger(path, HERE)) == 3


def test_a_ledger_in_memory_can_be_saved(tmp_path):
    ledger = Ledger(None, HERE)
    ledger.add(TASK, "float32", 0, FIRST)
    assert list(tmp_path.iterdir()) == []
    ledger.save(str(tmp_path / "kept.jsonl"))
    assert Ledger(str(tmp_path / "kept.jsonl"), HERE).take(TASK, "float32", 0) == FIRST


def test_another_environment_is_refused(path):
    there = {**HERE, "keras": "3.14.0", "device": "TPU"}
    message = "device: None there, TPU here; keras: 3.15.1 there, 3.14.0 here. Name another file"
    with pytest.raises(UsageError, match=message):
        Ledger(path, there)


@pytest.mark.parametrize("content", ["hello\n", "[]\n", "{}\n", '{"environment": {}}\n{"a": 1}\n'])
def test_another_file_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(UsageError, match="must be one that certify wrote"):
        Ledger(str(path), {})
    assert path.read_text() == content


def test_an_empty_file_is_a_new_one(tmp_path):
    path = tmp_path / "new.jsonl"
    path.touch()
    assert len(Ledger(str(path), HERE)) == 0
