"""The house: imports point downwards, backends have one place, examples in docstrings run."""

import ast
import doctest
import importlib
import inspect
import os
import pathlib
import pkgutil
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops
from oracle import BACKEND

import kmp

ROOT = pathlib.Path(kmp.__file__).parent
BACKENDS = ("tensorflow", "jax", "torch")

# From the ground up; a room may import what stands on a lower floor.
FLOORS = [
    ["_backend", "_common", "_keras", "summaries"],
    ["precision", "health", "_calls"],
    ["scaling", "layers"],
    ["models", "callbacks", "debug"],
    ["_api"],
    ["__init__"],
    ["cli"],
    ["__main__"],
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
ROOMS = {name.split("/")[0].removesuffix(".py") for name in SOURCES}


def imported(source):
    """Every absolute name that a source imports, those inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(name):
    """The room of kmp that an imported name belongs to, or None."""
    package, _, rest = f"{name}.".partition(".")
    if package != "kmp":
        return None
    room = rest.split(".")[0]
    return room if room in ROOMS else "__init__"


def upward_imports(room, source):
    targets = {room_of(name) for name in imported(source)} - {None, room}
    return sorted(target for target in targets if FLOOR[target] >= FLOOR[room])


def backend_imports(source):
    return sorted({name.split(".")[0] for name in imported(source)} & set(BACKENDS))


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_imports_point_downwards(name):
    room = name.split("/")[0].removesuffix(".py")
    assert room in FLOOR, f"give {room} a place in FLOORS"
    assert upward_imports(room, SOURCES[name]) == []


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_one_place_names_the_backends(name):
    if not name.startswith("_backend/"):
        assert backend_imports(SOURCES[name]) == []


@pytest.mark.parametrize(
    "room, source, expected",
    [
        ("health", "from kmp.scaling.optimizer import scaled", ["scaling"]),
        ("health", "def f():\n    import kmp.precision", ["precision"]),
        ("precision", "from kmp import health, _backend", ["health"]),
        ("health", "import kmp", ["__init__"]),
        ("scaling", "from kmp import scaled", ["__init__"]),
        ("scaling", "from kmp.health.measure import due", []),
        ("callbacks", "from kmp.callbacks.cadence import Cadence", []),
    ],
)
def test_upward_imports_are_found(room, source, expected):
    assert upward_imports(room, source) == expected


@pytest.mark.parametrize(
    "source, expected",
    [
        ("import jax.numpy as jnp", ["jax"]),
        ("def f():\n    from tensorflow import io\n    import torch", ["tensorflow", "torch"]),
        ("import keras, jaxtyping", []),
    ],
)
def test_backend_imports_are_found(source, expected):
    assert backend_imports(source) == expected


def other_backends_after(statement):
    """Which backends but the present one are loaded in a new process."""
    code = f"{statement}\nimport sys\nprint([x for x in {BACKENDS} if x in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(ast.literal_eval(done.stdout.splitlines()[-1])) - {BACKEND}


def test_importing_kmp_loads_no_other_backend():
    """Whatever Keras itself loads is Keras's business."""
    assert other_backends_after("import kmp") <= other_backends_after("import keras")


@pytest.mark.only("jax")
def test_importing_kmp_on_jax_loads_neither_tensorflow_nor_torch():
    assert other_backends_after("import kmp") == set()


@pytest.mark.only("jax")
def test_a_loaded_backend_would_be_noticed():
    assert other_backends_after("import kmp, torch") == {"torch"}


def public_objects():
    """The public classes and functions of kmp's public modules, by dotted name."""
    for module in pkgutil.walk_packages([str(ROOT)], "kmp."):
        if any(part.startswith("_") for part in module.name.split(".")):
            continue
        loaded = importlib.import_module(module.name)
        for name, value in vars(loaded).items():
            mine = getattr(value, "__module__", None) == module.name
            if mine and not name.startswith("_") and (inspect.isclass(value) or callable(value)):
                yield f"{module.name}.{name}", value


OBJECTS = dict(public_objects())


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_examples_in_docstrings_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may write files
    value = OBJECTS[name]
    module = sys.modules[value.__module__]
    names = {**vars(module), "kmp": kmp, "np": np, "keras": keras, "ops": ops}
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    runner = doctest.DocTestRunner(verbose=False, optionflags=flags)
    report = []
    for test in doctest.DocTestFinder(recurse=True).find(value, name, module, globs=names):
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("name", kmp.__all__)
def test_everything_public_is_documented_by_example(name):
    value = getattr(kmp, name)
    assert inspect.getdoc(value)
    if not inspect.ismodule(value):
        assert ">>> " in inspect.getdoc(value), f"{name} has no example"


def test_all_is_what_is_there():
    assert kmp.__all__ == sorted(kmp.__all__)
    assert [name for name in kmp.__all__ if not hasattr(kmp, name)] == []
