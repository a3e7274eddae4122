"""The command line: `kmp doctor | formats | bench | certify`, or `python -m kmp ...`."""

import importlib
import sys

import kmp
from kmp.cli import options


def main() -> None:
    """Run the command that the command line names; exit with its status."""
    parser = options.parser(kmp.__version__)
    arguments = parser.parse_args()
    try:
        importlib.reload(kmp)  # now all of it, and with it Keras, which help does without
        from kmp.cli.commands import COMMANDS

        sys.exit(COMMANDS[arguments.command](arguments))
    except options.UsageError as error:
        parser.exit(2, f"{parser.prog} {arguments.command}: error: {error}\n")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
