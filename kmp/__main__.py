"""The command line: `kmp doctor | formats | bench | certify`, or `python -m kmp ...`."""

import importlib
import importlib.util
import sys

import kmp
from kmp.cli import options

BACKENDS = ("tensorflow", "jax", "torch")


def import_all(command: str) -> None:
    """Import all of kmp, and with it Keras, which help does without.

    Raises:
        UsageError: Keras's backend is not installed.
    """
    try:
        importlib.reload(kmp)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in BACKENDS:
            raise
        there = [name for name in BACKENDS if importlib.util.find_spec(name)]
        write = f"Write KERAS_BACKEND={there[0]} {command}" if there else f"Install {missing}"
        raise options.UsageError(
            f"Keras's backend is {missing}, which is not installed; of {', '.join(BACKENDS)} there "
            f"is {' and '.join(there) or 'none'}. {write}."
        ) from error


def main() -> None:
    """Run the command that the command line names; exit with its status."""
    parser = options.parser(kmp.__version__)
    arguments = parser.parse_args()
    try:
        import_all(f"{parser.prog} {arguments.command}")
        from kmp.cli.commands import COMMANDS

        sys.exit(COMMANDS[arguments.command](arguments))
    except options.UsageError as error:
        parser.exit(2, f"{parser.prog} {arguments.command}: error: {error}\n")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
