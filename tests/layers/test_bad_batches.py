"""Float32BatchNormalization keeps its moving statistics, to the bit, when a batch is bad."""

import keras
import numpy as np
import pytest
from keras import ops
from oracle import few

from kmp.layers import Float32BatchNormalization

POLICIES = ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16", "float32"]
BAD = {
    "nan": [[1, np.nan], [2, 3]],
    "inf": [[1, 2], [-np.inf, 3]],
    "both_infs": [[np.inf, 2], [-np.inf, 3]],
}


@pytest.mark.parametrize("policy", few(POLICIES, "mixed_float16"))
@pytest.mark.parametrize("kind", few(BAD, "both_infs"))
def test_statistics_ignore_a_bad_batch_in_fit(kind, policy, jit):
    assert_keeps_statistics(policy, np.array(BAD[kind]), jit)


@pytest.mark.parametrize("policy", few(["mixed_bfloat16", "bfloat16", "float32"], "float32"))
@pytest.mark.parametrize("largest", few([3e38, 1e30], 1e30), ids=["mean", "variance"])
def test_statistics_ignore_finite_inputs_whose_moments_overflow(largest, policy, jit):
    # Only the first channel overflows; the update of the second is skipped with it.
    x = np.array([[largest, 1.0], [-largest, 2.0], [largest, 1.0], [largest, 1.0]])
    assert_keeps_statistics(policy, x, jit)


def assert_keeps_statistics(policy, x, jit):
    """One good step, then one with `x`: the moving statistics move, then stay to the bit."""
    keras.config.set_dtype_policy(policy)
    layer = Float32BatchNormalization()
    model = keras.Sequential([keras.Input((2,)), layer])
    model.compile("sgd", "mse", jit_compile=jit)
    model.optimizer.build(model.trainable_variables)  # or TensorFlow traces the step twice
    model.fit(np.array([[0.3, 0.7], [0.9, -4.0]]), np.zeros((2, 2)), verbose=0)
    before = [w.tobytes() for w in layer.get_weights()[2:]]
    assert layer.get_weights()[2].tolist() != [0, 0]
    model.fit(x, np.zeros(x.shape), batch_size=len(x), verbose=0)
    assert [w.tobytes() for w in layer.get_weights()[2:]] == before


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 3, 2)], ids=["empty", "wholly_masked"])
def test_statistics_ignore_a_batch_without_elements(shape, policy):
    layer = Float32BatchNormalization(dtype=policy)
    layer.build((None, 3, 2))
    layer.moving_mean.assign([0.3, 0.7])
    before = [w.tobytes() for w in layer.get_weights()]
    y = layer(np.ones(shape), training=True, mask=np.zeros(shape[:-1], bool))
    assert tuple(y.shape) == shape
    assert np.all(np.isfinite(ops.convert_to_numpy(ops.cast(y, "float32"))))
    assert [w.tobytes() for w in layer.get_weights()] == before


def test_a_channel_without_elements_keeps_its_statistics_alone():
    layer = Float32BatchNormalization(axis=1, momentum=0.5)
    layer(np.full((1, 2, 3), 4.0), training=True, mask=np.array([[True, False]]))
    np.testing.assert_array_equal(layer.get_weights()[2:], [[2, 0], [0.5, 1]])


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize(
    "synchronized, first", [(True, 0.0), pytest.param(False, 1.5, marks=pytest.mark.wide)]
)
def test_a_bad_batch_on_the_second_replica(synchronized, first, two_replicas):
    # Synchronized, both replicas see the NaN; apart, the first learns its own mean of 1.5.
    strategy = two_replicas
    with strategy.scope():
        layer = Float32BatchNormalization(momentum=0.0, synchronized=synchronized)
        model = keras.Sequential([layer])
        model.compile("sgd", "mse", jit_compile=False)
    x = np.array([[1.0], [2.0], [3.0], [np.nan]])
    model.fit(x, np.zeros((4, 1)), batch_size=4, shuffle=False, verbose=0)
    values = [v.numpy() for v in strategy.experimental_local_results(layer.moving_mean.value)]
    np.testing.assert_array_equal(values, [[first], [0]])
