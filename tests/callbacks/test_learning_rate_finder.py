"""LearningRateFinder: the sweep is exact, the suggestion sound, and nothing of it stays."""

import random

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from linear_runs import SPE, data, linear_model
from older import of_keras

import kmp
from kmp.callbacks import LearningRateFinder
from kmp.callbacks.lr_range import has_diverged, smooth, steepest

pytestmark = pytest.mark.slow

OVERFLOW = 1e20  # of inputs: their loss is finite in float32, its gradient at 2**15 is not
RANGE = {"min_lr": 1e-5, "max_lr": 1e-2, "steps": 24}
QUIET = pytest.mark.filterwarnings("ignore:LearningRateFinder suggests nothing")


def losses_by_hand(rates, skipped=(), batch=4):
    """What SGD sees of the linear runs, in float64, where `skipped` batches never come."""
    x, y = (a.astype("float64") for a in data(steps=60, batch=batch))
    weights, bias, losses = np.zeros((2, 1)), 0.0, []
    batches = (step for step in range(60) if step not in skipped)
    for rate, step in zip(rates, batches, strict=False):
        rows = slice(step * batch, (step + 1) * batch)
        error = x[rows] @ weights + bias - y[rows]
        losses.append(np.mean(error**2))
        weights -= rate * 2 * x[rows].T @ error / batch
        bias -= rate * 2 * np.mean(error)
    return losses


def find(model, finder, poisoned=(), poison=np.inf, **arguments):
    x, y = data(steps=60, poisoned=poisoned, poison=poison)
    return finder.find(model, x, y, **{"batch_size": 4, "shuffle": False, **arguments})


OPTIMIZERS = {
    "kmp": lambda: kmp.scaled("sgd", learning_rate=0.5),
    "bare": lambda: keras.optimizers.SGD(0.5),
    "keras": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)),
}


@QUIET
@pytest.mark.parametrize("spe", SPE)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_points_are_those_of_a_run_by_hand(name, spe):
    model, finder = (
        linear_model(OPTIMIZERS[name](), steps_per_execution=spe),
        LearningRateFinder(**RANGE),
    )
    find(model, finder, callbacks=None)
    np.testing.assert_allclose(finder.learning_rates, np.geomspace(1e-5, 1e-2, 24), rtol=1e-12)
    # float32 against float64 over 24 steps of a contraction
    np.testing.assert_allclose(finder.losses, losses_by_hand(finder.learning_rates), rtol=1e-4)
    assert finder.stopped_because is None
    assert float(ops.convert_to_numpy(model.optimizer.learning_rate)) == 0.5


@QUIET
@pytest.mark.parametrize("spe", SPE)
def test_skipped_steps_are_no_points(spe):
    skipped = (5, 6, 14, 15, 20)
    model, finder = linear_model(steps_per_execution=spe), LearningRateFinder(**RANGE)
    find(model, finder, poisoned=skipped[:3], poison=OVERFLOW)
    by_hand = losses_by_hand(finder.learning_rates, skipped[:3])
    assert len(finder.losses) == 24
    np.testing.assert_allclose(finder.losses, by_hand, rtol=1e-4)
    find(model, finder, poisoned=skipped)  # losses that are not finite
    np.testing.assert_allclose(
        finder.losses, losses_by_hand(finder.learning_rates, skipped), rtol=1e-4
    )


@QUIET
@pytest.mark.parametrize("spe", SPE)
def test_steps_that_kerass_own_wrapper_skips_are_no_points_either(spe):
    model = linear_model(OPTIMIZERS["keras"](), steps_per_execution=spe)
    finder = LearningRateFinder(**RANGE)
    find(model, finder, poisoned=(5, 6, 14), poison=OVERFLOW)
    assert len(finder.losses) == 24
    by_hand = losses_by_hand(finder.learning_rates, (5, 6, 14))
    np.testing.assert_allclose(finder.losses, by_hand, rtol=1e-4)


