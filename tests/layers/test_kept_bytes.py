"""What Float32BatchNormalization keeps for its backward pass: its inputs once, in half."""

import keras
import numpy as np
import pytest
from keras import ops

from kmp.layers import Float32BatchNormalization

SHAPE = (64, 4, 4, 8)


def _jax(layer, x, kwargs):
    import jax

    trainable, others = (
        [v.value for v in each]
        for each in (layer.trainable_variables, layer.non_trainable_variables)
    )

    def output(trainable, x):
        return layer.stateless_call(trainable, others, x, training=True, **kwargs)[0]

    _, pull_back = jax.vjp(output, trainable, x)
    kept = {id(leaf): leaf for leaf in jax.tree_util.tree_leaves(pull_back)}
    return sum(leaf.nbytes for leaf in kept.values() if hasattr(leaf, "nbytes"))


def _tensorflow(layer, x, kwargs):
    """The tensors that the operations of the backward pass read from the forward pass."""
    import tensorflow as tf

    kept = {}

    @tf.function
    def both_passes(x, kwargs):
        graph = x.graph
        y = layer(x, training=True, **kwargs)
        forward = set(graph.get_operations())
        tf.gradients(y, [x, *(v.value for v in layer.trainable_variables)], tf.ones_like(y))
        for operation in set(graph.get_operations()) - forward:
            for tensor in operation.inputs:
                while tensor.op.type in ("Identity", "IdentityN"):
                    tensor = tensor.op.inputs[tensor.value_index]
                if tensor.op in forward:
                    kept[id(tensor)] = tensor

    both_passes.get_concrete_function(x, kwargs)
    # The size of the fused kernel's last output is unknown here; on CPUs it is empty.
    return sum((t.shape.num_elements() or 0) * t.dtype.size for t in kept.values())


def _torch(layer, x, kwargs):
    import torch

    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor
        return tensor

    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, training=True, **kwargs)
    return sum(t.nbytes for t in kept.values())


def kept_share(layer, half, **kwargs):
    """Bytes kept for the backward pass, as a share of the bytes of the inputs."""
    layer.build(SHAPE)
    x = ops.cast(np.random.default_rng(0).normal(size=SHAPE), half)
    count = {"jax": _jax, "tensorflow": _tensorflow, "torch": _torch}[keras.backend.backend()]
    kept = count(layer, x, kwargs)
    return kept / (np.prod(SHAPE) * 2)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
# TensorFlow: by its fused kernel, and without.
@pytest.mark.parametrize(
    "epsilon", [1e-3, pytest.param(1e-6, marks=pytest.mark.only("tensorflow"))]
)
def test_inputs_are_kept_once_in_half(epsilon, half, axis):
    layer = Float32BatchNormalization(axis=axis, epsilon=epsilon, dtype=f"mixed_{half}")
    assert 1.0 <= kept_share(layer, half) <= 1.05


def test_a_mask_is_kept_as_it_came():
    layer = Float32BatchNormalization(dtype="mixed_float16")
    mask = np.random.default_rng(0).random(SHAPE[:-1]) < 0.5
    # One byte for each eight channels of two bytes.
    assert kept_share(layer, "float16", mask=ops.convert_to_tensor(mask)) <= 1.05 + 1 / 16


def test_keras_still_keeps_several_times_as_much():
    """Else what is counted above is not what is kept."""
    layer = keras.layers.BatchNormalization(dtype="mixed_float16")
    share = {"tensorflow": 2, "jax": 4, "torch": 4}[keras.backend.backend()]
    assert kept_share(layer, "float16") >= share
