"""Every advice helps who follows it; tests/advice.py holds the situations."""

import ast
import os
import pathlib
import re

import pytest
from advice import AUDIT, ROWS
from advised_runs import located
from conftest import BACKEND

import kmp
from kmp.callbacks.verdict.detectors import detectors
from kmp.models.audit_rules import AUDIT_RULES

ROOT = pathlib.Path(kmp.__file__).parents[1]
HERE = [row for row in ROWS if BACKEND in (row.backends or (BACKEND,))]


FIRST = {row.of: row for row in reversed(ROWS)}  # of each kind; `make test-whole` runs all rows
WHOLE = pytest.mark.skipif(not os.environ.get("KMP_WHOLE_GRID"), reason="of the whole grid")


def marked(row):
    marks = [] if row.quick else [pytest.mark.slow] if row is FIRST[row.of] else [WHOLE]
    return pytest.param(row, marks=marks, id=row.id)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", [marked(row) for row in HERE])
def test_who_follows_the_advice_gets_well(row):
    """The verdict says so, and the loss is that of a float32 run without kmp."""
    before = row.was()
    assert row.says in before.said, before.said
    if row.located:
        assert row.located in located(row.step, **row.before)
    after = row.is_now()
    assert after.state == row.state, after.said
    assert after.figure <= row.tolerance * row.oracle() + 2e-3


@pytest.mark.any_backend
def test_every_detector_and_every_finding_has_a_row():
    told = {row.of for row in ROWS}
    assert {type(each).__name__ for each in detectors()} <= told
    assert {AUDIT + kind for kind in AUDIT_RULES} <= told


# Verbs with which a sentence of advice begins, or its second half.
ADVICE = re.compile(
    r"(?:^|[.:;,]|\bor|\band) ?(?:[Ww]rite|[Ss]et|[Ll]ook|[Ll]ower|[Gg]ive|[Uu]se|[Kk]eep|[Ll]oad|"
    r"[Rr]aise|[Cc]ompile|[Rr]ound|[Ee]nd in|[Ee]nd the|[Ll]et|[Ww]ait|[Aa]dd|[Mm]end|[Ww]rap|"
    r"[Bb]egin again|[Ss]weep|[Gg]o back|[Tt]rain in|[Cc]lip) "
)
PLACES = (
    "callbacks/verdict/*.py",
    "callbacks/alarms.py",
    "callbacks/terminate_on_nan.py",
    "models/audit_rules_of_*.py",
    "models/side_effects.py",
    "debug/causes.py",
)


def sentences(path):
    """The texts in a module's code, docstrings aside, with "..." where something is filled in."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    skipped = {
        id(x.body[0].value)
        for x in ast.walk(tree)
        if isinstance(x, documented) and isinstance(x.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(x) for x in ast.walk(node)} - {id(node)}
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(x.value if isinstance(x, ast.Constant) else "\0" for x in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.any_backend
@pytest.mark.parametrize("place", PLACES)
def test_every_advice_in_the_code_has_a_row(place):
    said = [row.says for row in ROWS]
    for path in sorted((ROOT / "kmp").glob(place)):
        for text in sentences(path):
            is_error = "Received:" in text
            if (
                ADVICE.search(text)
                and not is_error
                and not any(shares(text, each) for each in said)
            ):
                pytest.fail(f"{path.name} advises without a row in tests/advice.py: {text!r}")


def shares(text, says):
    """Whether 20 letters of a text, in which things are filled in, are in a row's words."""
    pieces = [x for x in text.split("\0") if len(x) >= 20 or ADVICE.search(x)]
    return any(x[i : i + 20] in says for x in pieces for i in range(max(1, len(x) - 19)))
