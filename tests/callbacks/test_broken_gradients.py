"""Gradients of NaN beside a finite loss: in float32 no loss scale is the cause, in any step."""

import keras
import numpy as np
import pytest
from keras import ops
from reports import look_at, verdict_on

import kmp
from kmp.callbacks import GradientHealth
from kmp.callbacks.verdict.observation import Weight
from kmp.health.report import OverflowEvent

pytestmark = pytest.mark.filterwarnings("ignore:Step", "ignore:float16 without")


def root_of_zero(y, outputs):
    return ops.sqrt(ops.mean(ops.square(outputs - outputs)))


def mended(y, outputs):
    return ops.sqrt(ops.mean(ops.square(outputs - y)) + 1e-6)


def watched_run(policy, scale, steps, loss=root_of_zero):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, dtype=policy, name="only")])
    model.compile(kmp.scaled("sgd", scale, learning_rate=0.01), loss)
    watch = GradientHealth(update_freq=1)
    x = np.random.default_rng(0).normal(size=(4 * steps, 4)).astype("float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[watch])
    return model, watch, (x[:4], x[:4, :1])


@pytest.mark.parametrize(
    "policy, scale, steps",
    [
        ("float32", "none", 1),
        ("float32", "dynamic", 3),
        ("float32", 1024.0, 1),
        ("mixed_bfloat16", "dynamic", 12),
    ],
)
def test_gradients_of_nan_beside_a_finite_loss(policy, scale, steps):
    model, watch, batch = watched_run(policy, scale, steps)
    found = watch.verdict
    assert found.state == ("UNSTABLE" if steps == 1 else "COLLAPSED"), str(found)
    assert found.blame.endswith("only/bias") and "though the loss was finite" in found.reason
    if scale != 1024.0:
        assert "no loss scale helps" in found.advice
    assert "kmp.debug.locate_nonfinite" in found.advice
    assert kmp.debug.locate_nonfinite(model, *batch).part == "loss"
    assert watched_run(policy, scale, steps, mended)[1].verdict.state == "HEALTHY"


def test_the_warning_of_skipped_steps_promises_no_scale():
    with pytest.warns(kmp.PrecisionWarning) as caught:
        watched_run("float32", "dynamic", 3)
    (said,) = [str(w.message) for w in caught if "gradient overflow" in str(w.message)]
    assert "no loss scale helps" in said and "how the scale is found" not in said


def test_a_layer_without_weights_may_be_what_overflows():
    """Only it computes in float16: then a scale is searched for."""
    half = keras.layers.UnitNormalization(dtype="mixed_float16")
    model = keras.Sequential([keras.Input((4,)), half, keras.layers.Dense(1, dtype="float32")])
    event = OverflowEvent(3, 2.0**15, "w", 1, True)
    seen = kmp.GradientReport(("w",), np.zeros((1, 5), "float32"), 2.0**14, 3, 1, 1, (event,))
    look = {"rule": kmp.DynamicLossScale(), "weights": {"w": Weight("dense")}}
    layers = model._flatten_layers()
    assert verdict_on(look_at(seen, layers=layers, **look)).state == "CALIBRATING"
    assert verdict_on(look_at(seen, layers=layers[:1], **look)).state == "UNSTABLE"


def test_float16_is_told_where_to_look_if_it_goes_on():
    model, watch, batch = watched_run("mixed_float16", "dynamic", 12)
    assert watch.verdict.state == "CALIBRATING" and "If it goes on" in watch.verdict.advice
    assert kmp.debug.locate_nonfinite(model, *batch).part == "loss"
    assert watched_run("mixed_float16", "dynamic", 12, mended)[1].verdict.state in (
        "HEALTHY",
        "CALIBRATING",
    )
