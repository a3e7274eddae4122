"""Gradients of exactly zero: what a loss scale can bring back, and what it cannot."""

import keras
import numpy as np
import pytest
from keras import ops
from reports import look_at, verdict_on

import kmp
from kmp.callbacks import GradientHealth
from kmp.callbacks.verdict.observation import Weight
from kmp.health.details import BINS, COLUMNS
from kmp.health.report import OverflowEvent

pytestmark = pytest.mark.filterwarnings("ignore:Step", "ignore:float16 without")


@pytest.mark.parametrize("layer", ["prelu", "normalization"])
@pytest.mark.parametrize("scale", ["dynamic", 2.0**15])
def test_gradients_that_are_zero_in_float32_too(layer, scale):
    """Of a slope for negative inputs, where there are none; of an empty batch axis."""
    layer, x = {
        "prelu": (keras.layers.PReLU, np.ones((8, 4))),
        "normalization": (keras.layers.LayerNormalization, np.zeros((1, 0, 10))),
    }[layer]
    model = keras.Sequential([keras.Input(x.shape[1:]), layer(dtype="mixed_float16")])
    model.compile(kmp.scaled("sgd", scale), loss=lambda y, outputs: ops.sum(outputs))
    watch = GradientHealth(update_freq=1)
    model.fit(x, x, verbose=0, callbacks=[watch])
    assert watch.verdict.state == "HEALTHY", str(watch.verdict)


def saturated(scale="dynamic", advised=False):
    """Fit a classifier whose softmax is exactly 0 or 1 in float16, or what is advised instead."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    if advised:
        head = kmp.layers.Float32OutputDense(4, name="head", dtype="mixed_float16")
    else:
        head = keras.layers.Dense(4, "softmax", name="head", dtype="mixed_float16")
    hidden = keras.layers.Dense(16, "relu", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((8,)), hidden, head])
    kernel, bias = head.get_weights()
    head.set_weights([np.concatenate([0 * kernel[:, :1], kernel[:, 1:]], 1), 0 * bias])
    head.bias.assign([40.0, 0.0, 0.0, 0.0])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=advised)
    model.compile(kmp.scaled("sgd", scale, learning_rate=0.5), loss)
    watch = GradientHealth()
    past = model.fit(
        x, np.argmax(x[:, 1:4], -1) + 1, batch_size=32, epochs=16, verbose=0, callbacks=[watch]
    )
    return watch.verdict, past.history["loss"]


@pytest.mark.slow
def test_a_softmax_that_is_exactly_0_or_1():
    """No loss scale brings its gradients back: logits in float32 do."""
    found, losses = saturated()
    assert found.state == "STALLED" and losses[-1] == losses[0], str(found)
    assert "Float32OutputDense" in found.advice and "from_logits=True" in found.advice
    assert "a loss scale of 32768" in found.advice and "initial_scale=2.0**24" in found.advice
    found, losses = saturated(kmp.DynamicLossScale(initial_scale=2.0**24))
    assert found.state == "STALLED" and losses[-1] == losses[0], str(found)
    assert "from_logits=True" in found.advice and "scale" not in found.advice
    found, losses = saturated(advised=True)
    assert found.state in ("HEALTHY", "CALIBRATING") and losses[-1] < losses[0] / 4, str(found)


@pytest.mark.slow
def test_a_scale_brings_back_what_it_can():
    """Of gradients below what the default scale can hold."""

    def verdict(scale):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")])
        model.compile(kmp.scaled("adam", scale), "mse")
        watch = GradientHealth(update_freq=10)
        x, weights = np.ones((160, 4)), np.full(160, 2.0**-42)
        model.fit(x, x[:, :1], 4, verbose=0, sample_weight=weights, callbacks=[watch])
        return watch.verdict

    found = verdict("dynamic")
    assert found.state == "STALLED" and "initial_scale=2.0**24" in found.advice, str(found)
    assert verdict(kmp.DynamicLossScale(initial_scale=2.0**24)).state != "STALLED"


def advice(rule, largest, scale, events=(), share=(-27, 1.0), **limits):
    """For a largest gradient at a scale, and a share of the gradient that float16 loses."""
    details = np.zeros((1, len(COLUMNS) + BINS), "float32")
    details[0, len(COLUMNS) + 29 + share[0]] = share[1]
    matrix = np.float32([[largest, largest, largest == 0, 0, 0]])
    seen = kmp.GradientReport(("w",), matrix, scale, 5000, 0, 0, events, details=details)
    weights = {"w": Weight("dense", "float16")}
    limits = kmp.callbacks.Limits(**limits)
    look = look_at(seen, rule=rule, weights=weights, limits=limits)
    return verdict_on(look, look).advice


def test_no_scale_is_advised_that_is_set_already():
    sunk = kmp.DynamicLossScale(initial_scale=2.0**24)
    assert "Wait for the scale to grow from 1024" in advice(sunk, 0.0, 2.0**10)
    assert "Wait for the scale to grow from 1024" in advice(sunk, 1e-3, 2.0**10)
    event = (OverflowEvent(4000, 2.0**16, "w", 1, True),)
    said = advice(kmp.DynamicLossScale(), 1e-4, 2.0**15, event)
    assert "kmp.DynamicLossScale(initial_scale=2.0**20, min_scale=2.0**20) leaves out" in said
    floored = kmp.DynamicLossScale(2.0**20, min_scale=2.0**20)
    assert advice(floored, 1e-4, 2.0**15, event).endswith("both batches count.")
    assert not advice(kmp.DynamicLossScale(), 30.0, 2.0**10, spare_bits=0)
    assert "headroom_bits" not in advice(kmp.AmaxLossScale(headroom_bits=1), 1e-3, 2.0**10)


def test_a_scale_above_the_default_ceiling_comes_with_its_own():
    """`DynamicLossScale(initial_scale=2.0**36)` alone raises a ValueError."""
    said = advice(kmp.DynamicLossScale(), 2.0**-21, 2.0**15)
    assert said == "Write kmp.DynamicLossScale(initial_scale=2.0**35, max_scale=2.0**35)."
    written = said.split("Write ")[1][:-1]
    rule = eval(written, {"kmp": kmp})
    assert not advice(rule, 2.0**-21, rule.initial_scale, share=(0, 1.0))
    assert "grow" in advice(kmp.DynamicLossScale(), 2.0**-6, 2.0**15)
