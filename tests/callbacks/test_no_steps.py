"""An optimizer that takes no step: HEALTHY is what nobody would call it."""

import keras
import numpy as np
import pytest
from forgetful import Forgetful
from reports import look_at, verdict_on

import kmp
from kmp.callbacks.verdict.observation import Weight
from kmp.callbacks.verdict.stalled import NoSteps

pytestmark = pytest.mark.filterwarnings("ignore:Step 0. STALLED", "ignore:Gradients do not exist")


def fit(stepped, watched=None, batches=8):
    """Fit a model that is compiled with its own optimizer, and steps `stepped`."""
    model = Forgetful([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd", learning_rate=0.01), "mse")
    model.stepped = stepped
    if stepped is not None:
        model.hands_to.build(model.trainable_variables)
    before = model.get_weights()
    watch = kmp.callbacks.GradientHealth(optimizer=watched)
    x = np.ones((4 * batches, 4), "float32")
    history = model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[watch])
    moved = any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))
    return watch.verdict, history.history, moved


@pytest.mark.slow
def test_a_train_step_that_forgets_the_optimizer():
    """And that remembers it, as the advice says."""
    verdict, logs, moved = fit(None)
    assert verdict.state == "STALLED" and not moved
    assert "took no step in the last 16 batches" in verdict.reason
    assert logs["verdict"] == ["STALLED", "STALLED"]
    assert "stateless_apply" in verdict.advice and "optimizer.apply" in verdict.advice
    verdict, _, moved = fit("its own")
    assert verdict.state == "HEALTHY" and moved, str(verdict)


@pytest.mark.slow
@pytest.mark.only("tensorflow", "torch")
def test_a_train_step_of_another_optimizer():
    """And `GradientHealth` that watches that one, as the advice says."""
    other = kmp.scaled("sgd", learning_rate=0.01)
    verdict, _, moved = fit(other)
    assert verdict.state == "STALLED" and moved
    assert "GradientHealth(optimizer=...)" in verdict.advice
    other = kmp.scaled("sgd", learning_rate=0.01)
    verdict, _, moved = fit(other, watched=other)
    assert verdict.state == "HEALTHY" and moved, str(verdict)


def test_the_wrong_optimizer_is_watched():
    """It is not even built."""
    verdict, _, _ = fit("its own", watched=kmp.scaled("sgd"))
    assert verdict.state == "STALLED" and "took no step in the last 8 batches" in verdict.reason


@pytest.mark.only("tensorflow")
@pytest.mark.filterwarnings("ignore:Your input ran out of data", "ignore:`shuffle=True` was passed")
def test_a_dataset_without_a_batch():
    """And one with all examples, as the advice says."""
    import tensorflow as tf

    examples = tf.data.Dataset.from_tensor_slices((np.ones((6, 4)), np.ones((6, 1))))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd", learning_rate=0.01), "mse")
    watch = kmp.callbacks.GradientHealth()
    model.fit(examples.batch(32, drop_remainder=True), verbose=0, callbacks=[watch])
    assert (
        "STALLED: no batch came" in str(watch.verdict)
        and "drop_remainder=F" in watch.verdict.advice
    )
    model.fit(examples.batch(32, drop_remainder=False), verbose=0, callbacks=[watch])
    assert watch.verdict.state == "HEALTHY"


@pytest.mark.parametrize(
    "steps, batches, state",
    [
        ((8, 16), 8, None),
        ((0,), 1, None),  # one batch says nothing
        ((0, 0), 1, "STALLED"),
        ((8, 8), 8, None),  # a generator that steps every tenth batch
        ((8, 8, 8, 8), 8, "STALLED"),
        ((8, 8, 8, 9), 8, None),
        ((0,), 0, "STALLED"),  # no data
        ((8, 8), 0, "STALLED"),  # no more data
        ((8, 9), 0, None),  # a loop that calls no hooks of batches
    ],
)
def test_batches_without_a_step(steps, batches, state):
    detector = NoSteps()
    for step in steps:
        report = kmp.GradientReport(("w",), np.ones((1, 5), "float32"), 1.0, step, 0, 0)
        found = detector.see(look_at(report, losses={}, batches=batches))
    assert (found and found.state) == state


def fitted(layers, shape=(4,)):
    model = keras.Sequential([keras.Input(shape), *layers])
    model.compile(kmp.scaled("sgd", learning_rate=0.01), loss="mse")
    watch = kmp.callbacks.GradientHealth()
    x = np.ones((8, *shape))
    model.fit(x, np.zeros(model.compute_output_shape(x.shape)), verbose=0, callbacks=[watch])
    return watch.verdict


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize(
    "layers",
    [[keras.layers.Flatten], [lambda: keras.layers.BatchNormalization(scale=False, center=False)]],
    ids=["no weights", "none to train"],
)
def test_a_model_without_trainable_weights_is_not_called_frozen(layers):
    with pytest.warns(kmp.PrecisionWarning, match="STALLED"):
        found = fitted([layer() for layer in layers])
    assert found.state == "STALLED" and "the model has no trainable weights" in found.reason
    assert "layer.trainable" not in found.advice and "keras.layers.Dense" in found.advice
    assert fitted([keras.layers.Dense(1), *(layer() for layer in layers)]).state == "HEALTHY"


def test_weights_of_size_zero_cannot_be_trained():
    head = keras.layers.Dense(4, use_bias=False, name="head")
    with pytest.warns(kmp.PrecisionWarning, match="STALLED"):
        found = fitted([head], shape=(0,))
    assert found.state == "STALLED" and "are empty" in found.reason, str(found)
    assert found.blame == head.kernel.path and "size 0" in found.advice
    assert fitted([keras.layers.Dense(4, use_bias=False)], shape=(1,)).state == "HEALTHY"


def test_an_empty_weight_does_not_hide_lost_gradients():
    matrix = np.float32([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    seen = kmp.GradientReport(("kernel", "empty"), matrix, 1.0, 5, 0, 0)
    weights = {
        "kernel": Weight("dense", "float16"),
        "empty": Weight("dense", "float16", sample=0),
    }
    look = look_at(seen, rule=kmp.StaticLossScale(1.0), weights=weights)
    assert verdict_on(look, look).state == "UNDERFLOW"
