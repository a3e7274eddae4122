"""Keras's float8 training under kmp.scaled: its scales are state, and no gradients."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import kmp

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(16, 2)).astype("float32")
STATE = ("inputs", "kernel", "outputs_grad")  # each with a scale and an amax history


def train(policy, scale, jit="auto"):
    """Six steps of two float8 layers with short histories."""
    keras.utils.set_random_seed(0)
    float8 = keras.dtype_policies.QuantizedFloat8DTypePolicy("float8", policy, 3)
    model = keras.Sequential([keras.Input((4,))])
    model.add(layers.Dense(3, "relu", dtype=float8))  # a bias as long as a history
    model.add(layers.Dense(2, dtype=float8))
    model.compile(kmp.scaled("adam", scale, learning_rate=0.01), "mse", jit_compile=jit)
    model.optimizer.build(model.trainable_variables)
    model.optimizer.sample_gradients(1)
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0)
    return model


@pytest.fixture(scope="module", params=["float32", "mixed_bfloat16"])
def models(request):
    return [train(request.param, scale) for scale in (1.0, 2.0**10)]


def values(variables):
    return [ops.convert_to_numpy(v).copy() for v in variables]


def test_a_power_of_two_scale_is_invisible_to_float8(models):
    """Only what float8 knows of the scaled gradients is larger, by the scale: nothing divides it.

    Exact in the first step too, in which Keras's scales are still 1: the gradients are normal
    numbers of float8 (e5m2: from 2**-14 to 57344) with either scale.
    """
    plain, scaled = (model.trainable_variables for model in models)
    assert len(plain) == 2 * (2 + 2 * len(STATE))
    for a, b in zip(plain, scaled, strict=True):
        factor = 2.0**10 if a.name.startswith("outputs_grad") else 1.0
        assert ops.convert_to_numpy(a).any(), "it has learned nothing"
        np.testing.assert_array_equal(ops.convert_to_numpy(a) * factor, ops.convert_to_numpy(b))


def test_scales_are_in_no_measurement(models):
    """They arrive in the place of gradients, as numbers of another size and meaning."""
    report = models[1].optimizer.gradient_report()
    replaced = [path for path in report.paths if path.endswith(("scale", "amax_history"))]
    assert len(replaced) == 12
    norms = report.column("l2_norm")
    assert not any(norms[path] for path in replaced)
    assert {path.split("/")[-1] for path in report.update_ratio} == {"kernel", "bias"}
    unscaled = models[0].optimizer.gradient_report().column("l2_norm")
    assert list(norms.values()) == list(unscaled.values())  # a power of two changes no bit
    true = [norm for path, norm in norms.items() if path not in replaced]
    assert report.grad_norm == pytest.approx(np.linalg.norm(true), rel=1e-5)


@pytest.mark.parametrize("bad", ["nan_input", "overflow"])
def test_a_skipped_step_leaves_float8_as_it_was(models, bad):
    """float8 clips an overflowing gradient to a finite one: only its history tells of it."""
    model = models[1]
    inner = model.optimizer.inner_optimizer.variables
    before = values([*model.trainable_variables, *inner])
    skipped = int(model.optimizer.skipped_steps)
    x, y = (X.copy(), Y) if bad == "nan_input" else (X, Y * 1e37)
    x[0, 0] = np.nan if bad == "nan_input" else x[0, 0]
    model.fit(x, y, batch_size=16, verbose=0)
    assert int(model.optimizer.skipped_steps) == skipped + 1
    after = values([*model.trainable_variables, *inner])
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    model.fit(X, Y, batch_size=16, verbose=0)
    after = values(model.trainable_variables)
    assert not any(np.array_equal(a, b) for a, b in zip(before, after, strict=False) if a.ndim)


@pytest.mark.only("tensorflow", "jax")
def test_float8_trains_in_mixed_float16_from_a_scale_that_is_too_high():
    """The first steps overflow float16, are skipped, and leave no trace in any history."""
    model = train("mixed_float16", kmp.DynamicLossScale(2.0**20))
    assert int(model.optimizer.skipped_steps) > 0
    assert all(np.isfinite(v).all() for v in values(model.variables))
    assert int(model.optimizer.iterations) + int(model.optimizer.skipped_steps) == 6
