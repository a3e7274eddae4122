"""Gradients in float64, which may be finite and beyond float32 all the same."""

import keras
import numpy as np
import pytest
from keras import ops
from oracle import BACKEND, MODES, Run, few, number

import kmp


@pytest.fixture(autouse=True)
def float64():
    """JAX has it only if it is asked to."""
    if BACKEND != "jax":
        yield
        return
    import jax

    named_since_0_8 = hasattr(jax, "enable_x64")
    with (jax if named_since_0_8 else jax.experimental).enable_x64(True):
        yield


@pytest.mark.parametrize("size", [2, 5000], ids=["small", "large"])
@pytest.mark.parametrize("rule", ["dynamic", kmp.AmaxLossScale()], ids=["dynamic", "amax"])
@pytest.mark.parametrize("mode", few(MODES, "graph", "jit"))
def test_a_finite_gradient_beyond_float32_is_applied(mode, rule, size):
    """In float32 it is inf: it was skipped where its levels are measured with the check."""
    variable = keras.Variable(np.ones(size), dtype="float64", name="kernel")
    run = Run(kmp.scaled("sgd", rule, learning_rate=1.0), mode, [variable])
    run.step([np.full(size, 1e200)])
    assert number(run.optimizer.skipped_steps) == 0
    np.testing.assert_array_equal(ops.convert_to_numpy(variable.value), 1 - 1e200)
    run.step([np.full(size, np.inf)])
    assert number(run.optimizer.skipped_steps) == 1


def test_the_largest_of_them():
    assert number(kmp.max_abs([np.array([1e200, np.nan])])) == np.inf
    assert number(kmp.max_abs([np.array([2.0, np.inf])])) == 2
