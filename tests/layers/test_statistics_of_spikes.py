"""`Float32BatchNormalization(spikes="skip")` keeps a huge batch out of its moving statistics."""

import keras
import numpy as np
import pytest
from keras import ops
from oracle import MODES, compiled

import kmp
from kmp.layers import Float32BatchNormalization


def sound(steps, scale=1.0, seed=0):
    random = np.random.default_rng(seed)
    return (scale * random.normal(size=(steps, 16, 3))).astype("float32")


def trained(layer, batches, mode="eager"):
    """Call the layer in training on each batch; returns the moving mean and variance."""
    if not layer.built:
        layer.build((None, 3))
    weights = [v.value for v in layer.trainable_variables]
    state = [v.value for v in layer.non_trainable_variables]
    step = compiled(lambda s, x: layer.stateless_call(weights, s, x, training=True)[1], mode)
    for x in batches:
        state = step(state, ops.convert_to_tensor(x))
    for variable, value in zip(layer.non_trainable_variables, state, strict=True):
        variable.assign(value)
    return [np.array(ops.convert_to_numpy(v)) for v in (layer.moving_mean, layer.moving_variance)]


@pytest.mark.parametrize("mode", MODES)
def test_a_huge_batch_leaves_no_trace(mode):
    """The statistics are bit for bit those of a run that never saw the batch."""
    batches = sound(130)
    bad = np.insert(batches, 120, 1e4 * batches[0], axis=0)
    found = trained(Float32BatchNormalization(spikes="skip"), bad, mode)
    never = trained(Float32BatchNormalization(spikes="skip"), batches, mode)
    np.testing.assert_array_equal(found, never)
    plain = trained(Float32BatchNormalization(), bad, mode)
    assert plain[1].max() > 1e5 * never[1].max()


def test_sound_statistics_are_those_without_the_rule():
    batches = sound(130)
    with_rule = trained(Float32BatchNormalization(spikes="skip"), batches)
    np.testing.assert_array_equal(with_rule, trained(Float32BatchNormalization(), batches))


def test_a_true_change_of_scale_is_followed():
    """After 8 batches the budget is spent; and the first 100 may grow by any factor."""
    layer = Float32BatchNormalization(spikes="skip")
    trained(layer, [*sound(110), *sound(8, 1e4, seed=1)])
    assert ops.convert_to_numpy(layer.moving_variance).max() < 10
    assert int(layer.spent) == 8 * 10_000 - 7
    trained(layer, sound(1, 1e4, seed=2))
    assert ops.convert_to_numpy(layer.moving_variance).max() > 1e5
    early = Float32BatchNormalization(spikes="skip")
    trained(early, [*sound(100), *sound(1, 1e4)])
    assert ops.convert_to_numpy(early.moving_variance).max() > 1e5


def test_a_batch_that_is_not_finite_counts_for_nothing():
    layer = Float32BatchNormalization(spikes="skip")
    trained(layer, [*sound(3), np.full((16, 3), np.nan, "float32")])
    assert (int(layer.batches), int(layer.spent)) == (3, 0)


def test_another_factor_is_saved(tmp_path):
    layer = Float32BatchNormalization(spikes=kmp.SkipSpikes(factor=1.5, patience=2))
    model = keras.Sequential([keras.Input((3,)), layer])
    trained(layer, [*sound(101), *sound(1, 30.0)])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").layers[0]
    assert loaded.spikes == layer.spikes and int(loaded.spent) == 10_000
    for mine, theirs in zip(layer.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_files_without_the_counts_load(tmp_path):
    """Those of the layer without the rule."""
    old = keras.Sequential([keras.Input((3,)), Float32BatchNormalization(name="norm")])
    old.layers[0].moving_mean.assign([1.0, 2.0, 3.0])
    old.save_weights(tmp_path / "old.weights.h5")
    layer = Float32BatchNormalization(spikes="skip", name="norm")
    new = keras.Sequential([keras.Input((3,)), layer])
    trained(layer, sound(2))
    new.load_weights(tmp_path / "old.weights.h5")
    np.testing.assert_array_equal(ops.convert_to_numpy(layer.moving_mean), [1, 2, 3])
    assert (int(layer.batches), int(layer.spent)) == (0, 0)


def test_another_word_is_refused():
    with pytest.raises(ValueError, match=r"Received: spikes='clip' .*Write spikes="):
        Float32BatchNormalization(spikes="clip")
