"""The range of the inputs: what moves it, and what must not."""

import keras
import numpy as np
import pytest
from quantized_models import (
    IMAGES,
    TARGETS,
    assert_equal,
    fit,
    functional,
    observers,
    one_dense,
    prepared,
    value,
    values,
)

import kmp

pytestmark = pytest.mark.slow

JIT = [  # JAX runs its steps uncompiled for debugging alone, and takes a minute for each
    pytest.param(False, marks=pytest.mark.only("tensorflow", "torch")),
    pytest.param(True, marks=pytest.mark.only("tensorflow", "jax")),
]
BAD = {"nan": np.nan, "inf": np.inf, "float16_overflow": 1e6}


@pytest.mark.parametrize("jit", JIT)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_the_range_is_a_float32_moving_average_of_good_batches(policy, jit):
    model, layer = one_dense(policy, jit, momentum=0.75)
    expected = None
    for largest in (1.0, 4.0, *BAD.values(), 0.5):
        fit(model, [0.25, -largest, 0.125])
        if largest <= 4.0:
            mean = largest if expected is None else 0.75 * expected + 0.25 * largest
            expected = np.float32(mean)
        elif policy == "mixed_bfloat16" and largest == 1e6:
            expected = np.float32(0.75 * expected + 0.25 * 999424)  # 1e6 in bfloat16
        assert value(layer.input_range) == pytest.approx(expected, rel=1e-6)
    assert all(v.dtype == "float32" for v in observers(model))
    assert value(layer.observed_batches) == (3 if policy == "mixed_float16" else 4)


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_batch_leaves_the_observer_as_it_was_and_is_not_hidden(bad):
    """Clipping to the range would turn an overflow into a number, and its step into a good one."""
    model, _ = one_dense("mixed_float16")
    fit(model, [1.0, 2.0, 3.0])
    before = values(observers(model))
    fit(model, [1.0, BAD[bad], 3.0])
    assert_equal(values(observers(model)), before)
    assert int(model.optimizer.skipped_steps) == 1


def test_inference_and_frozen_layers_do_not_move_the_range():
    model, layer = one_dense()
    fit(model, [1.0, 2.0, 3.0])
    before = values(observers(model))
    x = np.full((2, 3), 9.0)
    model.predict(x, verbose=0)
    model.evaluate(x, np.zeros((2, 2)), verbose=0)
    layer.trainable = False
    model(x, training=True)
    assert_equal(values(observers(model)), before)


@pytest.mark.parametrize("how", ["freeze_after", "asked", "asked_in_fit"])
def test_the_range_freezes(how):
    model, layer = one_dense(freeze_after=2 if how == "freeze_after" else None)
    fit(model, [1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    if how == "asked":
        kmp.freeze_observers(model)
    before = value(layer.input_range)
    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: kmp.freeze_observers(callback.model)
    )
    callbacks = [callback] if how == "asked_in_fit" else []
    model.fit(np.full((2, 3), 9.0), np.zeros((2, 2)), verbose=0, callbacks=callbacks)
    assert value(layer.input_range) == before > 1


@pytest.mark.parametrize("jit", JIT)
def test_a_skipped_step_never_happened(jit):
    """Its activations are finite, its gradients are not: kmp's callbacks put the ranges back."""
    model = functional()
    kmp.to_mixed_precision(model, "mixed_float16")
    kmp.quantize_aware(model)
    model.compile(kmp.scaled("sgd", kmp.DynamicLossScale(1024)), "mse", jit_compile=jit)
    settings = {"batch_size": 8, "verbose": 0, "callbacks": [kmp.callbacks.TerminateOnNaN()]}
    model.fit(IMAGES, TARGETS * 1e-3, **settings)
    state = [*model.trainable_variables, *observers(model)]
    state += model.optimizer.inner_optimizer.variables
    before = values(state)
    model.fit(IMAGES * 2, TARGETS * 1e6, **settings)
    assert int(model.optimizer.skipped_steps) == 1
    assert_equal(values(state), before)
    model.fit(IMAGES * 2, TARGETS * 1e-3, **settings)
    assert int(model.optimizer.skipped_steps) == 1
    assert value(prepared(model)[0].input_range) > before[len(model.trainable_variables)]
