"""Gradients of biases that Keras's train step adds up in half precision on this machine.

The oracle is the number of positions, each of which adds 1 to the gradient.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops
from oracle import may_leave_convolutions_to_onednn

import kmp
from kmp._keras import path_of
from kmp.models.biases import stalls_by_its_bias

BACKEND = keras.backend.backend()
POSITIONS = 4096
MODES = {"jax": [True], "tensorflow": ["auto", False, True], "torch": ["auto"]}[BACKEND]


def dense(**kwargs):
    return layers.Dense(2, **kwargs), (32, 128, 2)


def convolution(**kwargs):
    return layers.Conv2D(2, 1, **kwargs), (64, 64, 2)


def channels_by_themselves(**kwargs):
    kwargs = {k.replace("kernel", "depthwise"): v for k, v in kwargs.items()}
    return layers.DepthwiseConv2D(1, **kwargs), (64, 64, 2)


def heads(**kwargs):
    of_heads = {"output_shape": (None, None, 2, 2), "bias_axes": "de"}
    return layers.EinsumDense("abci,ide->abcde", **of_heads, **kwargs), (32, 128, 2)


def compiled(make, policy, jit, scaled=True, **kwargs):
    keras.config.set_dtype_policy(policy)
    (first, shape), (second, _) = make(), make(kernel_initializer="zeros")
    if make is heads:
        first, _ = dense(use_bias=False)
    model = keras.Sequential([keras.Input(shape), first, second])
    model.add(layers.Activation("linear", dtype="float32"))
    optimizer = kmp.scaled("sgd", kmp.DynamicLossScale(initial_scale=1.0), learning_rate=1.0)
    optimizer = optimizer if scaled else keras.optimizers.SGD(1.0)
    model.compile(optimizer, lambda _, y: ops.sum(y), jit_compile=jit, **kwargs)
    return model


def moved(model, callbacks=()):
    x = np.zeros((1, *model.input_shape[1:]), "float32")
    model.fit(x, np.zeros((1, 1)), verbose=0, callbacks=list(callbacks))
    return float(-ops.convert_to_numpy(model.layers[1].bias).flat[0])


def found_in(model):
    return kmp.audit(model).of_kind("half gradient")


def is_wrong(make, policy, jit):
    """What was seen on CPUs."""
    if BACKEND == "jax":
        return policy == "mixed_bfloat16"
    of_pairs = {heads: "mixed_float16"}
    return (
        BACKEND == "tensorflow"
        and jit is not True
        and policy == of_pairs.get(make, "mixed_bfloat16")
    )


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float32"])
@pytest.mark.parametrize("jit", MODES)
@pytest.mark.parametrize("make", [dense, convolution, channels_by_themselves, heads])
def test_it_is_found_where_positions_are_lost(make, jit, policy):
    model = compiled(make, policy, jit)
    found = [each for each in found_in(model) if "its bias" in each.problem]
    got = moved(model)
    if found and make is convolution and may_leave_convolutions_to_onednn():
        # Exact, it is a false alarm: see docs/limits.md.
        assert got == POSITIONS or got <= POSITIONS / 2
    elif found:
        assert got <= POSITIONS / 2
    else:
        assert abs(got / POSITIONS - 1) < 0.01
    assert bool(found) == is_wrong(make, policy, jit)


@pytest.mark.only("tensorflow", "jax")
def test_one_finding_says_it_of_all_layers():
    model = compiled(dense, "mixed_bfloat16", "auto")
    (found,) = found_in(model)
    assert found == (
        path_of(model.layers[0]),
        "half gradient",
        "Keras's train step adds up the gradient of its bias, as of 1 more, in bfloat16 on this "
        "machine, where a sum of ones stalls at 256.",
        "Give fit one of kmp's callbacks, or call kmp.protect(model).",
    )
    model.layers[0].trainable = False
    (found,) = found_in(model)
    assert found.path == path_of(model.layers[1]) and "gradient of its bias in" in found.problem
    with kmp.protect(model):
        assert not found_in(model)


@pytest.mark.only("tensorflow", "jax")
@pytest.mark.parametrize("untraced", [{"run_eagerly": True}, {"jit": False}])
def test_only_traced_steps_are_protected(untraced):
    model = compiled(dense, "mixed_bfloat16", **{"jit": "auto", **untraced})
    (found,) = found_in(model)
    if BACKEND == "tensorflow" and "jit" in untraced:
        assert found.advice.startswith("Give fit one of kmp's callbacks")
        return
    assert found.advice == (
        "Compile without run_eagerly=True and jit_compile=False, and give fit one of kmp's "
        "callbacks."
    )
    with kmp.protect(model):
        assert found_in(model) == (found,)
        assert moved(model) < POSITIONS / 2
    traced = compiled(dense, "mixed_bfloat16", "auto")
    assert moved(traced, [kmp.callbacks.TerminateOnNaN()]) == POSITIONS


@pytest.mark.only("tensorflow", "jax")
def test_callbacks_alone_protect_what_scales_no_loss():
    model = compiled(dense, "mixed_bfloat16", "auto", scaled=False)
    (found,) = found_in(model)
    assert found.advice == "Give fit one of kmp's callbacks."
    assert moved(model, [kmp.callbacks.TerminateOnNaN()]) == POSITIONS


@pytest.mark.only("tensorflow", "jax")
def test_models_without_biases_or_a_loss_are_none():
    model = compiled(dense, "mixed_bfloat16", "auto")
    assert not found_in(keras.Sequential([keras.Input((32, 128, 2)), *model.layers]))
    for layer in model.layers[:2]:
        layer.bias = None
    assert not found_in(model)


class _Unused(layers.Layer):
    def __init__(self):
        super().__init__()
        self.optional = layers.Dense(2)

    def build(self, shape):
        pass

    def call(self, x):
        return x


def test_a_layer_that_is_never_called_has_none():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((32, 128, 2)), _Unused(), layers.Dense(1)])
    model.compile(kmp.scaled("sgd"), "mse")
    layer = model.layers[0]
    assert not layer.optional.built and not stalls_by_its_bias(layer.optional)
    assert not [each for each in found_in(model) if path_of(layer) in each.path]


@pytest.mark.only("tensorflow", "jax")
def test_float32_outputs_add_up_in_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    head = kmp.layers.Float32OutputDense(2, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((32, 128, 2)), layers.Activation("linear"), head])
    model.compile(keras.optimizers.SGD(1.0), lambda _, y: ops.sum(y))
    assert not found_in(model) and moved(model) == POSITIONS
