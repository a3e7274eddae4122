"""What commands print: JSON that any reader takes, and progress."""

import json
import math
import sys
from typing import Any


def to_json(value: Any) -> str:
    """JSON of a nested structure; NaN and the infinities, which it lacks, become strings."""

    def portable(x):
        if isinstance(x, dict):
            return {str(key): portable(each) for key, each in x.items()}
        if isinstance(x, list | tuple):
            return [portable(each) for each in x]
        if isinstance(x, float) and not math.isfinite(x):
            return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
        return x

    return json.dumps(portable(value), indent=2, allow_nan=False)


def write_json(value: Any, path: str) -> None:
    """Write JSON to a file, or to the standard output for "-"."""
    if path == "-":
        print(to_json(value))
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(to_json(value) + "\n")


def show_progress(text: str) -> None:
    """Say on stderr what is being done: in place on a terminal, line by line elsewhere."""
    in_place = sys.stderr.isatty()
    print(f"\r\x1b[K{text}" if in_place else text, end="" if in_place else "\n", file=sys.stderr)
    sys.stderr.flush()


def end_progress() -> None:
    """Clear the line that `show_progress` has written on a terminal."""
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
