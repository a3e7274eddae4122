"""Recurrent layers whose gradients stop growing: they are found, and left in float32.

The oracle is the gradient in float32.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops
from oracle import BACKEND

import kmp
from kmp._backend import backend
from kmp._keras import path_of
from kmp.models.recurrence import adds_up_steps

STEPS = 1024
# On TensorFlow no gradient is added up one step after the other; on JAX an LSTM casts in each step.
STALL = {"tensorflow": [], "jax": [layers.GRU], "torch": [layers.GRU, layers.LSTM]}[BACKEND]
stalls = pytest.mark.skipif(not STALL, reason="TensorFlow adds up all steps at once")


def of_steps(kind, steps=STEPS, policy="mixed_bfloat16", **arguments):
    keras.config.set_dtype_policy(policy)
    x = keras.Input((steps, 4))
    outputs = kind(4, **{"return_sequences": True, **arguments})(x)
    outputs = layers.GlobalAveragePooling1D()(outputs) if len(outputs.shape) > 2 else outputs
    model = keras.Model(x, layers.Dense(1, kernel_initializer="ones", dtype="float32")(outputs))
    for v in model.layers[1].trainable_variables:
        v.assign(np.full(v.shape, 0.4 / v.shape[0] if len(v.shape) > 1 else 0.1, "float32"))
    return model


def found_in(model):
    return kmp.audit(model).of_kind("half gradient")


def gradients(model):
    x = np.random.default_rng(1).uniform(0.5, 1, (1, STEPS, 4)).astype("float32")
    weights = model.layers[1].trainable_variables
    _, found = backend.gradients(lambda: ops.sum(model(ops.convert_to_tensor(x))), weights)
    return [ops.convert_to_numpy(each) for each in found]


def error(model, exact):
    pairs = zip(gradients(model), exact, strict=True)
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)


@pytest.mark.parametrize("kind", [layers.GRU, layers.LSTM])
def test_those_are_found_whose_gradients_stall(kind):
    model = of_steps(kind)
    exact = gradients(of_steps(kind, policy="float32"))
    assert (error(model, exact) > 0.3) == bool(found_in(model)) == (kind in STALL)
    if kind in STALL:
        other_code = of_steps(kind, use_cudnn=False)
        assert error(other_code, exact) < 0.03 and not found_in(other_code)


@stalls
@pytest.mark.parametrize("kind", STALL)
def test_the_finding_says_what_to_write(kind):
    model = of_steps(kind, policy="mixed_float16", steps=None)
    (found,) = found_in(model)
    assert found == (
        path_of(model.layers[1]),
        "half gradient",
        f"Keras's code for {kind.__name__} adds up the gradients of its steps in float16, where a "
        "sum of ones stalls at 2048.",
        'Write use_cudnn=False, or give the layer dtype="float32".',
    )
    for mended in (of_steps(kind, use_cudnn=False), of_steps(kind, dtype="float32")):
        assert not found_in(mended)
        assert error(mended, gradients(of_steps(kind, policy="float32"))) < 0.03


@stalls
@pytest.mark.parametrize("kind", STALL)
def test_a_conversion_leaves_them_in_float32(kind):
    model = of_steps(kind, policy="float32")
    exact = gradients(model)
    report = kmp.to_mixed_precision(model, "mixed_bfloat16")
    (row,) = [each for each in report.rows if each.layer == kind.__name__]
    assert row.reason == "would add up the gradients of many steps in half precision"
    assert not found_in(model) and error(model, exact) < 0.03


@stalls
def test_few_steps_and_last_outputs_are_none():
    kind = STALL[0]
    assert not found_in(of_steps(kind, 256)) and found_in(of_steps(kind, 257))
    assert not found_in(of_steps(kind, 2048, "mixed_float16"))
    assert not found_in(of_steps(kind, return_sequences=False))
    frozen = of_steps(kind)
    frozen.layers[1].trainable = False
    assert not found_in(frozen)


@stalls
def test_both_directions_are_found():
    keras.config.set_dtype_policy("mixed_bfloat16")
    x = keras.Input((None, 4))
    both = layers.Bidirectional(STALL[0](4, return_sequences=True))
    model = keras.Model(x, layers.Dense(1, dtype="float32")(both(x)))
    assert len(found_in(model)) == 2
    with_unknown_steps = kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert "gradients of many steps" in str(with_unknown_steps) and not found_in(model)


@stalls
def test_unrolled_steps_and_layers_that_are_not_built_are_none():
    layer = STALL[0](4, return_sequences=True)
    assert not adds_up_steps(layer, "bfloat16")
    layer.build((None, None, 4))
    assert adds_up_steps(layer, "bfloat16") and not adds_up_steps(layer, "float32")
    layer.unroll = True
    assert not adds_up_steps(layer, "bfloat16")
