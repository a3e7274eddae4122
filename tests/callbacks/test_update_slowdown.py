"""Updates that stay small because the optimizer remembers one huge batch."""

import keras
import numpy as np
import pytest
from linear_runs import SPE
from oracle import few
from reports import look_at

import kmp
from kmp.callbacks.verdict.large_steps import UpdateSlowdown
from kmp.callbacks.verdict.observation import Weight
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    detector = UpdateSlowdown()
    assert detector.see(at_epoch_end(report(99, 1e-3), rate=0.1)) is None
    found = detector.see(at_epoch_end(report(199, update, grad_norm), rate))
    assert bool(found) == bool(seen)
    if found:
        assert found.blame == "a/kernel" and found.reason.startswith(seen)


def at_epoch_end(report, rate=0.1, **kwargs):
    return look_at(report, learning_rate=rate, **{"weights": WEIGHTS, "losses": {}, **kwargs})


def test_updates_that_float32_rounds_are_not_compared():
    detector = UpdateSlowdown()
    assert detector.see(at_epoch_end(report(99, 3e-7))) is None
    assert detector.see(at_epoch_end(report(199, 3e-9))) is None


def test_what_was_slow_is_not_what_later_reports_are_compared_with():
    detector = UpdateSlowdown()
    updates = [1e-3, 1e-5, 1e-5, 1e-5, 1e-5, 1e-3]
    found = [detector.see(at_epoch_end(report(100 * i, x))) for i, x in enumerate(updates, 1)]
    assert [x is not None for x in found] == [False, True, True, True, True, False]


def test_one_small_step_of_a_batch_of_all_data_is_sound():
    """As where Adam's momentum changes its sign; what lasts is seen all the same."""
    detector = UpdateSlowdown()
    updates = [3e-4, 2e-4, 1e-4, 5e-6, 1e-4, 2e-4]
    assert not any(detector.see(at_epoch_end(report(107 + i, x))) for i, x in enumerate(updates))
    found = [detector.see(at_epoch_end(report(113 + i, 5e-6))) is not None for i in range(25)]
    assert found == [False] * 19 + [True] * 6


def test_a_slow_decline_is_sound():
    """As Adagrad's over many epochs: the last three are compared."""
    detector = UpdateSlowdown()
    reports = [report(100 * (i + 1), 1e-2 / 2**i) for i in range(10)]
    assert not any(detector.see(at_epoch_end(x)) for x in reports)


def test_no_learning_rate_is_asked_for_where_nothing_has_moved():
    look = look_at(report(1, 0.0), learning_rate=lambda: 1 / 0, weights=WEIGHTS, losses={})
    assert UpdateSlowdown().see(look) is None


def test_what_adagrad_sums_up_in_a_long_epoch_is_sound():
    detector = UpdateSlowdown()
    assert detector.see(at_epoch_end(report(150, 1e-2))) is None
    later = report(200_000, 1e-2 / np.sqrt(200_000 / 150))  # 37 times smaller
    assert detector.see(at_epoch_end(later)) is None


def test_an_epoch_that_ends_in_a_step_without_an_update():
    """As with gradient accumulation: the last update of the epoch counts."""
    detector = UpdateSlowdown()
    assert not detector.see(at_epoch_end(report(150, 1e-3), losses=None))
    assert not detector.see(at_epoch_end(report(200, 1e-5), losses=None))
    assert detector.see(at_epoch_end(report(210, 0.0))).blame == "a/kernel"
    assert not detector.see(at_epoch_end(report(400, 0.0)))  # nothing has moved in this epoch


@pytest.mark.quick
@pytest.mark.parametrize("moved, seen", [(8, False), (64, True)])
def test_half_precision_of_which_few_numbers_have_moved_is_not_compared(moved, seen):
    """The step of a few numbers is as long as the last bit of the largest of them."""
    weights = {
        path: weight._replace(dtype="bfloat16", moves_rarely=True)
        for path, weight in WEIGHTS.items()
    }
    detector, found = UpdateSlowdown(), None
    for step, update in (99, 1e-3), (199, 1e-5):
        looked_at = report(step, update)
        looked_at.details[:, COLUMNS.index("unmoved_share")] = 1 - moved / 4096
        found = detector.see(at_epoch_end(looked_at, weights=weights))
    assert bool(found) == seen
