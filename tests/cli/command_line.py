"""The command line, in this process."""

import sys

import pytest

import kmp.__main__


def command(monkeypatch, *arguments):
    """The exit status of `kmp` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["kmp", *arguments])
    with pytest.raises(SystemExit) as ended:
        kmp.__main__.main()
    return ended.value.code
