"""`python -m kmp doctor | formats`."""

import argparse

from kmp import doctor
from kmp.formats import table

COMMANDS = {
    "doctor": (doctor.report, "say what this machine is good at, and measure it"),
    "formats": (table, "print the table of float formats"),
}


def main() -> None:
    """Run the command that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m kmp", description="Tools of kmp.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, purpose) in COMMANDS.items():
        commands.add_parser(name, help=purpose, description=purpose)
    run, _ = COMMANDS[parser.parse_args().command]
    print(run())


if __name__ == "__main__":
    main()
