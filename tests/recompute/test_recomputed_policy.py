"""`policy=`: what a block keeps although it is computed again."""

import keras
import numpy as np
import pytest
from flat_models import residual
from keras import layers, ops
from oracle import BACKEND
from recomputed_models import ROWS, assert_same, build_model, data, loss, state

import kmp
from kmp._keras.blocks import policy_in

flat = pytest.mark.any_backend


def stack():
    blocks = [keras.Sequential([layers.Dense(8, "gelu"), layers.Dense(8)]) for _ in range(3)]
    return keras.Sequential([keras.Input((8,)), *blocks, layers.Dense(1)])


def products(model):
    """How much a step multiplies: operations on torch, products of matrices on JAX."""
    x = np.ones((4, 8), "float32")
    if BACKEND == "torch":
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            ops.sum(model(ops.convert_to_tensor(x), training=True)).backward()
        return counter.get_total_flops()
    import jax

    def value(weights):
        return ops.sum(model.stateless_call(weights, [], x, training=True)[0])

    weights = [v.value for v in model.trainable_variables]
    return str(jax.make_jaxpr(jax.grad(value))(weights)).count("dot_general[")


@pytest.mark.only("torch", "jax")
def test_products_that_are_kept_are_not_computed_again():
    model = stack()
    plain = products(model)
    kmp.recompute(model)
    assert products(model) > plain
    kmp.recompute(model, policy="dots_saveable")
    assert products(model) == plain
    kmp.recompute(model, segments=3, policy="dots_saveable")
    assert products(model) == plain


@pytest.mark.only("torch", "jax")
@pytest.mark.parametrize("make", [build_model, residual])
def test_a_run_with_a_policy_is_that_without_it(make):
    def run(recomputed):
        keras.utils.set_random_seed(0)
        model = make()
        if recomputed:
            kmp.recompute(model, policy="dots_saveable")
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss(), jit_compile=BACKEND == "jax")
        x, y = data()
        if make is residual:
            x = np.random.default_rng(0).normal(size=(len(y), 8, 8, 3)).astype("float32")
        model.fit(x[: 3 * ROWS], y[: 3 * ROWS], batch_size=ROWS, shuffle=False, verbose=0)
        return state(model)

    assert_same(run(False), run(True), 1e-6 if BACKEND == "jax" else 0)


@pytest.mark.only("torch", "jax")
def test_a_backend_takes_its_own_policies():
    if BACKEND == "jax":
        import jax

        own = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        names = ["dots_with_no_batch_dims_saveable", "nothing_saveable"]
    else:
        import torch

        own, names = [torch.ops.aten.mm.default], []
    model = stack()
    for policy in (own, *names):
        kmp.recompute(model, policy=policy)
        assert policy_in(model) is not None
        products(model)
    with pytest.raises(ValueError, match='Write policy="dots_saveable"'):
        kmp.recompute(model, policy="dots")
    kmp.recompute(model)
    assert policy_in(model) is None


@pytest.mark.only("tensorflow")
def test_tensorflow_has_no_policies():
    with pytest.raises(ValueError, match="needs JAX or PyTorch"):
        kmp.recompute(stack(), policy="dots_saveable")
