"""Loops of one's own: the backward pass runs outside of what the forward pass ran in."""

import keras
import numpy as np
import pytest
from keras import ops
from recomputed_models import ROWS, assert_same, build_model, data, loss, state

import kmp

pytestmark = pytest.mark.only("tensorflow", "torch")


def gradients_of(model, optimizer, scope):
    """The forward pass inside `scope`, and the backward pass after it."""
    x, y = (ops.convert_to_tensor(each[:ROWS]) for each in data())
    variables = model.trainable_variables

    def scaled_loss():
        with scope():
            outputs = model(x, training=True)
        return optimizer.scale_loss(loss()(y, outputs) + sum(model.losses))

    if keras.backend.backend() == "torch":
        model.zero_grad()
        scaled_loss().backward()
        return [v.value.grad for v in variables]
    import tensorflow as tf

    with tf.GradientTape() as tape:
        scaled = scaled_loss()
    return tape.gradient(scaled, [v.value for v in variables])


@pytest.mark.parametrize("policy", ["autocast", "mixed_bfloat16"])
def test_the_backward_pass_computes_as_the_forward_pass_did(policy):
    """In a `kmp.autocast` that is closed by then, too."""

    def train(recomputed):
        model = build_model(kmp.Policy(policy))
        if recomputed:
            kmp.recompute(model)
        optimizer = kmp.scaled(keras.optimizers.Adam(1e-2), kmp.StaticLossScale(1024.0))
        optimizer.build(model.trainable_variables)
        for _ in range(2):
            gradients = gradients_of(model, optimizer, lambda: kmp.autocast("mixed_bfloat16"))
            with np.errstate(all="ignore"):
                optimizer.apply(gradients, model.trainable_variables)
        model.optimizer = optimizer
        return state(model)

    assert_same(train(False), train(True))


@pytest.mark.only("torch")
def test_other_threads_compute_as_the_forward_pass_did():
    """On CUDA PyTorch runs the backward pass in a thread that has none of Keras's scopes."""
    import threading

    def gradients(in_thread):
        model = build_model("mixed_bfloat16")
        kmp.recompute(model)
        x, y = (ops.convert_to_tensor(each[:ROWS]) for each in data())
        backward = loss()(y, model(x, training=True)).backward
        if in_thread:
            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
        else:
            backward()
        return [(v.path, v.value.grad.numpy()) for v in model.trainable_variables]

    assert_same(gradients(False), gradients(True))
