"""Every page: its Python runs; its commands, links and names lead somewhere."""

import contextlib
import importlib.util
import inspect
import io
import operator
import pathlib
import re
import runpy
import shlex
import sys

import pytest

import kmp
import kmp.__main__
import kmp.models
from kmp.callbacks.verdict.states import STATES
from kmp.cli.commands import COMMANDS

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "examples" / "README.md",
    ]
}


def blocks(text):
    """(language, content) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def with_blocks(language, *kept):
    """The pages with blocks in a language; `make test` runs those in `kept`, or all of them."""
    pages = []
    for name, text in PAGES.items():
        if language == "python" and name.startswith(("docs/messages/", "docs/trackers.md")):
            continue  # test_messages.py and test_trackers.py run it, beside what its reader has
        found = [content for each, content in blocks(text) if each == language]
        marks = [pytest.mark.wide] if kept and name not in kept else []
        if found:
            pages.append(pytest.param(name, found, id=name, marks=marks))
    return pages


@pytest.mark.parametrize("name", PAGES)
def test_blocks_are_of_a_kind_that_is_tested(name):
    """What a page prints or states as a rule stands in blocks without a language."""
    assert {language for language, _ in blocks(PAGES[name])} <= {"", "python", "bash", "diff"}


@pytest.mark.filterwarnings("ignore:Step 1. gradient overflow")  # the scale is being found
@pytest.mark.parametrize("name, python", with_blocks("python", "README.md", "docs/guide.md"))
def test_python_runs(name, python, tmp_path, monkeypatch):
    """Block after block, in one namespace a page."""
    monkeypatch.chdir(tmp_path)
    namespace = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in python:
            exec(compile(block, name, "exec"), namespace)
    if name == "README.md":
        check_the_readme(namespace, printed.getvalue())


def check_the_readme(namespace, printed):
    shown, said = (re.sub(r"sequential\w*", "sequential", x) for x in (PAGES["README.md"], printed))
    assert "HEALTHY: loss scale 32768, 0 skipped." in said
    assert "float32_output_dense/kernel" in str(namespace["health"].report)
    table = said[said.index("layer  ") :].splitlines()[:6]  # of to_mixed_precision
    assert all(line in shown for line in table)
    assert "FORWARD: the cast of the inputs of" in said


def test_the_readme_lists_the_verdicts_by_their_numbers():
    """Before Keras 3.12 the progress bar shows a number, which is looked up in the README."""
    assert tuple(re.findall(r"^\| `([A-Z-]+)` \|", PAGES["README.md"], re.MULTILINE)) == STATES


@pytest.mark.parametrize("name, bash", with_blocks("bash"))
def test_commands_exist_with_their_options(name, bash):
    for line in "".join(bash).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        for command in " ".join(words).split(" && "):
            if command:
                check_command(command.split())


def check_command(words):
    """One command of a page, without what stands before it in the environment."""
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {x for x in arguments if "=" not in x} <= set(targets)
    elif program == "pip":
        for extra in re.search(r"\[([\w,]+)\]$", arguments[-1])[1].split(","):
            assert re.search(rf"^{extra} =", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    elif program == "export":
        assert re.fullmatch(r"KERAS_BACKEND=(tensorflow|jax|torch)", arguments[0])
    elif program == "kmp" or arguments[:2] == ["-m", "kmp"]:
        arguments = arguments if program == "kmp" else arguments[2:]
        check_options(arguments[1:], printed_help(arguments[0]))
    elif program == "python" and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1])
        assert all((ROOT / x).exists() for x in arguments[2:])
    elif program == "python":
        check_options(arguments[1:], (ROOT / arguments[0]).read_text())
    else:
        assert importlib.util.find_spec(program), f"unknown command: {program}"


def check_options(arguments, text):
    for option in arguments:
        assert not option.startswith("--") or option.partition("=")[0] in text


def printed_help(command):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["kmp", command, "--help"])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            kmp.__main__.main()
    assert ended.value.code == 0
    return printed.getvalue()


WRONG_COMMANDS = [
    "make everything",
    "pip install kmp[everything]",
    "python -m kmp nothing",
    "nothing at all",
    "python examples/nothing.py",
    "python examples/quickstart.py --nothing",
]


@pytest.mark.parametrize("command", WRONG_COMMANDS)
def test_a_wrong_command_is_found(command, capsys):
    with pytest.raises((AssertionError, TypeError, OSError)):
        check_command(command.split())


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    here = (ROOT / name).parent
    prose = re.sub(r"`[^`\n]*`(?!\])", "", PAGES[name])  # `model.layers[0](x)` is no link
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", prose):
        path = (here / target).resolve()
        assert path.exists(), target


@pytest.mark.parametrize("name", PAGES)
def test_names_exist(name):
    """Every `kmp.something` that a page mentions."""
    for dotted in set(re.findall(r"`(?:[^`\n]*[^\w`.])?kmp((?:\.[a-zA-Z_]+\w*)+)", PAGES[name])):
        value = kmp
        for part in dotted.strip(".").split("."):
            if not hasattr(value, part) and inspect.ismodule(value):
                importlib.import_module(f"{value.__name__}.{part}")
            value = getattr(value, part)


# The site: mkdocs.yml says which pages it has, and docs/reference/ which docstrings


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- .*?: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {name.removeprefix("docs/") for name in PAGES if name.startswith("docs/")}
    pages |= {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert sorted(pages - set(listed)) == [], "write them into nav in mkdocs.yml"
    assert len(listed) == len(set(listed))


def value_of(dotted):
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_the_reference_has_everything_public_once():
    """Docstrings are all of the reference, so a name that a page lists is documented."""
    text = "\n".join(text for name, text in PAGES.items() if name.startswith("docs/reference/"))
    listed = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    public = {
        f"{module.__name__}.{name}"
        for module in (kmp, kmp.layers, kmp.callbacks, kmp.debug, kmp.models)
        for name in module.__all__
        if not inspect.ismodule(getattr(module, name))
    }
    documented = [id(value_of(dotted)) for dotted in listed]
    assert len(set(documented)) == len(documented), "a name stands there twice"
    assert {name for name in public if id(value_of(name)) not in documented} == set()
    assert all(inspect.getdoc(value_of(dotted)) for dotted in listed)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_reference_has_each_command_and_its_options(command):
    page = PAGES["docs/reference/command_line.md"]
    assert f"\n| `kmp {command}` |" in page
    found = re.search(rf"^## kmp {command}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    section = found[1] if found else ""  # a command without options needs none
    options = set(re.findall(r"^ +(?:-h, )?(--[\w-]+)", printed_help(command), re.MULTILINE))
    assert set(re.findall(r"`(--[\w-]+)`", section)) == options - {"--help"}


def test_the_picture_of_the_overview_is_of_what_there_is():
    own = runpy.run_path(str(ROOT / "docs" / "draw_which_tool.py"))
    assert (ROOT / "docs" / "which_tool.svg").read_text(encoding="utf-8") == own["draw"]()
    for seen, tool, _ in (row for row in own["ROWS"] if len(row) == 3):
        for name in re.findall(r"\bkmp\.([\w.]+)", tool):
            operator.attrgetter(name)(kmp)
        assert {word for word in re.findall(r"[A-Z][A-Z-]{5,}", seen)} <= set(STATES)
