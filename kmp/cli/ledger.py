"""The finished trainings of `certify`, kept in a file so that an interrupted run can go on."""

import collections
import json
import os
from collections.abc import Hashable
from typing import Any, NamedTuple

from kmp.cli.costs import StepMemory
from kmp.cli.options import UsageError
from kmp.cli.printing import to_json
from kmp.cli.tasks import Task


class Training(NamedTuple):
    """One training of a task.

    Attributes:
        metric: float, of the test data.
        steps: int.
        skipped_steps: int.
        step_ms: float, milliseconds of a step.
        memory: what a step holds at most, measured only for seed 0.
    """

    metric: float
    steps: int
    skipped_steps: int
    step_ms: float
    memory: StepMemory


class Ledger:
    """Keeps trainings, in memory or in a file too: one line of JSON each, after a line of facts.

    A training is written when it finishes, so that a killed process loses only the one under way.

    Args:
        path: of a file; if it exists, its trainings are taken up. None keeps them in memory.
        environment: what the trainings ran on, as strings. Differences between trainings of
            different environments mean nothing, so a file from another one is refused.

    Raises:
        UsageError: the file holds something else, or trainings from another environment.

    Example:

    >>> task = Task("line", len, "loss", 0.02, True, epochs=1, batch_size=16)
    >>> memory = StepMemory(None, "unknown")
    >>> ledger = Ledger("ledger.jsonl", {"backend": "jax"})
    >>> ledger.add(task, "float32", 0, Training(0.5, 10, 0, 1.25, memory))
    >>> Ledger("ledger.jsonl", {"backend": "jax"}).take(task, "float32", 0).metric
    0.5
    """

    def __init__(self, path: str | None = None, environment: dict[str, str] | None = None):
        self._path: str | None = None
        self._environment = environment or {}
        self._rows: list[dict[str, Any]] = []
        self._waiting: dict[Hashable, list[Training]] = collections.defaultdict(list)
        if path is not None:
            self._rows = self._read(path)
            for row in self._rows:
                self._waiting[_key(row)].append(_training(row))
            self.save(path)  # without the line that an interruption may have cut short

    def __len__(self) -> int:
        """How many trainings are kept."""
        return len(self._rows)

    def take(self, task: Task, policy: str, seed: int) -> Training | None:
        """A training that was read from the file, each once; None if there is none (left)."""
        waiting = self._waiting[_key(_row(task, policy, seed))]
        return waiting.pop(0) if waiting else None

    def add(self, task: Task, policy: str, seed: int, training: Training) -> None:
        """Keep a training that has just finished."""
        found = {**training._asdict(), "memory": training.memory._asdict()}
        row = {**_row(task, policy, seed), "training": found}
        self._rows.append(row)
        if self._path:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(to_json(row, indent=None) + "\n")

    def save(self, path: str) -> None:
        """Write all that is kept, and from now on each training that is added."""
        lines = [{"kmp certify": 1, "environment": self._environment}, *self._rows]
        beside = f"{path}.new"
        with open(beside, "w", encoding="utf-8") as file:
            file.writelines(to_json(line, indent=None) + "\n" for line in lines)
        os.replace(beside, path)
        self._path = path

    def _read(self, path: str) -> list[dict[str, Any]]:
        if not os.path.exists(path) or not os.path.getsize(path):
            return []
        with open(path, encoding="utf-8") as file:
            lines = [line for line in file if line.endswith("\n")]
        try:
            facts, *rows = (json.loads(line) for line in lines)
            known = facts["environment"]
            for row in rows:
                _key(row), _training(row)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"The file to resume from must be one that certify wrote. Received: {path!r}. "
                "Name a file that does not exist yet to start over."
            ) from error
        changed = {
            name: f"{known.get(name)} there, {self._environment.get(name)} here"
            for name in sorted({*known, *self._environment})
            if known.get(name) != self._environment.get(name)
        }
        if changed:
            differences = "; ".join(f"{name}: {what}" for name, what in changed.items())
            raise UsageError(
                f"The trainings in {path!r} must have run where these run. Received: "
                f"{differences}. Name another file to start over."
            )
        return rows


def _row(task: Task, policy: str, seed: int) -> dict[str, Any]:
    """What tells a training from others, the margin and the number of seeds left out."""
    names = ("name", "metric", "epochs", "batch_size")
    return {**{name: getattr(task, name) for name in names}, "policy": policy, "seed": seed}


def _key(row: dict[str, Any]) -> Hashable:
    return tuple(row[name] for name in ("name", "metric", "epochs", "batch_size", "policy", "seed"))


def _training(row: dict[str, Any]) -> Training:
    """The training of a line; JSON holds NaN and the infinities as strings."""
    found = row["training"]
    memory = StepMemory(**found["memory"])
    return Training(**{**found, "metric": float(found["metric"]), "memory": memory})
