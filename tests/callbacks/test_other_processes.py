"""What another process that trains the same model holds counts for this one too.

PyTorch's processes each have moving statistics of their own. Here `over_processes` plays the
others; tests/distribution/test_two_hosts.py runs real ones where Keras can `fit` on several.
"""

import keras
import numpy as np
import pytest
from keras import ops

import kmp
from kmp._backend import backend
from kmp.callbacks.skip_guard import hold_statistics
from kmp.callbacks.snapshot import take_snapshot
from kmp.callbacks.verdict.observation import moving_variances, nonfinite_state


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    model.compile(kmp.scaled("sgd", spikes="skip"), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.fixture
def beside(monkeypatch):
    """Lets `over_processes` reduce what is here together with what a second process has."""

    def play(theirs):
        def over_processes(self, model, x, reduce):
            x = ops.convert_to_tensor(x)
            other = ops.broadcast_to(ops.cast(theirs, x.dtype), ops.shape(x))
            return reduce(ops.stack([x, other]), 0)

        monkeypatch.setattr(type(backend), "over_processes", over_processes)

    return play


def test_statistics_that_are_not_finite_elsewhere_make_no_snapshot(model, beside):
    assert take_snapshot(model, 0) is not None
    beside(False)
    assert take_snapshot(model, 0) is None


def test_statistics_that_are_not_finite_elsewhere_are_named(model, beside):
    assert not nonfinite_state(model, model.layers, model.optimizer)
    beside(False)
    found = nonfinite_state(model, model.layers, model.optimizer)
    assert any(x.path.endswith("moving_variance") for x in found)


def test_the_largest_variance_of_all_counts(model, beside):
    beside(1e6)
    assert [x.largest for x in moving_variances(model, model.layers)] == [1e6]


@pytest.mark.parametrize("theirs, held", [(False, 0), (True, 1)])
def test_statistics_are_held_where_those_of_another_have_grown(model, beside, theirs, held):
    layer = model.layers[0]
    kept = [(v, ops.copy(v.value)) for v in (layer.moving_mean, layer.moving_variance)]
    layer.moving_mean.assign(np.full(4, 0.5))
    beside(theirs)
    hold_statistics(model, [layer], kept, ops.convert_to_tensor(True))
    mean = 0.0 if held else 0.5
    np.testing.assert_array_equal(ops.convert_to_numpy(layer.moving_mean), np.full(4, mean))
