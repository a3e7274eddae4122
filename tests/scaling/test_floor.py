"""The default floor of the loss scale: what trains under Keras's optimizer trains, and nothing
falls further. Keras's own optimizer, which has no floor, is the oracle."""

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from oracle import number

import kmp

# On TensorFlow's CPU kernels the gradients of these models stay finite in float16.
pytestmark = pytest.mark.only("jax", "torch")

FLOOR = kmp.DynamicLossScale().min_scale
LARGEST = kmp.formats["float16"].largest


def rare_class():
    """Sixteen batches, of which four hold a sample of the rare class."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(512, 8)).astype("float32"), np.zeros(512, "int32")
    x[::128], y[::128] = x[::128] + 3, 1
    return x, y


def trained(optimizer, weight=1e7, epochs=10, **settings):
    """Weights after training, and how many of the four rare samples are found.

    Args:
        settings: `sample_weight` instead of class weights; `summed` losses; more for `compile`.
    """
    sample_weight, summed = settings.pop("sample_weight", False), settings.pop("summed", False)
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(16, activation="relu")
    model = keras.Sequential([keras.Input((8,)), hidden, kmp.layers.Float32OutputDense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="sum" if summed else "sum_over_batch_size"
    )
    model.compile(optimizer, loss, **settings)
    x, y = rare_class()
    weights = {"sample_weight": np.where(y == 1, weight, 1.0).astype("float32")}
    if not sample_weight:
        weights = {"class_weight": {0: 1.0, 1: weight}}
    model.fit(x, y, batch_size=32, epochs=epochs, shuffle=False, verbose=0, **weights)
    found = model.predict(x[y == 1], verbose=0).argmax(axis=-1)
    return model.get_weights(), int(found.sum())


def adam(**arguments):
    return keras.optimizers.Adam(1e-2, **arguments)


VARIANTS = {
    "class weight 1e7": {},
    "class weight 1e9": {"weight": 1e9},
    "class weight 1e15": {"weight": 1e15, "epochs": 16},
    "sample weights": {"sample_weight": True},
    "a sum over the batch": {"summed": True},
    "accumulation": {"gradient_accumulation_steps": 2},
}
if BACKEND != "torch":
    VARIANTS["4 steps at once"] = {"steps_per_execution": 4}
if BACKEND == "tensorflow":
    VARIANTS["XLA"] = {"jit_compile": True}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_trains_under_keras_trains_bit_for_bit(variant):
    """The rare class needs scales from 2**-6 to 2**-32."""
    settings = dict(VARIANTS[variant])
    window = {k: settings.pop(k) for k in tuple(settings) if k == "gradient_accumulation_steps"}
    of_keras = keras.optimizers.LossScaleOptimizer(adam(**window), initial_scale=1.0)
    expected, found = trained(of_keras, **settings)
    ours = kmp.LossScaleOptimizer(adam(**window), initial_scale=1.0)
    weights, ours_found = trained(ours, **settings)
    assert found == ours_found == 4
    assert number(ours.scale_variable) == number(of_keras.dynamic_scale) < 1
    # kmp accumulates by selects on JAX, which XLA may round otherwise in the last bit.
    rtol = 1e-5 if window and BACKEND == "jax" else 0.0
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)


def test_the_rare_class_needs_a_scale_below_1():
    """Or the test above proves nothing of the floor."""
    rule = kmp.DynamicLossScale(1.0, min_scale=1.0)
    assert trained(kmp.LossScaleOptimizer(adam(), loss_scale=rule))[1] == 0


def test_the_largest_gradient_that_adam_can_square():
    with np.errstate(over="ignore"):
        assert np.isfinite(np.square(np.float32(LARGEST / FLOOR)))
        assert np.isinf(np.square(np.float32(2 * LARGEST / FLOOR)))


@pytest.mark.only("jax")
def test_keras_still_loses_a_run_at_a_scale_below_the_floor():
    """Adam's second moments are inf, and its weights NaN."""
    optimizer = keras.optimizers.LossScaleOptimizer(adam(), initial_scale=2.0**-47)
    weights, _ = trained(optimizer, weight=1e24)
    assert not all(np.isfinite(x).all() for x in weights)


def test_at_the_floor_no_run_is_lost():
    """The batches that even float32 cannot train on are skipped, and the others train."""
    optimizer = kmp.LossScaleOptimizer(adam(), initial_scale=2.0**-47)
    weights, _ = trained(optimizer, weight=1e24)
    assert all(np.isfinite(x).all() for x in weights)
    assert number(optimizer.scale_variable) == FLOOR
    assert 0 < number(optimizer.skipped_steps) < number(optimizer.steps)


def test_amax_trains_too():
    rule = kmp.AmaxLossScale()
    assert rule.min_scale == FLOOR
    assert trained(kmp.LossScaleOptimizer(adam(), loss_scale=rule), epochs=16)[1] == 4


@pytest.mark.filterwarnings("ignore:Step")
@pytest.mark.parametrize(
    "policy, expected",
    [
        ("mixed_float16", {"CALIBRATING": 1, "STALLED": 30, "COLLAPSED": 63}),
        ("float32", {"CALIBRATING": 1, "COLLAPSED": 20}),  # where no scale can help
    ],
)
def test_a_run_that_always_overflows_is_told_at_the_floor(policy, expected):
    """From 2**15 that is after 63 steps. An epoch of 30 skipped steps is told of before."""
    only = keras.layers.Dense(1, use_bias=False, dtype=policy)
    model = keras.Sequential([keras.Input((1,)), only])
    model.compile(kmp.scaled("sgd"), lambda y, outputs: ops.sqrt(outputs * 0))
    told, x = {}, np.ones((70, 1))
    watch = kmp.callbacks.GradientHealth(
        update_freq=1, on_report=lambda found: told.setdefault(str(found["verdict"]), found["step"])
    )
    model.fit(x, x, batch_size=1, verbose=0, callbacks=[watch])
    assert told == expected
    assert number(model.optimizer.scale_variable) == FLOOR
    assert watch.report.consecutive_skips == 70
