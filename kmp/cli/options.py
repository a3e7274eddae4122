"""The options of the commands. Nothing here imports Keras, so that `--help` answers at once."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import PurePath

MODELS = ("mlp", "cnn", "transformer")
TASKS = ("digits", "breast_cancer", "diabetes", "text", "denoising")
BENCH_POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
CERTIFY_POLICIES = (
    *("mixed_float16", "mixed_bfloat16", "bfloat16", "bfloat16,slot_dtype=float32"),
    "float16",
)


class UsageError(ValueError):
    """What the user gave a command cannot be used; the message says what to write instead."""


def parser(version: str) -> argparse.ArgumentParser:
    """The parser of the command line; `command` names the command in what it parses.

    Args:
        version: what `--version` prints.

    Example:

    >>> parser("0.1.0").parse_args(["bench", "--steps", "5"]).steps
    5
    """
    program = "kmp" if PurePath(sys.argv[0]).stem == "kmp" else "python -m kmp"
    result = argparse.ArgumentParser(prog=program, description="Tools of kmp.")
    result.add_argument("--version", action="version", version=f"kmp {version}")
    commands = result.add_subparsers(dest="command", required=True)

    def add(name: str, purpose: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=purpose, description=purpose)

    add("doctor", "measure this machine and say which policy to train with")
    add("formats", "print the table of float formats")
    _add_bench_options(add("bench", "measure what half precision costs and gains on a model"))
    _add_certify_options(
        add(
            "certify",
            "train in float32 and in half precision, and say whether the results are equivalent",
        )
    )
    return result


def _add_bench_options(command: argparse.ArgumentParser) -> None:
    command.epilog = "Exit status: 0; 1 if a loss or an output was not finite; 2 for wrong input."
    command.add_argument(
        "--model",
        default="mlp",
        help=f"{', '.join(MODELS)}, or module:function, a function of yours without arguments that "
        "returns (model, x, y): a built and compiled Keras model, and arrays as fit takes them",
    )
    command.add_argument(
        "--policies", nargs="+", default=list(BENCH_POLICIES), help="float32 among them"
    )
    command.add_argument("--batch-size", type=_count(1), default=32)
    command.add_argument("--steps", type=_count(1), default=20, help="steps of a round")
    command.add_argument("--rounds", type=_count(2), default=10, help="rounds that are measured")
    command.add_argument(
        "--log-dir", type=_directory, help="write a page for TensorBoard's tab HParams"
    )
    _add_json_option(command)


def _add_certify_options(command: argparse.ArgumentParser) -> None:
    command.epilog = (
        "Exit status: 0 if every policy with float32 or bfloat16 parameters is equivalent to "
        "float32; 1 if one is not; 2 for wrong input; 130 after Ctrl-C."
    )
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--task",
        nargs="+",
        help=f"{', '.join(TASKS)}, or module:function, a function of yours that takes a seed and "
        "returns (model, (x, y), (x_test, y_test)): a built and compiled Keras model, and arrays "
        "as fit takes them",
    )
    which.add_argument("--all", action="store_true", help="all tasks that are built in")
    command.add_argument(
        "--policies",
        nargs="+",
        default=list(CERTIFY_POLICIES),
        help="compared with float32: mixed_bfloat16; bfloat16, whose parameters kmp updates in "
        "float32, also as mixed_bfloat16,slot_dtype=int8, or with master_weights=24; "
        "float16, trained without loss scaling, as a counter-example that does not change the exit "
        "status",
    )
    own = command.add_argument_group("needed for a function of yours")
    own.add_argument("--metric", help="a name that evaluate returns; default: loss")
    own.add_argument(
        "--margin",
        type=_margin,
        help="the largest difference of the metric that does not matter: 0.01, or 2%% of float32's",
    )
    own.add_argument("--epochs", type=_count(1))
    own.add_argument("--batch-size", type=_count(1))
    command.add_argument("--seeds", type=_count(2), help="runs of each policy; default: 5 or more")
    command.add_argument(
        "--resume",
        metavar="FILE",
        type=_file,
        help="keep each finished training in FILE, and do not repeat those that it holds already; "
        "after Ctrl-C the same command goes on",
    )
    _add_json_option(command)


def _add_json_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json",
        metavar="FILE",
        type=lambda path: path if path == "-" else _file(path),
        help="write the numbers; - prints nothing else",
    )


def _file(path: str) -> str:
    """An argparse type: a path that a file can be written to, found out before any measuring."""
    existed = os.path.exists(path)
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a file that can be written. Received: {path!r} ({error.strerror}). "
            "Name a file in a directory that is there."
        ) from error
    if not existed:
        os.remove(path)
    return path


def _directory(path: str) -> str:
    """An argparse type: a directory that files can be written to, made if it is missing."""
    try:
        os.makedirs(path, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(0, "not writable")
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a directory that can be written to. Received: {path!r} ({error.strerror})."
        ) from error
    return path


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
    """An argparse type: the margin, and whether it is a share of float32's metric."""
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
