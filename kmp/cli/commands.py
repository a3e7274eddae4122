"""The commands that train: their options, what they print, and where they write it."""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from kmp import _backend
from kmp.cli import architectures as _architectures
from kmp.cli import certify
from kmp.cli.bench import POLICIES, bench, bench_table, write_hparams
from kmp.cli.building import load
from kmp.cli.doctor import environment, environment_line
from kmp.cli.printing import end_progress, show_progress, write_json
from kmp.cli.tasks import TASKS, Task
from kmp.precision.policy import get_policy

MODELS = ("mlp", "cnn", "transformer")


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m kmp bench`."""
    parser.add_argument(
        "--model",
        default="mlp",
        type=_named(lambda name: _benchmark(name) if name in MODELS else load(name)),
        help=f"{', '.join(MODELS)}, or module:function, a function of yours without arguments that "
        "returns (model, x, y): a built and compiled Keras model, and arrays as fit takes them",
    )
    parser.add_argument(
        "--policies", nargs="+", default=list(POLICIES), type=_policy, help="float32 among them"
    )
    parser.add_argument("--batch-size", type=_count(1), default=32)
    parser.add_argument("--steps", type=_count(1), default=20, help="steps of a round")
    parser.add_argument("--rounds", type=_count(2), default=10, help="rounds that are measured")
    parser.add_argument("--log-dir", help="write a page for TensorBoard's tab HParams")
    _add_json_option(parser)


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure, print and write; the exit status."""
    name, build = arguments.model
    counts = {key: getattr(arguments, key) for key in ("batch_size", "steps", "rounds")}
    say = _progress_of(f"bench {name}")
    results = bench(build, arguments.policies, **counts, say=say)
    end_progress()
    facts, settings = environment(), {"model": name, **counts}
    if arguments.json != "-":
        print(environment_line(facts))
        print(
            f"{name}, batches of {arguments.batch_size}, {arguments.rounds} interleaved rounds of "
            f"{arguments.steps} steps"
        )
        print(bench_table(results))
    if arguments.json:
        rows = [_plain(each) for each in results]
        content = {"environment": facts, "settings": settings, "results": rows}
        write_json(content, arguments.json)
    if arguments.log_dir:
        write_hparams(results, arguments.log_dir, {**settings, "backend": facts["backend"]})
        print(f"tensorboard --logdir {arguments.log_dir}    tab HParams", file=sys.stderr)
    return 0


def add_certify_options(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m kmp certify`."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--task",
        nargs="+",
        type=_named(_task),
        help=f"{', '.join(TASKS)}, or module:function, a function of yours that takes a seed and "
        "returns (model, (x, y), (x_test, y_test)): a built and compiled Keras model, and arrays "
        "as fit takes them",
    )
    which.add_argument("--all", action="store_true", help="all tasks that are built in")
    parser.add_argument(
        "--policies",
        nargs="+",
        default=list(certify.POLICIES),
        type=_policy,
        help="compared with float32; one that keeps its parameters in half precision is trained "
        "without loss scaling, as a counter-example, and does not change the exit status",
    )
    own = parser.add_argument_group("needed for a function of yours")
    own.add_argument("--metric", help="a name that evaluate returns; default: loss")
    own.add_argument(
        "--margin",
        type=_margin,
        help="the largest difference of the metric that does not matter: 0.01, or 2%% of float32's",
    )
    own.add_argument("--epochs", type=_count(1))
    own.add_argument("--batch-size", type=_count(1))
    parser.add_argument("--seeds", type=_count(2), help="runs of each policy; default: 5 or more")
    _add_json_option(parser)


def run_certify(arguments: argparse.Namespace) -> int:
    """Train, compare, print and write; 1 if a policy that counts is not equivalent."""
    tasks = list(TASKS.values()) if arguments.all else [task for _, task in arguments.task]
    tasks = [_with_options(task, arguments) for task in tasks]
    facts, certificates = environment(), []
    if arguments.json != "-":
        print(environment_line(facts))
    for task in tasks:
        certificate = certify.certify(task, arguments.policies, _progress_of("certify"))
        end_progress()
        certificates.append(certificate)
        if arguments.json != "-":
            print(f"\n{certificate}", flush=True)
    equivalent = all(each.equivalent for each in certificates)
    if arguments.json:
        content = {
            "environment": facts,
            "tasks": [_certificate_as_dict(each) for each in certificates],
            "equivalent": equivalent,
        }
        write_json(content, arguments.json)
    return 0 if equivalent else 1


def _add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the numbers; - prints them alone")


def _progress_of(title: str) -> Callable[[str], None]:
    return lambda text: show_progress(f"{title}: {text}")


def _benchmark(name: str) -> Callable[[], tuple]:
    """A function that builds one of `MODELS` with random data; eight times as wide beyond CPUs."""

    def build():
        scale = 1 if _backend.platform() == "cpu" else 8
        random = np.random.default_rng(0)
        if name == "mlp":
            model = _architectures.mlp(512, [512 * scale] * 4, 10)
            x = random.normal(size=(256, 512)).astype("float32")
            y = random.integers(0, 10, 256)
        elif name == "cnn":
            model = _architectures.cnn((32, 32, 3), [16 * scale, 32 * scale, 64 * scale], 10)
            x = random.normal(size=(256, 32, 32, 3)).astype("float32")
            y = random.integers(0, 10, 256)
        else:
            model = _architectures.transformer(256, 64, 128 * scale, 2)
            x = random.integers(0, 256, (256, 64))
            y = np.roll(x, -1, axis=1)
        model.compile("adam", _architectures.cross_entropy())
        return model, x, y

    return build


def _task(name: str) -> Task:
    """A built-in task, or a frame for the user's function, which `_with_options` fills."""
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
        raise argparse.ArgumentTypeError(
            f"{task.name} needs --margin, --epochs and --batch-size. Write for example "
            "--metric accuracy --margin 0.01 --epochs 10 --batch-size 32. State the margin before "
            "you look: how large a difference would not matter to you?"
        )
    return task


def _named(read: Callable[[str], Any]) -> Callable[[str], tuple[str, Any]]:
    """An argparse type: the name, and what `read` makes of it."""

    def convert(name):
        try:
            return name, read(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _policy(name: str) -> str:
    try:
        get_policy(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def _count(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `least`."""

    def convert(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {least}. Received: {text!r}"
            )
        return int(text)

    return convert


def _margin(text: str) -> tuple[float, bool]:
    """An argparse type: the margin, and whether it is a share."""
    relative = text.endswith("%")
    try:
        margin = float(text.removesuffix("%")) / (100 if relative else 1)
    except ValueError:
        margin = 0.0
    if not 0 < margin < float("inf"):
        raise argparse.ArgumentTypeError(
            f"expected a positive number, or a percentage of float32's metric. Received: {text!r}. "
            "Write 0.01 or 2%"
        )
    return margin, relative


def _plain(value: Any) -> Any:
    """A dataclass as nested dicts, its tuples with names too."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value._asdict() if hasattr(value, "_asdict") else value


def _certificate_as_dict(certificate: certify.Certificate) -> dict[str, Any]:
    task = _plain(certificate.task)
    del task["build"]
    runs = [_plain(each) for each in certificate.runs]
    return {**task, "runs": runs, "equivalent": certificate.equivalent}
