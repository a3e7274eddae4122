"""`python -m kmp formats`."""

import argparse

from kmp.formats import table


def main() -> None:
    """Run the command that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m kmp", description="Tools of kmp.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("formats", help="print the table of float formats")
    parser.parse_args()
    print(table())


if __name__ == "__main__":
    main()