def test_a_model_that_tells_no_loss_is_told_so():
    """And not to sweep another range."""

    class Silent(keras.Sequential):
        def train_step(self, *args):
            logs = {"nothing": ops.zeros(())}
            return (logs, args[0]) if BACKEND == "jax" else logs

    model = Silent([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    x, y = data()
    with pytest.warns(UserWarning) as caught:
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[LearningRateFinder(steps=10)])
    (said,) = (str(w.message) for w in caught if w.category is kmp.PrecisionWarning)
    assert said.startswith("LearningRateFinder sees no loss")


class Draw(keras.callbacks.Callback):
    """Draws numbers, as data and other callbacks do, while the sweep runs."""

    def on_train_batch_begin(self, batch, logs=None):
        random.random()
        np.random.random()


class DrawBefore(Draw):
    """And as `fit` does before it asks its callbacks: when it shuffles."""

    def set_model(self, model):
        super().set_model(model)
        np.random.random()


class Fault(keras.callbacks.Callback):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 8:
            raise self.error


def state(model):
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    values = {f"{i} {v.path}": np.array(ops.convert_to_numpy(v)) for i, v in enumerate(variables)}
    values["python"], values["numpy"] = random.getstate()[1], np.random.get_state()[1]
    return values


@pytest.fixture(scope="module")
def trained():
    """A model with statistics, seeds, a schedule, slots, averages, skips; trained a little."""
    keras.utils.set_random_seed(3)
    hidden = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((2,)), *hidden, keras.layers.Dense(1)])
    schedule = keras.optimizers.schedules.ExponentialDecay(1e-3, 10, 0.5)
    model.compile(kmp.scaled("adam", learning_rate=schedule, use_ema=True), "mse")
    x, y = data(poisoned=[2], poison=np.nan)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[kmp.callbacks.TerminateOnNaN()])
    assert int(model.optimizer.skipped_steps) == 1
    return model, schedule


ENDS = {
    "complete": ({**RANGE, "max_lr": 1e-4}, [DrawBefore()]),
    "diverged": ({"min_lr": 1e-3, "max_lr": 1e8, "steps": 30}, []),
    "interrupted": (RANGE, [Fault(KeyboardInterrupt())]),
    "failed": (RANGE, [Fault(OSError("the disk is gone"))]),
}


@QUIET
@pytest.mark.parametrize("end", ENDS)
def test_everything_is_put_back(trained, end):
    model, schedule = trained
    settings, callbacks = ENDS[end]
    finder, before = LearningRateFinder(**settings), state(model)
    try:
        find(model, finder, callbacks=callbacks, shuffle=True, batch_size=20)
    except (KeyboardInterrupt, OSError):
        assert end in ("interrupted", "failed") and 0 < len(finder.losses) < 10
    assert (finder.stopped_because is not None) == (end == "diverged")
    after = state(model)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    assert model.optimizer.inner_optimizer._learning_rate is schedule


@QUIET
def test_a_fit_of_ones_own_puts_everything_back_too(trained):
    model, _ = trained
    before = state(model)
    x, y = data(steps=24)
    callbacks = [Draw(), LearningRateFinder(**{**RANGE, "max_lr": 1e-4})]
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
    after = state(model)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


