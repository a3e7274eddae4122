"""Gradients of biases that TensorFlow adds up in bfloat16 on CPUs, without XLA.

The oracle is the number of positions, each of which adds 1 to the gradient.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

import kmp
from kmp._keras import path_of

TENSORFLOW = keras.backend.backend() == "tensorflow"
POSITIONS = 4096
SHAPES = {"dense": (32, 128, 2), "convolution": (64, 64, 2)}


def compiled(name, policy, jit):
    keras.config.set_dtype_policy(policy)
    kind = {"dense": layers.Dense, "convolution": layers.Conv2D}[name]
    sizes = {"kernel_size": 1} if name == "convolution" else {}
    model = keras.Sequential(
        [
            keras.Input(SHAPES[name]),
            kind(2, **sizes),
            kind(2, kernel_initializer="zeros", **sizes),
            layers.Activation("linear", dtype="float32"),
        ]
    )
    optimizer = kmp.scaled("sgd", kmp.DynamicLossScale(initial_scale=1.0), learning_rate=1.0)
    model.compile(optimizer, lambda _, y: ops.sum(y), jit_compile=jit)
    return model


def moved(model):
    x = np.zeros((1, *model.input_shape[1:]), "float32")
    watch = [kmp.callbacks.TerminateOnNaN()]
    model.fit(x, np.zeros((1, 1)), verbose=0, callbacks=watch)
    return float(-ops.convert_to_numpy(model.layers[1].bias)[0])


def found_in(model):
    return kmp.audit(model).of_kind("half gradient")


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float32"])
@pytest.mark.parametrize("jit", ["auto", False, True] if TENSORFLOW else ["auto"])
@pytest.mark.parametrize("name", SHAPES)
def test_it_is_found_where_positions_are_lost(name, jit, policy):
    model = compiled(name, policy, jit)
    found = found_in(model)
    got = moved(model)
    if found:
        assert got < POSITIONS / 8
    else:
        assert abs(got / POSITIONS - 1) < 0.01
    is_wrong = name == "dense" and policy == "mixed_bfloat16" and jit is not True
    assert bool(found) == (TENSORFLOW and is_wrong)


@pytest.mark.only("tensorflow")
def test_one_finding_says_it_of_all_layers():
    model = compiled("dense", "mixed_bfloat16", "auto")
    (found,) = found_in(model)
    assert found == (
        path_of(model.layers[0]),
        "half gradient",
        "without XLA this machine adds up the gradient of its bias, as of 1 more, in bfloat16, "
        "where a sum of ones stalls at 256.",
        "Compile with jit_compile=True, or train in float32 on this machine.",
    )
    model.layers[0].trainable = False
    (found,) = found_in(model)
    assert found.path == path_of(model.layers[1]) and "gradient of its bias in" in found.problem


@pytest.mark.only("tensorflow")
def test_models_without_biases_or_a_loss_are_none():
    model = compiled("dense", "mixed_bfloat16", "auto")
    assert not found_in(keras.Sequential([keras.Input(SHAPES["dense"]), *model.layers]))
    for layer in model.layers[:2]:
        layer.bias = None
    assert not found_in(model)
