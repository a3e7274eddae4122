"""Examples in docstrings run, and everything public has one."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import sys

import keras
import numpy as np
import pytest
from keras import ops
from oracle import few

import kmp

ROOT = pathlib.Path(kmp.__file__).parent


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


TRAIN_FOR_SECONDS = {
    "kmp.callbacks.learning_rate_finder.LearningRateFinder",
    "kmp.cli.bench.bench",
    "kmp.cli.certify.certify",
    "kmp.models.quantization.quantize_aware",
    "kmp.models.quantization.to_int8",
}


@pytest.mark.parametrize("name", few(sorted(OBJECTS), *sorted(OBJECTS.keys() - TRAIN_FOR_SECONDS)))
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


@pytest.mark.parametrize("name", sorted(set(kmp.__all__) - {"__version__"}))
def test_everything_public_is_documented_by_example(name):
    value = getattr(kmp, name)
    assert inspect.getdoc(value)
    if not inspect.ismodule(value):
        assert ">>> " in inspect.getdoc(value), f"{name} has no example"


def test_all_is_what_is_there():
    assert kmp.__all__ == sorted(kmp.__all__)
    assert [name for name in kmp.__all__ if not hasattr(kmp, name)] == []
