"""What commands print: JSON that any reader takes, and progress."""

import datetime
import json
import math
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


def portable(value: Any) -> Any:
    """A nested structure as JSON has it: NaN and the infinities, which it lacks, become strings.

    Example:

    >>> portable({"loss": (float("nan"), 1.5)})
    {'loss': ['NaN', 1.5]}
    """
    if isinstance(value, dict):
        return {str(key): portable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [portable(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def to_json(value: Any, indent: int | None = 2) -> str:
    """JSON of a nested structure; see `portable`."""
    return json.dumps(portable(value), indent=indent, allow_nan=False)


def write_json(value: Any, path: str) -> None:
    """Write JSON to a file, or to the standard output for "-"."""
    if path == "-":
        print(to_json(value))
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(to_json(value) + "\n")


class Progress:
    """Shows on stderr what is being done and how much is left.

    A terminal shows a bar, which goes away at the end; elsewhere each step is a line.

    Example:

    >>> with Progress("bench") as progress:
    ...     progress("round 1", done=0, total=2)

    Args:
        title: what is under way.
    """

    def __init__(self, title: str):
        self._title = title
        self._start = time.monotonic()
        self._first: int | None = None  # how many steps were done when it began
        self._bar: Bar | None = None
        if sys.stderr.isatty():
            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("done, left"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
                speed_estimate_period=1e9,  # a step may take minutes
            )
            self._task = self._bar.add_task(title, total=None)

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, text: str, done: int, total: int) -> None:
        """Say what begins now, after `done` of `total` steps."""
        if self._bar:
            description = f"{self._title}: {text}"
            self._bar.update(self._task, description=description, completed=done, total=total)
            return
        left = ""
        if self._first is None:
            self._first = done
        if done > self._first:
            seconds = (time.monotonic() - self._start) / (done - self._first) * (total - done)
            left = f", about {datetime.timedelta(seconds=round(seconds))} left"
        print(f"{self._title}: {text} ({done} of {total} done{left})", file=sys.stderr, flush=True)
