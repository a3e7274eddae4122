"""What is kept for the backward pass, counted: the inputs of the blocks in place of the rest."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import kmp

WIDTH, ROWS, BLOCKS = 16, 64, 4


def build_model(policy, recomputed):
    keras.config.set_dtype_policy(policy)
    blocks = [
        keras.Sequential(
            [layers.LayerNormalization(), layers.Dense(4 * WIDTH, "gelu"), layers.Dense(WIDTH)]
        )
        for _ in range(BLOCKS)
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *blocks])
    if recomputed:
        kmp.recompute(model)
    return model, np.ones((ROWS, WIDTH), "float32")


def kept_on_torch(model, x):
    import torch

    kept, weights = {}, {v.value.data_ptr() for v in model.variables}

    def pack(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(ops.convert_to_tensor(x), training=True)
    assert outputs.requires_grad
    return sum(kept.values())


def kept_on_jax(model, x):
    """XLA's count of what the forward pass hands to the backward pass, without the weights."""
    import jax

    def forward(values):
        return jax.vjp(lambda v: model.stateless_call(v, [], x, training=True)[0], values)[1]

    values = [v.value for v in model.trainable_variables]
    compiled = jax.jit(forward).lower(values).compile()
    return compiled.memory_analysis().output_size_in_bytes - sum(v.nbytes for v in values)


@pytest.mark.only("torch", "jax")
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_block_keeps_its_input_alone(policy):
    kept_by = {"torch": kept_on_torch, "jax": kept_on_jax}[keras.backend.backend()]
    without, kept = (kept_by(*build_model(policy, x)) for x in (False, True))
    inputs = BLOCKS * ROWS * WIDTH * (4 if policy == "float32" else 2)
    assert kept < 2 * inputs
    assert without > 5 * kept
