"""A run whose blocks are computed again ends in the weights and states of the run without that."""

import os

import keras
import numpy as np
import pytest
from oracle import BACKEND, number
from recomputed_models import ROWS, STEPS, assert_same, build_model, data, loss, state

import kmp

MODES = {
    "tensorflow": [
        "graph",
        pytest.param("eager", marks=pytest.mark.wide),
        pytest.param("xla", marks=[pytest.mark.wide, pytest.mark.slow]),
    ],
    "jax": ["jit"],
    "torch": ["eager"],
}[BACKEND]
# XLA compiles two other programs, and rounds in other places.
# In float32 each step may round a gradient, a momentum and a weight apart.
TOLERANCES = {"float32": 3 * STEPS * 2**-23, "mixed_float16": 1e-4, "mixed_bfloat16": 2e-3}
POLICIES = [
    pytest.param("float32", marks=pytest.mark.wide),
    pytest.param("mixed_bfloat16", marks=pytest.mark.wide),
    "mixed_float16",
]


def steps_of(policy, mode):
    """One in bfloat16 if XLA does not optimize: it rounds the programs apart, and steps add up."""
    apart = mode == "jit" and "optimization_level=0" in os.environ.get("XLA_FLAGS", "")
    return 1 if apart and policy == "mixed_bfloat16" else STEPS


def train(policy, mode, recomputed, optimizer):
    model = build_model(policy)
    if recomputed:
        assert kmp.recompute(model).paths == ("block0", "block1")
    compiled = mode in ("jit", "xla")
    model.compile(optimizer, loss(), run_eagerly=mode == "eager", jit_compile=compiled)
    x, y = (each[: steps_of(policy, mode) * ROWS] for each in data())
    history = model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0).history
    return model, history["loss"]


def compare(policy, mode, optimizer):
    """Train with and without; return the model with."""
    plain, plain_losses = train(policy, mode, False, optimizer())
    model, losses = train(policy, mode, True, optimizer())
    tolerance = TOLERANCES[policy] if mode in ("jit", "xla") else 0
    assert_same(state(plain), state(model), tolerance)
    np.testing.assert_allclose(losses, plain_losses, rtol=tolerance, atol=0)
    assert number(model.get_layer("block0").calls) == steps_of(policy, mode)
    return model


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_run_is_that_without_it(policy, mode):
    """Weights, statistics, seeds, losses, skipped steps and the loss scale."""

    def optimizer():
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        return kmp.scaled(sgd, kmp.DynamicLossScale(2.0**17)) if policy == "mixed_float16" else sgd

    model = compare(policy, mode, optimizer)
    if policy == "mixed_float16":
        assert 0 < number(model.optimizer.skipped_steps) < STEPS


@pytest.mark.wide
@pytest.mark.parametrize("mode", MODES[:1])
@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_with_the_rest_of_kmp(policy, mode):
    """Accumulation and `protect`; weights and slots in half precision."""

    def optimizer():
        adam = keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2)
        memory = {"slot_dtype": "bfloat16", "master_weights": True} if policy == "bfloat16" else {}
        return kmp.scaled(adam, kmp.DynamicLossScale(2.0**8), **memory)

    def run(recomputed):
        model = build_model(policy)
        if recomputed:
            kmp.recompute(model)
        model.compile(optimizer(), loss(), jit_compile=mode == "jit")
        with kmp.protect(model):
            x, y = data()
            watch = kmp.callbacks.GradientHealth(update_freq=2, verbose=0)
            model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[watch])
        return state(model)

    tolerance = {"bfloat16": 2e-2, "mixed_float16": 1e-3}[policy] if mode == "jit" else 0
    assert_same(run(False), run(True), tolerance)


@pytest.fixture
def split_over_devices():
    """The batch over two rows of devices, the blocks' kernels over two columns."""
    distribution = keras.distribution
    devices = distribution.list_devices("cpu")[:4]
    layout = distribution.LayoutMap(distribution.DeviceMesh((2, 2), ["data", "model"], devices))
    layout["block.*kernel"] = (None, "model")
    distribution.set_distribution(
        distribution.ModelParallel(layout_map=layout, batch_dim_name="data")
    )
    yield
    distribution.set_distribution(None)


@pytest.mark.only("jax")
@pytest.mark.slow
def test_a_model_that_is_split_over_devices(split_over_devices):
    model = compare("float32", "jit", lambda: keras.optimizers.SGD(0.1, momentum=0.9))
    kernel = model.get_layer("block0").up.kernel
    assert not kernel.value.sharding.is_fully_replicated
