"""What each command does: read its options, measure or train, print and write."""

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kmp._backend import backend
from kmp.cli import architectures
from kmp.cli.bench import bench, bench_table, write_hparams
from kmp.cli.building import load, parse_policy
from kmp.cli.certify import Certificate, certify
from kmp.cli.doctor import environment, environment_line, report
from kmp.cli.ledger import Ledger
from kmp.cli.options import MODELS, UsageError
from kmp.cli.printing import Progress, write_json
from kmp.cli.tasks import TASKS, Task
from kmp.precision.float_formats import table
from kmp.summaries import check_can_write


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print what this machine is good at; the exit status."""
    print(report())
    return 0


def run_formats(arguments: argparse.Namespace) -> int:
    """Print the table of float formats; the exit status."""
    print(table())
    return 0


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure, print and write; 1 if something was not finite."""
    name = arguments.model
    if arguments.log_dir:
        check_can_write()
    _check_policies(arguments.policies)
    build = _benchmark(name) if name in MODELS else load(name)
    counts = {key: getattr(arguments, key) for key in ("batch_size", "steps", "rounds")}
    with Progress(f"bench {name}") as progress:
        results = bench(build, arguments.policies, **counts, progress=progress)
    facts, settings = environment(), {"model": name, **counts}
    if arguments.json != "-":
        print(environment_line(facts))
        print(
            f"{name}, batches of {arguments.batch_size}, {arguments.rounds} interleaved rounds of "
            f"{arguments.steps} steps"
        )
        print(bench_table(results))
    if arguments.json:
        rows = [{**_plain(each), "finite": each.finite} for each in results]
        content = {"environment": facts, "settings": settings, "results": rows}
        write_json(content, arguments.json)
    if arguments.log_dir:
        write_hparams(results, arguments.log_dir, {**settings, "backend": facts["backend"]})
        print(f"tensorboard --logdir {arguments.log_dir}    tab HParams", file=sys.stderr)
    return 0 if all(each.finite for each in results) else 1


def run_certify(arguments: argparse.Namespace) -> int:
    """Train, compare, print and write; 1 if a policy that counts is not equivalent."""
    facts = environment()
    _check_policies(arguments.policies)
    named = TASKS.values() if arguments.all else map(_task, arguments.task)
    tasks = [_with_options(task, arguments) for task in named]
    ledger = Ledger(arguments.resume, facts)
    if arguments.json != "-":
        print(environment_line(facts))
    if len(ledger):
        print(
            f"{len(ledger)} finished trainings are in {arguments.resume}. They are not repeated, "
            "whatever has changed in the code since.",
            file=sys.stderr,
        )
    certificates = []
    for i, task in enumerate(tasks):
        title = f"certify {task.name}" + (f" ({i + 1} of {len(tasks)})" if len(tasks) > 1 else "")
        with _kept(ledger, arguments.resume), Progress(title) as progress:
            certificates.append(certify(task, arguments.policies, progress, ledger))
        if arguments.json != "-":
            print(f"\n{certificates[-1]}", flush=True)
    equivalent = all(each.equivalent for each in certificates)
    if arguments.json:
        content = {
            "environment": facts,
            "tasks": [_certificate_as_dict(each) for each in certificates],
            "equivalent": equivalent,
        }
        write_json(content, arguments.json)
    return 0 if equivalent else 1


# By the names in `options.py`, which knows none of these functions: it imports no Keras.
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "doctor": run_doctor,
    "formats": run_formats,
    "bench": run_bench,
    "certify": run_certify,
}


@contextlib.contextmanager
def _kept(ledger: Ledger, path: str | None) -> Iterator[None]:
    """Within, Ctrl-C loses no finished training: they are saved, and the way on is printed."""
    try:
        yield
    except KeyboardInterrupt:
        if not len(ledger):
            raise
        if path is None:
            names = (f"certify-interrupted-{n}.jsonl" for n in itertools.count(1))
            path = next(name for name in names if not os.path.exists(name))
            ledger.save(path)
        print(
            f"\n{len(ledger)} finished trainings are in {path}. The same command with "
            f"--resume {path} goes on.",
            file=sys.stderr,
        )
        raise


def _benchmark(name: str) -> Callable[[], tuple]:
    """Return a function that builds one of `MODELS` with random data.

    The model is eight times as wide on a device other than a CPU.
    """

    def build():
        scale = 1 if backend.platform() == "cpu" else 8
        random = np.random.default_rng(0)
        if name == "mlp":
            model = architectures.mlp(512, [512 * scale] * 4, 10)
            x = random.normal(size=(256, 512)).astype("float32")
            y = random.integers(0, 10, 256)
        elif name == "cnn":
            model = architectures.cnn((32, 32, 3), [16 * scale, 32 * scale, 64 * scale], 10)
            x = random.normal(size=(256, 32, 32, 3)).astype("float32")
            y = random.integers(0, 10, 256)
        else:
            model = architectures.transformer(256, 64, 128 * scale, 2)
            x = random.integers(0, 256, (256, 64))
            y = np.roll(x, -1, axis=1)
        model.compile("adam", architectures.cross_entropy())
        return model, x, y

    return build


def _task(name: str) -> Task:
    """A built-in task, or one around the user's function that `_with_options` completes."""
    if name in TASKS:
        return TASKS[name]
    return Task(name, load(name), "loss", margin=0.0, relative=False, epochs=0, batch_size=0)


def _with_options(task: Task, arguments: argparse.Namespace) -> Task:
    names = ("metric", "epochs", "batch_size", "seeds")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name)}
    if arguments.margin:
        given["margin"], given["relative"] = arguments.margin
    task = dataclasses.replace(task, **given)
    if not (task.margin and task.epochs and task.batch_size):
        raise UsageError(
            f"{task.name} needs --margin, --epochs and --batch-size. Write for example "
            "--metric accuracy --margin 0.01 --epochs 10 --batch-size 32. State the margin before "
            "you look: how large a difference would not matter to you?"
        )
    return task


def _check_policies(names: Sequence[str]) -> None:
    for name in names:
        try:
            parse_policy(name)
        except ValueError as error:
            raise UsageError(str(error)) from error


def _plain(value: Any) -> Any:
    """A dataclass as nested dicts, with the named tuples in it."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value._asdict() if hasattr(value, "_asdict") else value


def _certificate_as_dict(certificate: Certificate) -> dict[str, Any]:
    task = _plain(certificate.task)
    del task["build"]
    runs = [_plain(each) for each in certificate.runs]
    return {**task, "runs": runs, "equivalent": certificate.equivalent}
