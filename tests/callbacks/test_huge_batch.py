"""One batch with a huge, finite loss, after which training is worse than before it."""

import warnings

import keras
import numpy as np
import pytest
from linear_runs import SPE
from older import of_keras
from reports import Told, look_at

import kmp
from kmp.callbacks.verdict.large_steps import HugeBatch, deviations
from kmp.callbacks.verdict.observation import Run

HUGE = 1e8  # times the weight of a sample


def fit(at=40, batch_weight=HUGE, spe=1, epochs=1, drop=False, scaled=(), **inner):
    """Epochs of 80 steps of Adam; the verdict and the losses of the epochs.

    Args:
        at: the step, from 0, whose samples weigh more.
        drop: whether that batch is left out.
        scaled: arguments of `kmp.scaled`.
    """
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(640, 8)).astype("float32")
    y, weights = np.tanh(x.sum(axis=1, keepdims=True)), np.ones(640, "float32")
    weights[8 * at : 8 * at + 8] = batch_weight
    if drop:
        x, y, weights = (np.delete(part, np.s_[8 * at : 8 * at + 8], 0) for part in (x, y, weights))
    model = keras.Sequential([keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
    adam = keras.optimizers.AdamW(0.03, **inner)
    model.compile(kmp.scaled(adam, **dict(scaled)), "mse", steps_per_execution=spe)
    watch = kmp.callbacks.GradientHealth()
    past = model.fit(
        x,
        y,
        sample_weight=weights,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[watch],
    ).history
    return watch.verdict, past["loss"][-1]


@pytest.mark.filterwarnings("ignore:Step")
@pytest.mark.parametrize("spe", SPE)
def test_a_batch_that_throws_the_weights_away(spe):
    """It is finite, and its step applied; Adam divides by it from then on."""
    verdict, _ = fit(spe=spe)
    assert verdict.state == "UNSTABLE", str(verdict)
    assert verdict.reason.startswith("the loss of step 41 was ") and "median" in verdict.reason
    assert fit(batch_weight=1.0)[0].state == "HEALTHY"


@pytest.mark.filterwarnings("ignore:Step")
def test_its_advice_helps():
    """With `spikes="skip"` the run is the one without that batch."""
    verdict, _ = fit()
    assert 'spikes="skip"' in verdict.advice and "explain_spike" in verdict.advice
    cured, loss = fit(scaled={"spikes": "skip"})
    assert cured.state == "HEALTHY" and "step 41" in cured.reason
    without, expected = fit(drop=True)
    assert without.state == "HEALTHY" and loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:Step")
def test_its_advice_helps_early_in_the_run():
    """`spikes="skip"` knows no limit before the 17th step."""
    verdict, _ = fit(at=10)
    assert verdict.state == "UNSTABLE" and "spikes" not in verdict.advice, str(verdict)
    assert "begin again without it. If its samples are rare" in verdict.advice
    assert fit(at=10, scaled={"spikes": "skip"})[0].state == "UNSTABLE"
    assert fit(at=10, global_clipnorm=1.0)[0].state == "HEALTHY"
    assert fit(at=10, drop=True)[0].state == "HEALTHY"


@pytest.mark.filterwarnings("ignore:Step")
@pytest.mark.parametrize("name", ["lion", "adam", "rmsprop", "sgd"])
def test_an_optimizer_that_remembers_the_batch(name):
    """Lion goes on in its direction, the next two divide by its size. Clipped, SGD forgets it."""
    optimizer = keras.optimizers.get(name)
    if name == "sgd":
        optimizer = keras.optimizers.SGD(momentum=0.9, global_clipnorm=1.0)
    model = model_with_an_epoch(optimizer)
    slots = Run(model, model.optimizer).remembered_gradients()
    assert sorted(x.split("/")[-1] for x in slots) == ["bias", "bias", "kernel", "kernel"]
    assert (min(slots.values()) > 1e3) == (name != "sgd"), slots


def model_with_an_epoch(optimizer):
    """A model after an epoch of 40 steps, the 11th of which had huge weights."""
    x = np.random.default_rng(0).normal(size=(320, 8)).astype("float32")
    y, weights = np.tanh(x.sum(axis=1, keepdims=True)), np.ones(320, "float32")
    weights[80:88] = HUGE
    model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(kmp.scaled(optimizer), "mse")
    model.fit(x, y, sample_weight=weights, batch_size=8, shuffle=False, verbose=0)
    return model


def test_the_size_of_what_slots_hold():
    """By hand: the norm of the momentum, or the root of the velocity's sum if that is larger."""
    model = model_with_an_epoch("adam")
    inner = model.optimizer.inner_optimizer
    for slot in inner.variables:
        if "kernel_momentum" in slot.name:
            slot.assign(np.full(slot.shape, 3.0))
        elif "kernel_velocity" in slot.name:
            slot.assign(np.full(slot.shape, 16.0 if "dense_1" not in slot.name else 4.0))
    slots = Run(model, model.optimizer).remembered_gradients()
    first, second = (layer.kernel for layer in model.layers)
    assert slots[first.path] == pytest.approx(4 * 32**0.5)
    assert slots[second.path] == pytest.approx(3 * 4**0.5)


def rare_class(num_rare=1, weight=1e5, policy="mixed_float16", scaled=(), **inner):
    """20 epochs of 16 steps of Adam; samples of a rare class weigh much.

    Args:
        num_rare: samples of that class, of 512.

    Returns:
        The verdict, all that was said, how many of those samples are found, and how many others
        are taken for such.
    """
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    x, y = np.random.default_rng(0).normal(size=(512, 8)).astype("float32"), np.zeros(512, "int32")
    rare = (np.arange(num_rare) + 0.5) * 512 // num_rare
    y[rare.astype(int)], x[rare.astype(int)] = 1, x[rare.astype(int)] + 3
    model = keras.Sequential(
        [keras.layers.Dense(16, "relu"), kmp.layers.Float32OutputDense(2, name="logits")]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.Adam(0.01, **inner)
    model.compile(kmp.scaled(adam, **dict(scaled)), loss)
    watch = kmp.callbacks.GradientHealth()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.fit(
            x,
            y,
            class_weight={0: 1.0, 1: weight},
            batch_size=32,
            epochs=20,
            shuffle=False,
            verbose=0,
            callbacks=[watch],
        )
    found = model.predict(x, verbose=0).argmax(-1)
    said = "".join([*(str(x.message) for x in told), str(watch.verdict)])
    return watch.verdict, said, int(found[y == 1].sum()), int(found[y == 0].sum())


def test_a_rare_class_that_weighs_much_is_no_bad_batch():
    """Four samples, each alone in its batch. In float16 their first steps overflow."""
    for policy in ("mixed_bfloat16", "mixed_float16"):
        verdict, said, found, _ = rare_class(4, policy=policy)
        assert verdict.state == "HEALTHY" and found == 4, (policy, str(verdict))
        assert "the largest of those before it" not in said


def test_the_advice_for_one_rare_sample_helps():
    """It is met once in each epoch, as a bad row is, so the advice is for both."""
    bfloat16 = {"policy": "mixed_bfloat16", "weight": 1e7}
    verdict, said, found, mistaken = rare_class(**bfloat16)
    assert verdict.state == "UNSTABLE" and found == 1 and mistaken, str(verdict)
    assert " If its samples are rare and weigh much, begin again with global_clipnorm=1.0." in said
    verdict, said, found, mistaken = rare_class(**bfloat16, global_clipnorm=1.0)
    assert (verdict.state, found, mistaken) == ("HEALTHY", 1, 0)
    assert "UNSTABLE" not in said


def test_the_advice_for_one_rare_sample_in_float16_helps():
    """Its steps are skipped at first, and it does harm later; leaving it out forgets it."""
    verdict, _, found, mistaken = rare_class()
    assert verdict.state == "UNSTABLE" and found == 1 and mistaken, str(verdict)
    assert verdict.advice.endswith(
        ' begin again with global_clipnorm=1.0 in "mixed_bfloat16", where its gradients do not '
        "overflow."
    )
    *_, found, _ = rare_class(scaled={"spikes": "skip"})
    assert not found
    clipped, _, _, _ = rare_class(global_clipnorm=1.0)
    assert clipped.advice.endswith(
        ' begin again in "mixed_bfloat16", where its gradients do not overflow.'
    )


LEVEL = [1.0, 1.1, 0.9, 1.2, 0.8] * 10


def verdict_on(*looks, skipped_spikes=None):
    """The last verdict of the detector on looks that have seen these losses."""
    detector, step, found = HugeBatch(), 0, None
    for losses in looks:
        step += len(losses)
        report = kmp.GradientReport(
            ("w",), np.ones((1, 5), "float32"), 1.0, step, 0, 0, skipped_spikes=skipped_spikes
        )
        found = detector.see(look_at(report, new_losses=losses))
    return found


@pytest.mark.parametrize(
    "case, looks, speaks",
    [
        ("it throws the weights away", ([*LEVEL, 121.0], [2.0] * 20), True),
        ("in one look", ([*LEVEL, 121.0, *[2.0] * 20],), True),
        ("99 times the largest", ([*LEVEL, 119.0], [2.0] * 20), False),
        ("too few since", ([*LEVEL, 121.0], [2.0] * 19), False),
        ("no harm", ([*LEVEL, 121.0], LEVEL), False),
        ("1.4 times as high", ([*LEVEL, 121.0], [x * 1.4 for x in LEVEL]), False),
        ("four losses before", (LEVEL[:4], [121.0], [2.0] * 20), False),
        ("five, below most of those since", (LEVEL[:5], [121.0], [2.0] * 20), True),
        ("five, as wild as those since", ([1.0, 1.0, 1.0, 9.0, 9.0, 1e4, *[8.0] * 20],), False),
        ("a new level", ([*LEVEL, 121.0], [50.0] * 60), False),
        ("rare huge batches", ([*LEVEL, 121.0], [*LEVEL[:30], *[130.0] * 9]), False),
        ("a loss below zero", ([-1.0] * 50, [121.0], [2.0] * 20), False),
        ("inf", ([*LEVEL, np.inf], [2.0] * 20), False),
        ("it recovers", ([*LEVEL, 121.0], [2.0] * 50, LEVEL), False),
        ("long ago", ([*LEVEL, 121.0], *[LEVEL] * 21, [2.0] * 50), False),
        ("not so long ago", ([*LEVEL, 121.0], *[LEVEL] * 20, [2.0] * 50), True),
    ],
)
def test_where_it_turns(case, looks, speaks):
    assert bool(verdict_on(*looks)) == speaks, case


def test_what_it_says():
    verdict = verdict_on([*LEVEL, 121.0], [2.0] * 20)
    assert verdict.reason == (
        "the loss of step 51 was 121, 1e+02 times the largest of those before it, and the median "
        "of the latest 20 is 2, 1 before"
    )
    skips = verdict_on([*LEVEL, 121.0], [2.0] * 20, skipped_spikes=0)
    assert "spikes" in verdict.advice and "spikes" not in skips.advice  # which has not seen it


class Remembers(Told):
    """A run whose optimizer holds gradients of this norm."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def remembered_gradients(self):
        return {"w": self.norm}


@pytest.mark.parametrize(
    "case, held, losses, at_end, speaks",
    [
        ("31 times those since", 31.0, [*LEVEL, 121.0, *LEVEL], True, True),
        ("29 times", 29.0, [*LEVEL, 121.0, *LEVEL], True, False),
        ("within an epoch", 31.0, [*LEVEL, 121.0, *LEVEL], False, False),
        ("no huge batch", 31.0, LEVEL, True, False),
        ("rare labels that weigh much", 31.0, [*LEVEL, 121.0, *LEVEL, 13.0, *LEVEL], True, False),
        ("a tenth as huge is another kind", 31.0, [*LEVEL, 121.0, *LEVEL, 11.0], True, True),
        ("too few since", 31.0, [*LEVEL, 121.0, *LEVEL[:19]], True, False),
    ],
)
def test_what_slots_remember(case, held, losses, at_end, speaks):
    """The gradient's norm is 1."""
    report = kmp.GradientReport(("w",), np.ones((1, 5), "float32"), 1.0, len(losses), 0, 0)
    look = look_at(
        report, run=Remembers(held), new_losses=losses, losses={"loss": 1.0} if at_end else None
    )
    found = HugeBatch().see(look)
    assert bool(found) == speaks, case
    if found:
        assert "still hold gradients 31 times as large as those since" in found.reason
        assert "If it is bad, compile the model with a new optimizer, or begin" in found.advice


def test_a_bad_row_that_each_epoch_meets_once_is_no_kind_of_data():
    detector = HugeBatch()
    report = kmp.GradientReport(("w",), np.ones((1, 5), "float32"), 1.0, 100, 0, 0)
    epoch = [*LEVEL, 121.0, *LEVEL]
    looks = [
        look_at(report, run=Remembers(31.0), new_losses=epoch, losses={"loss": 1.0})
        for _ in range(3)
    ]
    assert all(detector.see(look) for look in looks)


@pytest.mark.parametrize(
    "case, epochs, speaks",
    [
        ("one in an epoch", ([121.0, *LEVEL], LEVEL, [2.0] * 40), True),
        (
            "two in an epoch, none in the next",
            ([121.0, 121.0, *LEVEL], LEVEL, [2.0] * 40),
            False,
        ),
        ("two in each", ([121.0, 121.0, *LEVEL], [121.0, 121.0, *[2.0] * 40]), True),
        ("learned, later a bad one", ([121.0] * 2, LEVEL, [*LEVEL, 121.0, *[2.0] * 20]), True),
    ],
)
def test_several_in_an_epoch_are_the_kind_of_the_data_if_they_are_learned(case, epochs, speaks):
    detector, step = HugeBatch(), 0
    for losses in (LEVEL, *epochs):
        step += len(losses)
        report = kmp.GradientReport(("w",), np.ones((1, 5), "float32"), 1.0, step, 0, 0)
        found = detector.see(look_at(report, new_losses=losses, losses={"loss": 1.0}))
    assert bool(found) == speaks, case


def test_another_fit_begins_anew():
    detector = HugeBatch()
    report = kmp.GradientReport(("w",), np.ones((1, 5), "float32"), 1.0, 90, 0, 0)
    assert detector.see(look_at(report, new_losses=[*LEVEL, 121.0, *[2.0] * 30]))
    assert not detector.see(look_at(report, fit_start=report, new_losses=[2.0] * 30))


@pytest.mark.any_backend
def test_deviations_of_ranks():
    """By hand: 6 of 6 pairs, 3 expected; the variance is 2 * 3 * 6 / 12."""
    assert deviations([1.0, 2.0], [3.0, 4.0, 5.0]) == pytest.approx(3 / 3**0.5)
    assert deviations([1.0, 2.0], [1.0, 2.0]) == 0


@pytest.mark.parametrize(
    ("clips", "all_clip"),
    [((None, 1.0), False), ((1.0, 0.5), True), ((None,), False), ((2.0,), False), ((1.0,), True)],
)
def test_nobody_who_clips_is_told_to_clip(clips, all_clip):
    """Of several optimizers all do, or what the others update may still jump."""
    parts = [keras.optimizers.SGD(1e-4, global_clipnorm=clip, name=f"of_{clip}") for clip in clips]
    optimizer = parts[0]
    if len(parts) > 1:
        wrapper = of_keras("optimizers.MultiOptimizer")
        optimizer = wrapper(lambda v: parts["bias" in v.path])
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled(optimizer, loss_scale="none"), "mse")
    limits = kmp.callbacks.Limits(max_grad_norm=1.0, max_update_ratio=1e-9)
    watch = kmp.callbacks.GradientHealth(update_freq=1, limits=limits)
    x = np.full((32, 8), 10.0, "float32")
    with pytest.warns(kmp.PrecisionWarning) as warned:
        model.fit(x, np.zeros((32, 1)), batch_size=8, verbose=0, callbacks=[watch])
    (said,) = [str(w.message) for w in warned if "gradient norm above" in str(w.message)]
    assert watch.verdict.advice.startswith("Lower the learning rate"), str(watch.verdict)
    assert ("clip" in watch.verdict.advice, "clip" in said) == (not all_clip, not all_clip)
