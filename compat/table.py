"""Run other people's programs through kmp, and write docs/lab/programs.md.

    python compat/table.py                  every program, an hour; then the page
    python compat/table.py --only gpt2 --columns file audit    these cells anew
    python compat/table.py --backend jax    the same on JAX (or torch), in other tables
    python compat/table.py --page           the page from the results that are there

The page keeps the section of a backend until there are results of all its cells.

Each row is filled by a process of its own, and begun again behind a cell that crashes or takes too
long. Results are kept in build/programs/, one file for each backend.
"""

import argparse
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading

from catalogue import CATALOGUE
from page import COLUMNS, PAGE, markdown

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE.parent / "build" / "programs"
STARTING = 180  # seconds that importing may take


def fill(name: str, columns: list[str], backend: str, limit: float) -> dict[str, dict]:
    """The cells of one row."""
    row: dict[str, dict] = {}
    while missing := [column for column in columns if column not in row]:
        row |= attempt(name, missing, backend, limit)
    return row


def attempt(name: str, columns: list[str], backend: str, limit: float) -> dict[str, dict]:
    """One worker: the cells that it filled; the last may say that it crashed or took too long."""
    variables = {**os.environ, "KERAS_BACKEND": backend}
    variables["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE)])
    (RESULTS / "logs").mkdir(parents=True, exist_ok=True)
    with open(RESULTS / "logs" / f"{backend}-{name}.txt", "a") as log:
        worker = subprocess.Popen(
            [sys.executable, HERE / "worker.py", name, *columns],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            return listen(worker, columns, limit)
        finally:
            worker.kill()
            worker.wait()


def listen(worker: subprocess.Popen, columns: list[str], limit: float) -> dict[str, dict]:
    """Read what a worker says until it ends, crashes or is silent for too long."""
    lines: queue.Queue = queue.Queue()
    threading.Thread(target=forward, args=(worker.stdout, lines), daemon=True).start()
    filled: dict[str, dict] = {}
    present, seconds = columns[0], STARTING
    while len(filled) < len(columns):
        try:
            line = lines.get(timeout=seconds)
        except queue.Empty:
            return filled | {present: broken(f"took more than {seconds:.0f} seconds")}
        if line is None:
            return filled | {present: broken(f"the process ended with {worker.wait()}")}
        said = json.loads(line) if line.startswith("{") else {}
        if "begins" in said:
            present, seconds = said["begins"], limit
        elif "column" in said:
            filled[said.pop("column")] = said
    return filled


def forward(stream, lines: queue.Queue) -> None:
    """Put each line into a queue, and None at the end."""
    for line in stream:
        lines.put(line)
    lines.put(None)


def broken(text: str) -> dict:
    """A cell whose process did not finish it."""
    return {"state": "kmp cannot", "text": text, "seconds": 0.0}


def load(backend: str) -> dict[str, dict]:
    """The results that are there."""
    path = RESULTS / f"{backend}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(CATALOGUE), default=list(CATALOGUE))
    parser.add_argument("--columns", nargs="+", choices=list(COLUMNS), default=list(COLUMNS))
    parser.add_argument("--backend", choices=["tensorflow", "jax", "torch"], default="tensorflow")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a cell")
    parser.add_argument("--missing", action="store_true", help="only cells without a result")
    parser.add_argument("--page", action="store_true", help="write the page, run nothing")
    parser.add_argument("--output", type=pathlib.Path, default=PAGE)
    return parser.parse_args()


def main() -> None:
    """Fill the cells that are asked for, keep them, and write the page."""
    arguments = parse()
    results = load(arguments.backend)
    for name in [] if arguments.page else arguments.only:
        row = results.setdefault(name, {})
        columns = [x for x in arguments.columns if not (arguments.missing and x in row)]
        row |= fill(name, columns, arguments.backend, arguments.limit)
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{arguments.backend}.json").write_text(json.dumps(results, indent=1))
        for column in columns:
            print(f"{name:18s} {column:18s} {row[column]['state']}: {row[column]['text']}")
        sys.stdout.flush()
    every = {backend: load(backend) for backend in ("tensorflow", "jax", "torch")}
    page = arguments.output
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    page.write_text(markdown(every, before), encoding="utf-8")


if __name__ == "__main__":
    main()
