"""What all rooms share: the table that reports print, and where warnings point."""

import inspect

import keras
import numpy as np
import pytest

import kmp
from kmp._common import table

pytestmark = pytest.mark.any_backend


def test_a_table_is_aligned():
    assert table([["name", "n"], ["a", "10"], ["long name", "1"]]).splitlines() == [
        "name        n",
        "a          10",
        "long name   1",
    ]


def test_a_cell_is_printed_as_it_is():
    """No markup, no emoji, no wrapping; wide characters take two places."""
    cells = [
        ["policy", "speed"],
        ["[bold]a", "[0.9, 1.1]"],
        [":smile:" + "x" * 300, ""],
        ["層", "1"],
    ]
    lines = table(cells).splitlines()
    assert len(lines) == 4 and lines[1].startswith("[bold]a ") and lines[1].endswith("[0.9, 1.1]")
    assert lines[2] == ":smile:" + "x" * 300
    assert len(lines[3]) == len(lines[1]) - 1


def fit_without_scale():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd", loss_scale="none"), "mse")
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)  # here


def fit_with_a_bad_batch():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd"), "mse")
    x = np.full((2, 1), np.nan)
    model.fit(x, x, verbose=0, callbacks=[kmp.callbacks.GradientHealth()])  # here


def apply_without_scale():
    variable = keras.Variable(np.ones(1, "float32"))
    optimizer = kmp.scaled("sgd")
    optimizer.apply([keras.ops.ones((1,))], [variable])  # here


def load_nothing():
    optimizer = kmp.scaled("sgd")
    optimizer.build([keras.Variable(np.ones(1, "float32"))])
    optimizer.load_own_variables({})  # here


@pytest.mark.only("tensorflow", "jax", "torch")
@pytest.mark.parametrize(
    "program", [fit_without_scale, fit_with_a_bad_batch, apply_without_scale, load_nothing]
)
def test_warnings_point_at_the_users_line(program):
    """They pointed into Keras's trainer, on JAX, or into kmp."""
    with pytest.warns(kmp.PrecisionWarning) as caught:
        program()
    lines, first = inspect.getsourcelines(program)
    (here,) = [first + i for i, line in enumerate(lines) if line.endswith("# here\n")]
    ours = [w for w in caught if issubclass(w.category, kmp.PrecisionWarning)]
    assert {(w.filename, w.lineno) for w in ours} == {(__file__, here)}
