"""What `keras.RematScope` does to training, for which `kmp.recompute` is there."""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers
from oracle import BACKEND
from recomputed_models import assert_same, state

import kmp

INSIDE = {
    "statistics": lambda: layers.BatchNormalization(momentum=0.5),
    "dropout": lambda: layers.Dropout(0.5, seed=1),
}
each_inside = pytest.mark.parametrize("inside", INSIDE)


def train(inside, in_scope, recomputed=False):
    """One step of a block in float32, eagerly on TensorFlow."""
    keras.utils.set_random_seed(0)
    scope = keras.RematScope(mode="list_of_layers", layer_names=["block"])
    with scope if in_scope else contextlib.nullcontext():
        block = keras.Sequential([INSIDE[inside]()], name="block")
        model = keras.Sequential([keras.Input((4,)), layers.Dense(8), block, layers.Dense(1)])
        if recomputed:
            kmp.recompute(model, lambda layer, path: layer is block)
        model.compile("sgd", "mse", run_eagerly=BACKEND == "tensorflow")
        x = 3 + np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
        model.fit(x, x[:, :1], batch_size=16, verbose=0)
    return state(model)


def value(found, ending):
    """Of the first variable whose path ends so."""
    return next(x for path, x in found if path.endswith(ending))


@pytest.mark.only("tensorflow", "torch")
def test_keras_still_moves_statistics_twice_in_a_remat_scope():
    plain, scoped = (value(train("statistics", x), "moving_mean") for x in (False, True))
    np.testing.assert_allclose(scoped, 1.5 * plain, rtol=1e-6)  # half of the mean, three quarters


@pytest.mark.only("tensorflow", "torch")
def test_keras_still_draws_another_dropout_mask_in_a_remat_scope():
    plain, scoped = train("dropout", False), train("dropout", True)
    assert np.abs(value(plain, "/kernel") - value(scoped, "/kernel")).max() > 0.01
    assert value(scoped, "generator_state")[1] == value(plain, "generator_state")[1] + 1


@pytest.mark.only("jax")
@each_inside
def test_keras_still_leaks_what_is_assigned_in_a_remat_scope(inside):
    with pytest.raises(Exception, match=r"leaked|Unable to automatically"):
        train(inside, True)


@pytest.mark.only("tensorflow")
def test_keras_still_passes_keywords_that_graphs_refuse_in_a_remat_scope():
    """keras#21207: for each layer whose `call` takes `training`, as here a Sequential."""
    with keras.RematScope(mode="full"):
        block = keras.Sequential([layers.Dense(4)])
        model = keras.Sequential([keras.Input((4,)), block])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="supports keywords arguments only when eager"):
        model.fit(np.ones((4, 4)), np.ones((4, 4)), verbose=0)


@each_inside
def test_recompute_does_none_of_that(inside):
    plain, recomputed = train(inside, False), train(inside, False, recomputed=True)
    assert_same(plain, recomputed, 1e-6 if BACKEND == "jax" else 0)
