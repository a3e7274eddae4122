"""TerminateOnNaN: stops the dead, and nobody else."""

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from linear_runs import RATE, SPE, fit, last_progress, linear_model

import kmp

TerminateOnNaN = kmp.callbacks.TerminateOnNaN


@pytest.mark.parametrize("spe", SPE)
def test_skipped_steps_stop_nothing(spe):
    stop = TerminateOnNaN(patience=3, update_freq=1)
    model = linear_model(steps_per_execution=spe)
    history = fit(model, [stop], poisoned=[0, 1, 3, 6, 7, 10], epochs=2)
    assert history["skipped_steps"] == [6, 12] and stop.stopped_because is None


def test_a_row_that_ended_between_two_looks_stops_nothing():
    stop = TerminateOnNaN(patience=3, update_freq=6)
    history = fit(linear_model(), [stop], poisoned=[1, 2, 3, 4], epochs=2)
    assert history["skipped_steps"] == [4, 8] and stop.stopped_because is None


@pytest.mark.slow
@pytest.mark.parametrize("spe", SPE)
def test_a_row_of_skipped_steps_stops_with_its_counts(spe):
    stop = TerminateOnNaN(patience=4, update_freq=4)
    model = linear_model(steps_per_execution=spe)
    with pytest.warns(UserWarning, match=r"Training stops\.$") as caught:
        history = fit(model, [stop], poisoned=range(2, 12), epochs=2)
    assert len([w for w in caught if w.category is kmp.PrecisionWarning]) == 1
    assert stop.stopped_because.startswith(
        "Step 8: 6 steps in a row were skipped and 6 losses in a row were not finite (patience=4), "
        "so that no loss scale can help"
    )
    # Keras looks at `stop_training` after the execution that comes next.
    assert last_progress(model).seen_steps == 8 + spe and len(history["loss"]) == 1


def test_skipped_steps_with_a_finite_loss_are_told_apart():
    model = linear_model(kmp.scaled("sgd", 2.0**100, learning_rate=RATE))
    stop = TerminateOnNaN(patience=5, update_freq=5)
    with pytest.warns(UserWarning, match="Step 5: 5 steps .* 0 losses .* cannot fall any further"):
        fit(model, [stop], poisoned=range(12), poison=2.0**30)


@pytest.mark.parametrize("spe", SPE)
def test_a_weight_that_is_not_finite_is_named(spe):
    stop = TerminateOnNaN(update_freq=4)
    model = linear_model("sgd", steps_per_execution=spe)
    with pytest.warns(UserWarning, match=r"Step 4: 2 weights are not finite: .*dense/kernel, .*bi"):
        fit(model, [stop], poisoned=[2])


def test_at_the_end_of_an_epoch_it_looks_too():
    stop = TerminateOnNaN()
    with pytest.warns(UserWarning, match="Step 12: 2 weights are not finite"):
        history = fit(linear_model("sgd"), [stop], poisoned=[11], epochs=2)
    assert len(history["loss"]) == 1


def test_with_an_optimizer_that_does_not_say_so_the_losses_count():
    """Keras's loss scaling keeps the weights finite."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE))
    stop = TerminateOnNaN(patience=5, update_freq=5)
    with pytest.warns(UserWarning, match="0 steps in a row were skipped and 8 losses"):
        fit(linear_model(optimizer), [stop], poisoned=range(2, 12))


def test_a_second_fit_begins_anew():
    stop = TerminateOnNaN(patience=2, update_freq=2)
    model = linear_model()
    with pytest.warns(UserWarning, match="Step 4: 2 steps"):
        fit(model, [stop], poisoned=[2, 3])
    fit(model, [stop], poisoned=[5])
    assert stop.stopped_because is None


@pytest.mark.filterwarnings("ignore:.* sees no loss")
def test_where_it_sees_no_loss_it_looks_as_often():
    class Silent(keras.Sequential):
        def train_step(self, *args):
            logs = {"nothing": ops.zeros(())}
            return (logs, args[0]) if BACKEND == "jax" else logs

    class Stop(TerminateOnNaN):
        looks = 0

        def _look(self):
            self.looks += 1
            return super()._look()

    model, stop = Silent([keras.Input((2,)), keras.layers.Dense(1)]), Stop(update_freq=5)
    model.compile("sgd", loss="mse")
    fit(model, [stop], epochs=2)
    assert stop.looks == 6  # before the steps 6 and 11 of 12, and after the last


def test_each_look_is_one_transfer(monkeypatch):
    stop, transfers, model = TerminateOnNaN(), [], linear_model()
    fit(model, [stop])
    kmp.protect(model)
    model.make_train_function()
    monkeypatch.setattr(ops, "convert_to_numpy", lambda x: transfers.append(x) or np.asarray(x))
    assert stop._look().seen_steps == 12
    assert len(transfers) == 1


def test_asynchronous_dispatch_stays_on():
    assert TerminateOnNaN.on_train_batch_end is keras.callbacks.Callback.on_train_batch_end


def test_it_can_raise_instead():
    """No callback's `on_train_end` is called; the model is as it was, and can train on."""
    ended = []
    last = keras.callbacks.LambdaCallback(on_train_end=lambda logs: ended.append(logs))
    stop = TerminateOnNaN(patience=3, update_freq=3, raise_error=True)
    model = linear_model()
    with pytest.raises(RuntimeError, match=r"Step 6: 3 steps in a row .* Training ends\.$"):
        fit(model, [stop, last], poisoned=range(3, 12))
    assert not ended and "make_train_function" not in vars(model)
    assert int(ops.convert_to_numpy(model.optimizer.skipped_steps)) == 3
    history = fit(model, [TerminateOnNaN()])
    assert history["skipped_steps"] == [3]


def test_raise_error_is_true_or_false():
    with pytest.raises(ValueError, match="`raise_error` of TerminateOnNaN must be True or False"):
        TerminateOnNaN(raise_error="yes")


@pytest.mark.parametrize(
    "arguments", [{"patience": 0}, {"patience": 1.5}, {"update_freq": 0}], ids=str
)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=f"`{next(iter(arguments))}`.* must be a whole number"):
        TerminateOnNaN(**arguments)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Step")
def test_watching_changes_no_weight():
    weights = []
    for callbacks in ([], [TerminateOnNaN(update_freq=1)]):
        model = linear_model()
        fit(model, callbacks, epochs=2)
        weights.append(model.get_weights())
    for plain, watched in zip(*weights, strict=True):
        np.testing.assert_array_equal(plain, watched)
