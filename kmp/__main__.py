"""`python -m kmp doctor | formats | bench | certify`."""

import argparse
import sys

from kmp.cli import commands as _commands
from kmp.cli import doctor
from kmp.precision.float_formats import table

REPORTS = {
    "doctor": (doctor.report, "say what this machine is good at, and measure it"),
    "formats": (table, "print the table of float formats"),
}
COMMANDS = {
    "bench": (
        _commands.add_bench_options,
        _commands.run_bench,
        "measure what half precision costs and gains on a model",
    ),
    "certify": (
        _commands.add_certify_options,
        _commands.run_certify,
        "train in float32 and in half precision, and say whether the results are equivalent",
    ),
}


def main() -> None:
    """Run the command that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m kmp", description="Tools of kmp.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, purpose) in REPORTS.items():
        commands.add_parser(name, help=purpose, description=purpose)
    for name, (add_options, _, purpose) in COMMANDS.items():
        add_options(commands.add_parser(name, help=purpose, description=purpose))
    arguments = parser.parse_args()
    if arguments.command in REPORTS:
        print(REPORTS[arguments.command][0]())
        return
    try:
        sys.exit(COMMANDS[arguments.command][1](arguments))
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
