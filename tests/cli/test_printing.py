"""What commands print: JSON that any reader takes, and progress."""

import io
import json
import math
import sys

import pytest

from kmp.cli import printing
from kmp.cli.printing import Progress, to_json

pytestmark = pytest.mark.any_backend


def test_json_has_no_words_that_it_lacks():
    text = to_json({"a": (math.nan, math.inf, -math.inf, 1.5), "b": None})
    assert json.loads(text) == {"a": ["NaN", "Infinity", "-Infinity", 1.5], "b": None}


def test_progress_is_a_line_for_each_part(monkeypatch, capsys):
    now = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr(printing.time, "monotonic", lambda: next(now))
    with Progress("certify") as progress:
        progress("seed 1", 0, 4)
        progress("seed 2", 1, 4)
        progress("seed 3", 2, 4)
    assert capsys.readouterr().err.splitlines() == [
        "certify: seed 1 (0 of 4 done)",
        "certify: seed 2 (1 of 4 done, about 0:00:30 left)",
        "certify: seed 3 (2 of 4 done, about 0:00:20 left)",
    ]


def test_what_was_done_before_took_no_time(monkeypatch, capsys):
    """A resumed run begins with 90 parts done: only those that it does itself are timed."""
    now = iter([0.0, 10.0])
    monkeypatch.setattr(printing.time, "monotonic", lambda: next(now))
    with Progress("certify") as progress:
        progress("seed 10", 90, 100)
        progress("seed 10", 91, 100)
    assert capsys.readouterr().err.splitlines()[-1].endswith("about 0:01:30 left)")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_a_bar_that_goes_away(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyboardInterrupt), Progress("bench [mlp]") as progress:
        progress("round 1", 3, 14)
        raise KeyboardInterrupt
    shown = terminal.getvalue()
    assert "bench [mlp]: round 1" in shown and "3/14" in shown
    assert shown.endswith("\x1b[2K")  # the line is cleared
