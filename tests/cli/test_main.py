"""The command line: what each command answers, how soon, and how it ends."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest
from oracle import BACKEND
from processes import environment

import kmp.__main__
from kmp.cli import options, tasks
from kmp.cli.commands import COMMANDS

# Runs the command line in a new process, as `python -m kmp` does, and then prints what it imported.
MAIN = """
import runpy, sys
sys.orig_argv = [sys.executable, "-m", "kmp"]
sys.argv = ["-m", *sys.argv[1:]]
try:
    runpy.run_module("kmp", run_name="__main__", alter_sys=True)
except SystemExit as end:
    print()
    print([end.code, sorted({"keras", "numpy", "rich", "kmp.scaling"} & set(sys.modules))])
"""


def in_a_new_process(code, *arguments, **variables):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(KERAS_BACKEND=BACKEND, **variables),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_parser_and_the_dispatch_know_the_same_commands():
    (choices,) = (a.choices for a in options.parser("")._actions if isinstance(a.choices, dict))
    assert list(choices) == list(COMMANDS)
    assert tuple(tasks.TASKS) == options.TASKS


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["certify", "--help"], []])
def test_help_and_version_do_not_import_keras(arguments):
    *said, last = in_a_new_process(MAIN, *arguments).strip().splitlines()
    code, imported = ast.literal_eval(last)
    assert imported == [] and code == (0 if arguments else 2)
    if arguments == ["--version"]:
        assert said[0] == f"kmp {kmp.__version__}"


@pytest.mark.only("jax")
def test_a_command_imports_all_of_kmp():
    """A model that a command builds may load a file, for which kmp's classes are registered."""
    *said, last = in_a_new_process(MAIN, "formats").strip().splitlines()
    assert ast.literal_eval(last) == [0, ["keras", "kmp.scaling", "numpy", "rich"]]
    assert any(line.startswith("float16") for line in said)


@pytest.mark.only("jax")
@pytest.mark.parametrize(
    "backend, absent, said",
    [
        ("tensorflow", ["tensorflow"], "Write KERAS_BACKEND=jax python -m kmp formats."),
        ("torch", ["tensorflow", "jax", "torch"], "there is none. Install torch."),
    ],
)
def test_a_backend_that_is_not_installed_is_named_with_one_that_is(backend, absent, said):
    """Keras's default is TensorFlow, and its own error does not name KERAS_BACKEND."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
    done = subprocess.run(
        [sys.executable, "-c", hidden + MAIN, "formats"],
        env=environment(KERAS_BACKEND=backend),
        capture_output=True,
        text=True,
    )
    assert ast.literal_eval(done.stdout.strip())[0] == 2 and "Traceback" not in done.stderr
    assert f"formats: error: Keras's backend is {backend}" in done.stderr and said in done.stderr
    if "Write" in said:  # as it says
        assert "float16" in in_a_new_process(hidden + MAIN, "formats")


@pytest.mark.only("jax")
def test_a_function_of_the_users_sees_all_of_kmp(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import keras, kmp, numpy\n"
        "def build():\n"
        "    model = keras.Sequential([keras.Input((2,)), kmp.layers.Float32OutputDense(1)])\n"
        "    model.compile(kmp.scaled('sgd'), 'mse')\n"
        "    assert not hasattr(kmp, 'nothing')\n"
        "    return model, numpy.ones((4, 2)), numpy.ones((4, 1))\n"
    )
    counts = ["--steps", "1", "--rounds", "2", "--policies", "float32", "mixed_float16"]
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path)])
    said = in_a_new_process(MAIN, "bench", "--model", "mine:build", *counts, PYTHONPATH=path)
    assert "mixed_float16" in said and said.strip().splitlines()[-1].startswith("[0, ")


@pytest.mark.only("jax")
def test_a_process_that_a_command_starts_sees_all_of_kmp():
    """It has the command's `sys.argv`, as a worker that loads batches, but does not run `main`."""
    code = (
        "import sys; sys.argv = ['/usr/bin/kmp', 'bench']\n"
        "import kmp\n"
        "print('keras' in sys.modules, hasattr(kmp, 'nothing'))\n"
        "print(kmp.scaled('sgd').loss_scale == kmp.DynamicLossScale(), hasattr(kmp, 'nothing'))\n"
        "from kmp import callbacks, layers\n"
    )
    assert in_a_new_process(code).split() == ["False", "False", "True", "False"]


@pytest.mark.only("jax")
def test_a_program_that_is_run_as_a_module_imports_all_of_kmp(tmp_path):
    """`python -m program`, which imports kmp while Python still looks for the module to run."""
    package = tmp_path / "program"
    package.mkdir()
    (package / "__init__.py").write_text("import kmp")
    (package / "__main__.py").write_text("import sys; print('kmp.scaling' in sys.modules)")
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-m", "program"],
        env=environment(KERAS_BACKEND=BACKEND, PYTHONPATH=path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    "orig, first, expected",
    [
        (["python", "-m", "kmp", "doctor"], "-m", True),
        (["python", "-X", "dev", "-m", "kmp"], "-m", True),
        (["python", "/usr/bin/kmp"], "/usr/bin/kmp", True),
        (["python", "-m", "pytest", "kmp"], "-m", False),
        (["python", "train.py"], "train.py", False),
        (["python"], "", False),
    ],
)
def test_the_command_is_told_from_other_programs(monkeypatch, orig, first, expected):
    monkeypatch.setattr(sys, "orig_argv", orig)
    monkeypatch.setattr(sys, "argv", [first])
    assert kmp._is_the_command() is expected


def test_the_program_is_called_as_it_was_started(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(pathlib.Path("/usr/bin/kmp"))])
    assert options.parser("").prog == "kmp"
    monkeypatch.setattr(sys, "argv", ["/somewhere/kmp/__main__.py"])
    assert options.parser("").prog == "python -m kmp"


def test_an_unknown_command_is_answered_by_the_known_ones(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kmp", "docter"])
    with pytest.raises(SystemExit) as ended:
        kmp.__main__.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "doctor" in said and "formats" in said