@QUIET
def test_training_goes_on_as_if_nothing_had_been():
    """Shuffled, with dropout: bit for bit what a twin without the sweep does."""
    x, y = data()
    watch = kmp.callbacks.TerminateOnNaN()
    ends = []
    for sweep in (True, False):
        keras.utils.set_random_seed(4)
        dropout = keras.layers.Dropout(0.5, seed=1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4), dropout])
        model.add(keras.layers.Dense(1))
        model.compile(kmp.scaled("adam"), "mse")
        # Before it has built the loss, fit draws one batch more.
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[watch])
        if sweep:
            find(model, LearningRateFinder(1e-4, 1.0, 10), shuffle=True)
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[watch])
        ends.append([ops.convert_to_numpy(v) for v in model.trainable_variables])
    for mine, other in zip(*ends, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("name", ["kmp", "bare"])
def test_the_suggestion_lies_below_what_diverges_and_not_far(name):
    """Gradient descent on a quadratic diverges above 2 over the largest curvature."""
    x, y = data(steps=1, batch=64)
    inputs = np.concatenate([x, np.ones((64, 1))], axis=1)
    limit = 2 / np.linalg.eigvalsh(2 * inputs.T @ inputs / 64).max()
    model, finder = linear_model(OPTIMIZERS[name]()), LearningRateFinder()
    repeated = [np.tile(a, (100, 1)) for a in (x, y)]  # one batch, again and again
    found = finder.find(model, *repeated, batch_size=64, shuffle=False)
    assert limit / 100 < found < limit
    assert found == finder.suggestion
    assert "diverged" in finder.stopped_because and finder.learning_rates[-1] < 10
    model.optimizer.learning_rate = found


def test_a_dead_run_ends(monkeypatch):
    model = linear_model()
    with pytest.warns(UserWarning, match="suggests nothing: in 0 points"):
        assert find(model, finder := LearningRateFinder(), poisoned=range(60)) is None
    assert finder.stopped_because == "10 losses or steps in a row were not finite"


def test_in_a_fit_that_is_too_short(tmp_path):
    model, finder = linear_model(), LearningRateFinder(log_dir=tmp_path / "logs")
    x, y = data()
    with pytest.warns(UserWarning) as caught:
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[finder])
    said = [str(w.message) for w in caught if w.category is kmp.PrecisionWarning]
    assert said[0].startswith("fit ended after 12 of 100 points of the sweep.")
    assert not ops.convert_to_numpy(model.layers[0].kernel).any()  # zeros, as it began
    finder.plot(tmp_path / "curve.png")
    from PIL import Image

    assert Image.open(tmp_path / "curve.png").size == (640, 400)
    (events,) = (tmp_path / "logs").iterdir()
    written = events.read_bytes()
    assert all(tag in written for tag in (b"smoothed_loss", b"/curve", b"/suggestion"))


def test_noise_leads_to_no_suggestion():
    """Of pure noise 1% of the curves do; here 200, of which 5 would be beyond bad luck."""
    draws = np.random.default_rng(0)
    rates = np.geomspace(1e-6, 10, 100)
    assert (
        sum(steepest(rates, 1 + 0.2 * draws.normal(size=100)) is not None for _ in range(200)) < 5
    )


def test_smoothing_does_not_lag():
    step = np.repeat([1.0, 0.0], 50)
    np.testing.assert_allclose(smooth(step) + smooth(step)[::-1], 1.0, rtol=1e-12)
    assert steepest(np.geomspace(1e-6, 1, 100), step) in (49, 50)


def test_divergence_of_losses_below_zero():
    assert not has_diverged([-1.0] * 20 + [-2.0] * 20)
    assert has_diverged([-1.0] * 20 + [50.0] * 5)


@pytest.mark.parametrize(
    "arguments", [{"min_lr": 0}, {"max_lr": 1e-7}, {"max_lr": np.inf}, {"steps": 9}], ids=str
)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}=.* default"):
        LearningRateFinder(**arguments)


@QUIET
def test_an_optimizer_of_several_parts_is_refused():
    """Each part has a rate of its own, and none of them would sweep."""
    sgd = keras.optimizers.SGD(0.5)
    model = linear_model(kmp.scaled(of_keras("optimizers.MultiOptimizer")(lambda v: sgd)))
    with pytest.raises(ValueError, match="one learning rate, and a MultiOptimizer has one for"):
        find(model, LearningRateFinder(**RANGE))
    model.compile(kmp.scaled("adam"), "mse")  # as the message says
    finder = LearningRateFinder(**RANGE)
    find(model, finder)
    assert len(finder.learning_rates) == RANGE["steps"]


def test_a_plot_of_nothing():
    with pytest.raises(ValueError, match="a finder with 0 points"):
        LearningRateFinder().plot("never.png")
