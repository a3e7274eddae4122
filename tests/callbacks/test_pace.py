"""Updates that stay small because the optimizer remembers one huge batch."""

import keras
import numpy as np
import pytest
from linear_runs import SPE
from oracle import few

import kmp
from kmp.callbacks.verdict.pace import Pace
from kmp.callbacks.verdict.spoiled import Spoilage
from kmp.callbacks.verdict.standstill import Weight
from kmp.health.details import BINS, COLUMNS

WEIGHTS = {"a/kernel": Weight("a"), "b/kernel": Weight("b"), "b/bias": Weight("b", is_matrix=False)}


def fit(optimizer, times=1.0, epochs=1, **kwargs):
    """Epochs of 300 steps; the labels of step 160 are so many times as large."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(2400, 8)).astype("float32")
    y = np.tanh(x.sum(axis=1, keepdims=True))
    y[1280:1288] *= times
    model = keras.Sequential([keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
    model.compile(kmp.scaled(optimizer), "mse", **kwargs)
    watch = kmp.callbacks.GradientHealth(update_freq=50)
    model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=[watch])
    assert int(model.optimizer.skipped_steps) == 0
    return watch.verdict


@pytest.mark.parametrize("spe", SPE)
def test_slots_that_remember_one_huge_batch(spe):
    """Adam divides by the size of its gradient for thousands of steps, and nothing moves."""
    with pytest.warns(kmp.PrecisionWarning, match="UNSTABLE in .*updates are"):
        verdict = fit("adam", times=1e7, steps_per_execution=spe)
    assert verdict.blame.endswith("kernel") and "a new optimizer" in verdict.advice


schedules = keras.optimizers.schedules
SOUND = {
    "steady": lambda: keras.optimizers.Adam(),
    "falling": lambda: keras.optimizers.Adam(schedules.CosineDecay(0.01, 600, alpha=1e-4)),
    "adagrad": lambda: keras.optimizers.Adagrad(),
    # The rate jumps between the last step of an epoch and the next.
    "restarts": lambda: keras.optimizers.Adam(
        schedules.CosineDecayRestarts(0.01, 300, t_mul=1.0, alpha=1e-4)
    ),
    "a step down": lambda: keras.optimizers.Adam(
        schedules.PiecewiseConstantDecay([299], [1e-2, 1e-4])
    ),
    # The velocity holds what higher rates have added to it.
    "momentum": lambda: keras.optimizers.SGD(
        schedules.CosineDecayRestarts(0.01, 300, t_mul=2.0, alpha=1e-4), momentum=0.9
    ),
}


@pytest.mark.parametrize("name", few(SOUND, "steady", "restarts", "momentum"))
def test_what_is_sound_is_called_so(name):
    assert fit(SOUND[name](), epochs=3).state == "HEALTHY"


def report(step, update, grad_norm=1.0):
    """Weights of norm 1: the first kernel moves by `update`, the second 3 times as far."""
    details = np.zeros((3, len(COLUMNS) + BINS), "float32")
    details[:, COLUMNS.index("weight_norm")] = 1
    details[:, COLUMNS.index("update_norm")] = [update, 3 * update, 1e-9 if update else 0]
    health = np.full((3, 5), grad_norm / np.sqrt(3), "float32")
    return kmp.GradientReport(tuple(WEIGHTS), health, 1024.0, step, 0, 0, details=details)


@pytest.mark.parametrize(
    "case, update, grad_norm, rate, seen",
    [
        (
            "31 times smaller",
            1e-3 / 31,
            1.0,
            0.1,
            "updates are 31 times smaller than after step 99,",
        ),
        ("29 times smaller", 1e-3 / 29, 1.0, 0.1, None),
        ("as the learning rate", 1e-5, 1.0, 1e-3, None),
        ("no smaller, at a higher rate", 1e-3, 1.0, 10.0, None),
        ("smaller, at a higher rate", 1e-5, 1.0, 10.0, "updates are 100 times smaller"),
        ("as the gradients", 1e-5, 0.01, 0.1, None),
        ("more than the gradients", 1e-5, 0.5, 0.1, "updates are 50 times smaller"),
        ("a learning rate of 0", 1e-5, 1.0, 0.0, None),
        ("nothing has moved", 0.0, 1.0, 0.1, None),
    ],
)
def test_updates_are_compared_at_the_same_rate_and_gradient(case, update, grad_norm, rate, seen):
    pace = Pace()
    assert pace.see(report(99, 1e-3), WEIGHTS, lambda paths: 0.1) is None
    found = pace.see(report(99, update, grad_norm), WEIGHTS, lambda paths: rate)
    assert found == seen or (found[0] == "a/kernel" and found[1].startswith(seen))


def test_updates_that_float32_rounds_are_not_compared():
    pace = Pace()
    assert pace.see(report(99, 3e-7), WEIGHTS, lambda paths: 0.1) is None
    assert pace.see(report(99, 3e-9), WEIGHTS, lambda paths: 0.1) is None


def test_what_was_slow_is_not_what_later_reports_are_compared_with():
    pace = Pace()
    updates = [1e-3, 1e-5, 1e-5, 1e-5, 1e-5, 1e-3]
    found = [pace.see(report(99, x), WEIGHTS, lambda paths: 0.1) for i, x in enumerate(updates)]
    assert [x is not None for x in found] == [False, True, True, True, True, False]


def test_a_slow_decline_is_sound():
    """As Adagrad's over many epochs: the last three are compared."""
    pace = Pace()
    assert not any(pace.see(report(99, 1e-2 / 2**i), WEIGHTS, lambda paths: 0.1) for i in range(10))


def test_no_learning_rate_is_asked_for_where_nothing_has_moved():
    assert Pace().see(report(1, 0.0), {}, lambda paths: 1 / 0) is None


def test_what_adagrad_sums_up_in_a_long_epoch_is_sound():
    pace = Pace()
    assert pace.see(report(150, 1e-2), WEIGHTS, lambda paths: 0.1) is None
    later = report(200_000, 1e-2 / np.sqrt(200_000 / 150))  # 37 times smaller
    assert pace.see(later, WEIGHTS, lambda paths: 0.1) is None


def test_an_epoch_that_ends_in_a_step_without_an_update():
    """As with gradient accumulation: the last update of the epoch counts."""
    spoilage, optimizer = Spoilage(), kmp.scaled("sgd", learning_rate=0.1)
    optimizer.build([keras.Variable([1.0])])

    def look(step, update, at_end):
        seen = report(step, update)
        rest = WEIGHTS, lambda paths: 0.1, at_end
        return spoilage.look(None, [], optimizer, seen, *rest)

    assert not look(150, 1e-3, False)
    assert not look(200, 1e-5, False)
    (found,) = look(210, 0.0, True)
    assert found.path == "a/kernel"
    assert not look(400, 0.0, True)  # nothing has moved in this epoch
