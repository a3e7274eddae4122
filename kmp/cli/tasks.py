"""The built-in tasks of `certify`: small enough for any machine, on data that come with a package.

Their margins and seeds were chosen before any half precision was tried on them.
"""

import ast
import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from kmp.cli.architectures import cnn, cross_entropy, mlp, transformer

# Makes the optimizer from the first learning rate and the number of samples.
Adam = Callable[[float, int], Any]

# Modules of the standard library with long docstrings: text that every machine has.
_MODULES = (
    *("argparse", "collections", "configparser", "contextlib", "datetime", "decimal", "difflib"),
    *("doctest", "functools", "inspect", "ipaddress", "logging", "optparse", "pathlib", "pdb"),
    *("random", "re", "shutil", "statistics", "string", "subprocess", "tarfile", "turtle"),
)


@dataclasses.dataclass(frozen=True)
class Task:
    """What to train, and how equal is equal enough.

    Attributes:
        name: str.
        build: takes a seed and returns (model, train, test): a compiled Keras model, and two pairs
            (x, y) of arrays.
        metric: str, a key of `model.evaluate(..., return_dict=True)`.
        margin: float, the largest difference of the metric that does not matter.
        relative: bool, whether the margin is a share of float32's metric.
        epochs: int.
        batch_size: int.
        seeds: int, how many runs of each policy.
    """

    name: str
    build: Callable[[int], tuple[Any, tuple, tuple]]
    metric: str
    margin: float
    relative: bool
    epochs: int
    batch_size: int
    seeds: int = 5

    @property
    def stated_margin(self) -> str:
        """The margin in words."""
        return f"{self.margin:.2%} of float32's" if self.relative else f"{self.margin:g}"


def _digits(seed: int, adam: Adam) -> tuple[Any, tuple, tuple]:
    data = _dataset("load_digits")
    images = (data.images[..., None] / 16).astype("float32")
    train, test = _split(images, data.target, seed)
    model = cnn((8, 8, 1), [32, 64], 10)
    model.compile(adam(2e-3, len(train[0])), cross_entropy(), metrics=["accuracy"])
    return model, train, test


def _breast_cancer(seed: int, adam: Adam) -> tuple[Any, tuple, tuple]:
    data = _dataset("load_breast_cancer")
    (x, y), (x_test, y_test) = _split(data.data, data.target[:, None], seed)
    x, x_test = _standardized(x, x_test)
    model = mlp(30, [32, 32], 1)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    accuracy = keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)  # of logits
    model.compile(adam(2e-3, len(x)), loss, metrics=[accuracy])
    return model, (x, y), (x_test, y_test)


def _diabetes(seed: int, adam: Adam) -> tuple[Any, tuple, tuple]:
    data = _dataset("load_diabetes")
    (x, y), (x_test, y_test) = _split(data.data, data.target[:, None], seed)
    x, x_test = _standardized(x, x_test)
    y, y_test = _standardized(y, y_test)
    model = mlp(10, [32, 32], 1)
    rmse = keras.metrics.RootMeanSquaredError(name="rmse")
    model.compile(adam(1e-3, len(x)), "mse", metrics=[rmse])
    return model, (x, y), (x_test, y_test)


def _text(seed: int, adam: Adam) -> tuple[Any, tuple, tuple]:
    context = 32
    codes = np.frombuffer(_docstrings().encode("ascii", "replace"), "uint8") % 128
    rows = codes[: len(codes) // (context + 1) * (context + 1)].reshape(-1, context + 1)
    rows = np.random.default_rng(seed).permutation(rows)[:2048].astype("int32")
    train, test = rows[:1536], rows[1536:]
    model = transformer(128, context, 32, 2)
    model.compile(adam(5e-3, len(train)), cross_entropy())
    return model, (train[:, :-1], train[:, 1:]), (test[:, :-1], test[:, 1:])


def _denoising(seed: int, adam: Adam) -> tuple[Any, tuple, tuple]:
    images = (_dataset("load_digits").data / 16).astype("float32")
    noisy = images + np.random.default_rng(seed).normal(0, 0.3, images.shape).astype("float32")
    train, test = _split(noisy, images, seed)
    model = mlp(64, [128, 32, 128], 64)
    model.compile(adam(2e-3, len(train[0])), "mse")
    return model, train, test


def _task(name, build, metric, margin, relative, epochs, batch_size, seeds) -> Task:
    """A task with Adam, whose learning rate decays to zero over the steps of the task."""

    def adam(rate: float, samples: int) -> keras.optimizers.Optimizer:
        steps = -(-samples // batch_size) * epochs
        return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, steps))

    build = functools.partial(build, adam=adam)
    return Task(name, build, metric, margin, relative, epochs, batch_size, seeds)


TASKS = {
    task.name: task
    for task in (
        _task("digits", _digits, "accuracy", 0.01, False, 12, 64, 10),
        _task("breast_cancer", _breast_cancer, "accuracy", 0.01, False, 40, 32, 10),
        _task("diabetes", _diabetes, "rmse", 0.02, True, 30, 32, 10),
        _task("text", _text, "loss", 0.02, True, 8, 32, 5),
        _task("denoising", _denoising, "loss", 0.02, True, 30, 32, 10),
    )
}


def _dataset(name: str) -> Any:
    try:
        return getattr(importlib.import_module("sklearn.datasets"), name)()
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "This task's data ship with scikit-learn, which is not installed. Write "
            "pip install 'kmp[examples]', or choose the task text."
        ) from error


def _docstrings() -> str:
    """The docstrings of `_MODULES` and of what they define: about 340,000 characters.

    They are read from the sources, since not every machine can import all of them: turtle needs Tk.
    """
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = []
    for name in _MODULES:
        spec: Any = importlib.util.find_spec(name)
        nodes = ast.walk(ast.parse(spec.loader.get_source(name)))
        texts += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
    return "\n\n".join(dict.fromkeys(texts))


def _split(x: np.ndarray, y: np.ndarray, seed: int) -> tuple[tuple, tuple]:
    """Two random halves: small differences can only be seen in a large test set."""
    order = np.random.default_rng(seed).permutation(len(x))
    train, test = order[: len(x) // 2], order[len(x) // 2 :]
    return (x[train], y[train]), (x[test], y[test])


def _standardized(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both arrays, shifted and scaled by the mean and standard deviation of `train`."""
    mean, spread = train.mean(axis=0), train.std(axis=0)
    return tuple(((x - mean) / spread).astype("float32") for x in (train, test))
