"""Gradients of NaN beside a finite loss: in float32 no loss scale is the cause, in any step."""

import keras
import numpy as np
import pytest
from conftest import BACKEND
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


@pytest.mark.slow
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
    look["rule"] = kmp.StaticLossScale(2.0**14)
    assert verdict_on(look_at(seen, layers=layers[:1], **look)).state == "UNSTABLE"
    adaptive = [*layers[:1], keras.layers.Dense(1, dtype=kmp.Policy("autocast"))]
    assert verdict_on(look_at(seen, layers=adaptive, **look)).state != "UNSTABLE"


class OwnCast(keras.layers.Layer):
    """Computes in float16, whatever its policy says."""

    def call(self, x):
        return ops.cast(ops.cast(x, "float16") * 2, "float32")


class Autocast(keras.layers.Layer):
    """Computes in float16 within its own code."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(4, dtype=kmp.Policy("autocast"), name="inner")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        with kmp.autocast("mixed_float16"):
            return ops.cast(self.inner(x), "float32")


@pytest.mark.parametrize("layer", [OwnCast, Autocast])
def test_float16_that_no_policy_names_may_need_a_lower_scale(layer):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(4), layer(), keras.layers.Dense(1)]
    )
    rule = kmp.DynamicLossScale(2.0**20)
    model.compile(kmp.scaled("sgd", rule, learning_rate=1e-3), "mse")
    watch = GradientHealth(update_freq=1)
    x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
    model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0, callbacks=[watch])
    assert 2 < watch.report.skipped_steps < 16
    assert watch.verdict.state == "CALIBRATING", str(watch.verdict)


def test_float16_is_told_where_to_look_if_it_goes_on():
    model, watch, batch = watched_run("mixed_float16", "dynamic", 12)
    assert watch.verdict.state == "CALIBRATING" and "If it goes on" in watch.verdict.advice
    assert kmp.debug.locate_nonfinite(model, *batch).part == "loss"
    assert watched_run("mixed_float16", "dynamic", 12, mended)[1].verdict.state in (
        "HEALTHY",
        "CALIBRATING",
    )


def _root(x):
    return ops.sqrt(ops.sum(ops.square(x), axis=-1, keepdims=True))


# Layers without weights, and inputs at which their gradients leave float16's range at any scale.
WEIGHTLESS = {
    "normalize": (lambda **dtype: keras.layers.UnitNormalization(**dtype), 1e-3),
    "root": (lambda **dtype: keras.layers.Lambda(_root, output_shape=(1,), **dtype), 1e-5),
}


def with_weightless(kind, dtypes):
    """Fit a model in float16, but for the layers named in `dtypes`."""
    keras.utils.set_random_seed(0)
    build, size = WEIGHTLESS[kind]
    policy = {name: dtypes.get(name, "mixed_float16") for name in ("proj", "began")}
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, name="proj", use_bias=False, dtype=policy["proj"]),
            build(name="began", dtype=policy["began"]),
            kmp.layers.Float32OutputDense(4, name="head", dtype="mixed_float16"),
        ]
    )
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(kmp.scaled("adam", learning_rate=1e-2), loss)
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32") * np.float32(size)
    y = np.eye(4, dtype="float32")[np.arange(64) % 4]
    watch = GradientHealth()
    model.fit(x, y, batch_size=16, epochs=20, verbose=0, callbacks=[watch])
    return model, watch.verdict, (x[:16], y[:16])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered")
@pytest.mark.parametrize("kind", WEIGHTLESS)
def test_a_layer_without_weights_that_began_it_is_located(kind):
    """The variable that can be named is of the layer before it: the advice looks further."""
    model, found, batch = with_weightless(kind, {})
    if BACKEND != "tensorflow":  # whose step may keep float32 inside what it fuses
        assert found.state == "COLLAPSED" and found.blame.endswith("proj/kernel"), str(found)
        assert found.advice.startswith("kmp.debug.locate_nonfinite"), str(found)
        located = kmp.debug.locate_nonfinite(model, *batch)
        assert located.path.endswith("began"), str(located)
    found = with_weightless(kind, {"began": "float32"})[1]
    assert found.state in ("HEALTHY", "CALIBRATING"), str(found)
