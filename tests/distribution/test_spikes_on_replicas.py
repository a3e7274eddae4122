"""A spike in one replica's part of the batch is everybody's, and leaves nothing on any."""

import keras
import numpy as np
import pytest
from keras import ops
from oracle import BACKEND, number
from spiky_runs import classifier, digits, fit

import kmp

pytestmark = [pytest.mark.only("tensorflow", "jax"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def no_distribution_left():
    yield
    keras.distribution.set_distribution(None)


def first_half_bad(step, steps):
    """Data of which the first half of one batch, the first replica's, is in a wrong unit."""
    x, y = digits(steps)
    x[step, :8] *= 1e4
    y[step, :8] = (y[step, :8] + 1) % 4
    return x, y


def on_replicas(number_of_replicas, norm=()):
    if BACKEND == "jax":
        devices = keras.distribution.list_devices("cpu")[:number_of_replicas]
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
        return classifier(norm, momentum=0.9)
    import replicas

    with replicas.mirrored(number_of_replicas).scope():
        return classifier(norm, jit=False, momentum=0.9)


@pytest.mark.parametrize("number_of_replicas", [2, 4])
def test_all_replicas_leave_the_step_out(number_of_replicas):
    x, y = first_half_bad(30, 40)
    bad = on_replicas(number_of_replicas)
    fit(bad, x, y)
    assert number(bad.optimizer.skipped_spikes) == 1
    never = on_replicas(number_of_replicas)
    fit(never, np.delete(x, 30, axis=0), np.delete(y, 30, axis=0))
    for mine, theirs in zip(bad.weights, never.weights, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(mine), ops.convert_to_numpy(theirs))


def test_no_replica_ruins_the_moving_statistics():
    x, y = first_half_bad(110, 120)
    bad = on_replicas(2, (keras.layers.BatchNormalization(),))
    with kmp.protect(bad):
        fit(bad, x, y)
    optimizer = bad.optimizer
    # What the gradients show is left out as a spike; what they do not show is held.
    assert number(optimizer.held_statistics) + number(optimizer.skipped_spikes) == 1
    assert float(ops.max(bad.layers[1].moving_variance)) < 10
