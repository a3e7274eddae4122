"""What Keras itself cannot do in mixed precision: docs/limits.md says so until these tests fail."""

import keras
import numpy as np
import pytest
from keras import layers

import kmp

pytestmark = pytest.mark.slow


def train_with_remat():
    keras.config.set_dtype_policy("mixed_bfloat16")
    with keras.RematScope(mode="full"):
        stack = [keras.Input((4,)), layers.Dense(4), layers.Dense(2, dtype="float32")]
        model = keras.Sequential(stack)
    model.compile("sgd", "mse")
    return model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0).history["loss"]


@pytest.mark.only("tensorflow", "torch")
def test_keras_still_cannot_fit_in_a_remat_scope():
    """keras#21448. On TensorFlow in float32 too; on PyTorch the weights are recomputed in it."""
    with pytest.raises(Exception, match=r"custom_gradient decorator|different metadata"):
        train_with_remat()


@pytest.mark.only("jax")
def test_a_remat_scope_works_on_jax():
    assert np.isfinite(train_with_remat()).all()


@pytest.mark.only("torch")
def test_keras_still_leaves_torch_modules_in_float32():
    """keras#20726. A conversion says so, and converts once the wrapper is excluded."""
    import torch

    wrapper = layers.TorchModuleWrapper(torch.nn.Linear(4, 4), name="wrapper")
    model = keras.Sequential([keras.Input((4,)), wrapper, layers.Dense(4), layers.Dense(2)])
    with pytest.raises(ValueError, match="cannot be called in mixed_bfloat16"):
        kmp.to_mixed_precision(model, "mixed_bfloat16")
    kmp.to_mixed_precision(model, "mixed_bfloat16", lambda layer, path: layer is not wrapper)
    assert [x.compute_dtype for x in model.layers] == ["float32", "bfloat16", "float32"]
