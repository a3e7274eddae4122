"""What a user sees of the steps that are left out as spikes, and what following the advice does."""

import re

import keras
import numpy as np
import pytest
from spiky_runs import classifier, digits, fit

import kmp
from kmp.callbacks import GradientHealth

WARNING = r"gradient spike in .*/kernel \(.*\): step 31, batch 30 of this epoch .* was left out"


def test_one_bad_batch_is_named_and_the_run_is_sound(tmp_path):
    model, watch = classifier(), GradientHealth(log_dir=tmp_path)
    with pytest.warns(kmp.PrecisionWarning, match=WARNING):
        history = fit(model, *digits(40, bad=[30]), callbacks=[watch])
    assert history["skipped_spikes"] == [1] and history["spike_score"] == [1 / 40]
    assert watch.verdict.state == "HEALTHY"
    told = (
        r"1 of the last 40 steps skipped, 1 of them as spikes \(step 31; gradients up to .* times"
    )
    assert re.search(told, watch.verdict.reason)
    assert watch.verdict.advice.startswith("Look at the batches of the spikes")
    (event,) = watch.report.spikes
    assert event.step == 31 and event.norm > event.limit and event.growth > 100
    assert "Left out as spikes, the latest first:" in str(watch.report)
    assert watch.report.spike_limit is not None and watch.report.overflow_skips == 0


def test_without_the_rule_nothing_is_said_of_spikes():
    model = classifier()
    model.compile(kmp.scaled("sgd"), model.loss)
    watch = GradientHealth()
    history = fit(model, *digits(20), callbacks=[watch])
    assert "skipped_spikes" not in history
    assert watch.report.skipped_spikes is None and watch.report.spike_limit is None


@pytest.mark.filterwarnings("ignore:Step")
def test_data_that_have_changed_spend_the_budget_and_are_followed():
    """The advice is to go on: from then on every step is applied."""
    model, watch = classifier(name="adam"), GradientHealth()
    x, y = digits(80)
    x[30:] *= 1e4
    fit(model, x, y, callbacks=[watch])
    assert watch.verdict.state == "UNSTABLE"
    assert "8 of the last 80 steps were left out as spikes. Their budget" in watch.verdict.reason
    assert "go on: the limit has followed them" in watch.verdict.advice
    applied = int(model.optimizer.iterations)
    history = fit(model, x[30:], y[30:], callbacks=[watch], epochs=3)
    assert history["skipped_spikes"] == [8, 8, 8]
    assert int(model.optimizer.iterations) == applied + 3 * 50


def loss_of_bad_batches(rate=0.2, **settings):
    """The loss on sound data after training where many batches are bad."""
    random = np.random.default_rng(3)
    bad = 20 + np.flatnonzero(random.random(180) < rate)
    model = classifier(momentum=0.9, **settings)
    with kmp.protect(model):
        fit(model, *digits(200, bad=bad))
    x, y = digits(4)
    return model.evaluate(x.reshape(-1, 8), y.reshape(-1), verbose=0)[0]


def test_where_many_batches_are_bad_clipping_helps():
    """As the advice says once the budget is spent."""
    clipped = loss_of_bad_batches(global_clipnorm=1.0)
    assert clipped < 0.2 * loss_of_bad_batches()


@pytest.mark.filterwarnings("ignore:Step.*UNSTABLE")
def test_held_statistics_are_told():
    model, watch = classifier((keras.layers.BatchNormalization(),)), GradientHealth()
    with pytest.warns(kmp.PrecisionWarning, match="normalizations were held in a step, which"):
        fit(model, *digits(120, bad=[110]), callbacks=[watch])
    assert watch.report.held_statistics == 1
    assert "batch statistics were held: 1" in str(watch.report)
    assert str(watch.verdict).endswith(
        "0 skipped, batch statistics held in 1 step. Look at the batches of those steps: their "
        "inputs are far too large."
    )
    fit(model, *digits(20), callbacks=[watch])  # in which none were held
    assert "held" not in str(watch.verdict)
