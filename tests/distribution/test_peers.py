"""The defects of `keras.optimizers.LossScaleOptimizer` that kmp exists to not have.

Each test proves one where it still is. One that turns red is good news: Keras has fixed it. Then
take it out here, and in the README where kmp claims to be the only one without it.
"""

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.slow

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    from replicas import Run, gradients, mirrored, no_merge_call
if BACKEND == "jax":
    import jax

on_tensorflow = pytest.mark.only("tensorflow")
on_jax = pytest.mark.only("jax")


def keras_scaled(**arguments):
    inner = keras.optimizers.SGD(1.0, **arguments)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)


@on_tensorflow
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_keras_still_writes_one_replica_s_overflow_into_all_weights(graph):
    run = Run(mirrored(2), keras_scaled, graph=graph)
    run.step(gradients(2, "last"))
    for weights in run.on_each_replica(run.variable):
        assert not np.isfinite(weights[0])
    assert float(run.optimizer.dynamic_scale.numpy()) == 1024.0


@on_tensorflow
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize(
    "clip", [{"clipnorm": 0.25}, {"global_clipnorm": 0.25}, {"clipvalue": 0.25}], ids=str
)
def test_keras_still_clips_by_a_limit_for_each_replica(clip, replicas):
    """The gradient that is applied may be as many times too long as there are replicas."""
    run = Run(mirrored(replicas), lambda: keras_scaled(**clip))
    run.step(gradients(replicas, "none", value=(0.0, -16.0)))
    moved = run.on_each_replica(run.variable)[0] - np.float32([1.0, 2.0])
    np.testing.assert_allclose(moved, [0.0, 0.25 * replicas], rtol=1e-6)


SETTINGS = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "ema_overwrite": {"use_ema": True, "ema_overwrite_frequency": 2},
}


@on_tensorflow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("wrapped", [True, False], ids=["scaled", "bare"])
def test_keras_still_branches_inside_a_replica(setting, wrapped):
    """keras-team/keras#20582: no accumulation and no overwriting average in a graph."""
    optimizer = keras_scaled if wrapped else lambda **a: keras.optimizers.SGD(1.0, **a)
    run = Run(mirrored(2), lambda: optimizer(**SETTINGS[setting]))
    with pytest.raises((RuntimeError, ValueError), match="merge_call"):
        run.step(gradients(2, "none"))


@on_tensorflow
def test_keras_still_fails_where_replicas_do_not_merge():
    """keras-team/keras#21366 and #18666: MirroredStrategy over GPUs under XLA, even if finite."""
    with no_merge_call(mirrored(2)) as strategy:
        run = Run(strategy, keras_scaled)
        with pytest.raises(RuntimeError, match="synchronization point"):
            run.step(gradients(2, "none"))


def weight_after_two_overflows(optimizer, scale_loss):
    """A custom loop of three steps on `loss = w * x`: x is inf twice, then 1."""
    weight = keras.Variable(np.float32(1.0), name="weight")
    optimizer.build([weight])

    @jax.jit
    def step(weights, state, x):
        def loss(weights):
            return scale_loss(state, weights[0] * x)

        return optimizer.stateless_apply(state, jax.grad(loss)(weights), weights)

    weights, state = [weight.value], [v.value for v in optimizer.variables]
    for x in (np.inf, np.inf, 0.25):
        weights, state = step(weights, state, np.float32(x))
    return float(weights[0])


@on_jax
def test_keras_still_bakes_the_scale_into_a_custom_loop():
    """keras-team/keras#19244: the loss keeps the first scale, and the update is 4 times too big."""
    optimizer = keras_scaled()
    after = weight_after_two_overflows(optimizer, lambda state, loss: optimizer.scale_loss(loss))
    assert after == 1.0 - 4 * 0.25
    assert not hasattr(optimizer, "stateless_scale_loss")
