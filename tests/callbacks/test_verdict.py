"""The verdict on planted runs of real `fit`, and where each limit lies."""

import dataclasses
import itertools
import re

import keras
import numpy as np
import pytest
from keras import ops
from reports import look_at, verdict_on

import kmp
from kmp.callbacks import GradientHealth, Limits
from kmp.callbacks.verdict.observation import Weight
from kmp.callbacks.verdict.states import STATES
from kmp.health.details import BINS, COLUMNS
from kmp.health.report import OverflowEvent

pytestmark = pytest.mark.filterwarnings("ignore:Step", "ignore:float16 without")


def loss_named(what):
    """ "overflow" stays finite where its gradient, times any scale, does not."""

    def overflowing(y, outputs):
        return ops.where(ops.isfinite(outputs), outputs, 0.0)

    return {"overflow": overflowing, "mse": "mse"}[what]


def watched_run(
    scale="dynamic", steps=120, bad=(), loss="mse", factor=1.0, policy="float32", **more
):
    """Train a small regression with NaN in the batches of the steps `bad`."""
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu", name="hidden"),
            keras.layers.Dense(1, name="head", dtype="float32"),
        ]
    )
    rate = more.pop("learning_rate", 0.01)
    model.compile(kmp.scaled("sgd", scale, learning_rate=rate), loss_named(loss))
    random = np.random.default_rng(0)
    x = random.normal(size=(steps * 4, 4)).astype("float32")
    y = x[:, :1] + 0.1 * random.normal(size=(steps * 4, 1)).astype("float32")
    for step in bad:
        # With a NaN in `x`, TensorFlow's relu hands on a zero, and the loss would be finite.
        (y if loss == "mse" else x)[step * 4] = np.nan
    watch = GradientHealth(update_freq=20, **more)
    weights = np.full(len(x), factor, "float32")
    model.fit(
        x,
        y,
        sample_weight=None if factor == 1.0 else weights,
        batch_size=4,
        shuffle=False,
        verbose=0,
        callbacks=[watch],
    )
    return watch


PLANTED = {
    "HEALTHY": {},
    "CALIBRATING": {
        "bad": range(6),
        "loss": "overflow",
        "steps": 20,
        "policy": "mixed_float16",
    },
    "UNDERFLOW": {"scale": 1.0, "factor": 1e-7, "policy": "mixed_float16"},
    "UNSTABLE": {
        "scale": kmp.DynamicLossScale(growth_interval=2000),
        "bad": range(120, 240, 6),
        "loss": "overflow",
        "steps": 240,
    },
    "COLLAPSED": {
        "scale": kmp.DynamicLossScale(4.0),
        "bad": range(120),
        "loss": "overflow",
    },
    "FORWARD-NAN": {"bad": range(120)},
}


@pytest.mark.parametrize("state", PLANTED)
def test_planted_runs_are_recognised(state):
    found = watched_run(**PLANTED[state]).verdict
    assert found.state == state, str(found)
    assert bool(found.blame) == (state in ("UNDERFLOW", "UNSTABLE", "COLLAPSED"))
    assert bool(found.advice) == (state != "HEALTHY")
    assert found.code == STATES.index(state)
    # All layers of that run are in float32.
    assert ("No layer's policy computes in float16" in found.advice) == (
        state in ("COLLAPSED", "UNSTABLE")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"policy": "mixed_float16"},
        {"policy": "mixed_bfloat16", "scale": "none"},
        {"scale": "none", "factor": 1e-7},
    ],
    ids=["float16", "bfloat16", "small_but_float32"],
)
def test_sound_runs_are_left_alone(arguments):
    """On some backends float16 overflows once while its scale is being found."""
    found = watched_run(**arguments)
    expected = "CALIBRATING" if found.report.skipped_steps else "HEALTHY"
    assert found.verdict.state == expected and found.report.skipped_steps <= 2


@pytest.mark.parametrize(
    "bad, said", [([3, 50], "2 steps were skipped"), ([3], "1 step was skipped")]
)
def test_early_overflows_are_how_the_scale_is_found(bad, said):
    rule = kmp.DynamicLossScale(2.0**10)
    found = watched_run(rule, bad=bad, loss="overflow", policy="mixed_float16").verdict
    assert found.state == "CALIBRATING" and said in found.reason


def test_blame_is_where_the_backward_pass_met_it():
    """From there inf flows to all that stands before, float32 or not."""
    half = keras.layers.Dense(4, dtype="mixed_float16")
    head = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(1e6))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), half, head])
    model.compile(kmp.scaled("sgd", 1.0), "mae")
    watch = GradientHealth()
    model.fit(np.ones((40, 4)), np.ones((40, 1)), batch_size=4, verbose=0, callbacks=[watch])
    assert (watch.verdict.state, watch.verdict.blame) == ("COLLAPSED", half.bias.path)
    assert watch.report.worst(1) == [half.bias.path]


def test_a_loss_that_is_not_finite_leaves_the_scale_alone():
    """On JAX too, where the optimizer is not told: the callback's train step sees the loss."""
    watch = watched_run(bad=[0, 1, 2, 7], steps=20)
    assert (watch.report.loss_scale, watch.report.skipped_steps) == (2.0**15, 4)
    assert [event.loss_finite for event in watch.report.events] == [False] * 4
    watch = watched_run(bad=[0, 1, 2, 7], steps=20, loss="overflow")
    assert (watch.report.loss_scale, watch.report.skipped_steps) == (2.0**11, 4)
    assert [event.loss_finite for event in watch.report.events] == [True] * 4


def test_each_state_is_warned_of_once():
    with pytest.warns(UserWarning) as caught:
        watched_run(bad=range(120))
    said = [str(w.message) for w in caught if "FORWARD-NAN" in str(w.message)]
    assert len(said) == 1
    assert "the loss was not finite in at least 16 of the last 20 steps" in said[0]


def report(norms, zeros=(), details=None, loss_scale=1.0):
    matrix = np.zeros((len(norms), 5), "float32")
    matrix[:, 0] = matrix[:, 1] = norms
    matrix[:, 2] = zeros or 0
    paths = ("conv/kernel", "conv/bias")[: len(norms)]
    return kmp.GradientReport(paths, matrix, loss_scale, 500, 0, 0, details=details)


def judged(report, rule=None, **arguments):
    rule = rule or kmp.StaticLossScale(1.0)
    look = look_at(report, rule=rule, limits=Limits(**arguments), weights=half(report.paths))
    return verdict_on(look, look)


def half(paths):
    return {path: Weight("conv", "float16") for path in paths}


def bins(exponent_counts):
    row = np.zeros(50, "float32")
    for exponent, count in exponent_counts.items():
        row[3 + 29 + exponent] = count
    return row


def test_a_bias_before_batch_normalization_is_no_underflow():
    """Its gradient is zero but for rounding: all of it is tiny, and none of it matters."""
    details = np.stack([bins({-5: 100}), bins({-27: 8})])
    assert judged(report([1.0, 1e-8], details=details)).state == "HEALTHY"
    found = judged(report([1.0, 1e-2], details=details))
    assert (found.state, found.blame) == ("UNDERFLOW", "conv/bias")


@pytest.mark.parametrize(
    "rest, layers, state",
    [(0.0, 1, "HEALTHY"), (1.0, 1, "UNDERFLOW"), (0.0, 2, "UNDERFLOW")],
    ids=["flat loss", "lost", "all in float16"],
)
def test_gradients_of_zero_that_nothing_has_lost(rest, layers, state):
    """A float32 layer that has gradients of zero too tells a flat loss from a lost gradient."""
    zeros = report([0.0, rest], zeros=[1, 1 - rest])
    rule = kmp.StaticLossScale(1.0)
    look = look_at(zeros, rule=rule, weights=half(zeros.paths[:layers]))
    assert verdict_on(look, look).state == state
    if not zeros.grad_norm:  # a batch in which no sample weighs anything
        assert verdict_on(look).state == "HEALTHY"


def test_a_share_of_zeros_that_was_rounded():
    """TensorFlow outside XLA answers 0.99999994 for eight zeros of eight."""
    zeros = report([0.0, 0.0], zeros=[1 - 2**-24, 1 - 2**-24])
    assert judged(zeros, kmp.DynamicLossScale()).state == "UNDERFLOW"


def test_who_has_a_dynamic_scale_is_not_advised_to_take_one():
    zeros = report([0.0, 0.0], zeros=[1, 1], loss_scale=2.0**10)
    advice = judged(zeros, kmp.DynamicLossScale()).advice
    assert "zero in float32 too" in advice and "loss_scale=" not in advice
    assert 'loss_scale="dynamic"' in judged(zeros).advice


@pytest.mark.slow
@pytest.mark.parametrize("steps, state", [(1, "UNSTABLE"), (2, "COLLAPSED"), (12, "COLLAPSED")])
def test_an_epoch_of_skipped_steps_at_a_fixed_scale(steps, state):
    found = watched_run("none", steps=steps, bad=range(steps), loss="overflow")
    assert found.report.skipped_steps == steps
    assert found.verdict.state == state, str(found.verdict)


def test_two_skipped_steps_at_the_beginning_of_an_epoch_at_a_fixed_scale():
    event = OverflowEvent(102, 1.0, "w", 1, True)
    report = dataclasses.replace(
        of_norm(102, 1.0, 0.0), skipped_steps=2, consecutive_skips=2, events=(event,)
    )
    look = look_at(report, rule=kmp.NoOpLossScale(), epoch_start=of_norm(100, 1, 0))
    assert verdict_on(look).state == "HEALTHY"
    assert verdict_on(dataclasses.replace(look, losses={"loss": 1.0})).state == "COLLAPSED"


def test_two_skipped_steps_of_many_at_a_fixed_scale():
    found = watched_run("none", steps=20, bad=[18, 19], loss="overflow")
    assert found.report.consecutive_skips == 2 and found.verdict.state == "UNSTABLE"


def after(step, skips):
    return kmp.GradientReport(("w",), np.float32([[1, 1, 0, 0, skips]]), 1024.0, step, skips, 0)


@pytest.mark.parametrize(
    "rule, own",
    [
        ({"growth_interval": 1}, 100),
        ({"growth_interval": 5}, 34),
        ({"growth_interval": 10, "backoff_factor": 0.8}, 58),
        ({"growth_interval": 2000}, 1),
    ],
    ids=str,
)
def test_overflows_are_told_from_those_that_the_scale_costs_itself(rule, own):
    def state(skips):
        settled = after(200, 0)
        before = {"fit_start": settled, "epoch_start": settled}
        seen = look_at(after(400, skips), rule=kmp.DynamicLossScale(**rule), **before)
        return verdict_on(seen).state

    assert state(own) == "HEALTHY"
    assert state(180) == "UNSTABLE"


@pytest.mark.parametrize("steps, state", [(64, "UNSTABLE"), (80, "UNSTABLE"), (110, "HEALTHY")])
def test_an_overflow_in_each_epoch_is_told_above_the_limit(steps, state):
    """As by one rare sample with a large weight, which is never learned. The limit is 1%."""
    ends = [after(steps * epoch, epoch) for epoch in range(10)]
    looks = [
        look_at(end, rule=kmp.DynamicLossScale(), epoch_start=start, losses={"loss": 1.0})
        for start, end in itertools.pairwise(ends)
    ]
    assert verdict_on(*looks).state == state


def test_the_shares_are_computed_once_a_look(monkeypatch):
    seen, share_below = [], kmp.GradientReport._share_below
    monkeypatch.setattr(
        kmp.GradientReport, "_share_below", lambda *a: seen.append(a) or share_below(*a)
    )
    judged(report([1.0, 1.0], details=np.stack([bins({-5: 1}), bins({-5: 1})])))
    assert len(seen) == 2


@pytest.mark.parametrize(
    "counts, arguments, state",
    [
        ({-5: 1000, -26: 1}, {}, "HEALTHY"),
        ({-5: 998, -26: 2}, {}, "UNDERFLOW"),
        ({-5: 998, -26: 2}, {"max_lost_share": 0.01}, "HEALTHY"),
        ({-5: 95, -15: 5}, {}, "HEALTHY"),
        ({-5: 94, -15: 6}, {}, "UNDERFLOW"),
        ({-5: 94, -15: 6}, {"spare_bits": 40}, "HEALTHY"),
        ({-5: 94, -14: 6}, {}, "HEALTHY"),
    ],
)
def test_where_underflow_begins(counts, arguments, state):
    seen = report([2.0**-18], details=bins(counts)[None])
    assert judged(seen, **arguments).state == state


@pytest.mark.parametrize("largest, state", [(2.0**-17, "HEALTHY"), (2.0**-18, "UNDERFLOW")])
def test_lost_bits_of_small_numbers_are_felt_where_the_largest_is_small(largest, state):
    """float16 rounds all below 2**-14 by up to 2**-25: 2**-17 keeps as many bits as in bfloat16."""
    seen = report([largest], details=bins({-11: 50, -15: 50})[None])
    assert judged(seen).state == state


def test_the_advised_scale_fills_float16_but_for_a_bit():
    details = np.stack([bins({-26: 1})])
    found = judged(report([2.0**-4], details=details, loss_scale=8.0))
    assert found.advice == "Write kmp.DynamicLossScale(initial_scale=2.0**18)."
    rule = kmp.AmaxLossScale(headroom_bits=6)
    found = judged(report([2.0**-4], details=details, loss_scale=8.0), rule)
    assert found.advice == "Write kmp.AmaxLossScale(headroom_bits=1); it is 6 now."


@pytest.mark.parametrize("name", ["max_lost_share", "spare_bits", "max_update_ratio"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), "much"])
def test_limits_are_numbers(name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        Limits(**{name: value})


@pytest.mark.parametrize("arguments", [{"max_grad_norm": 1e-8}, {"min_grad_norm": 1e4}], ids=str)
def test_the_smaller_limit_is_the_smaller(arguments):
    with pytest.raises(ValueError, match="`min_grad_norm` of Limits must lie below"):
        Limits(**arguments)


@pytest.mark.parametrize(
    "rule, scale, said, advice",
    [
        (kmp.DynamicLossScale(), 2.0**-48, ", its floor", "^kmp.debug.locate_nonfinite.*with that"),
        (kmp.StaticLossScale(1.0), 1.0, ", which is fixed", '^Write loss_scale="dynamic"'),
        (
            kmp.StaticLossScale(64),
            64.0,
            ", which is fixed",
            '^Write loss_scale="dynamic"',
        ),
        (object(), 1.0, "of 1", '^Write loss_scale="dynamic"'),
    ],
    ids=["dynamic", "static", "too high", "of the user"],
)
def test_what_is_said_of_a_collapsed_scale_is_true_of_its_rule(rule, scale, said, advice):
    event = OverflowEvent(500, scale, "conv/kernel", 1, True)
    matrix = np.zeros((1, 5), "float32")
    seen = kmp.GradientReport(("conv/kernel",), matrix, scale, 500, 12, 12, (event,))
    found = verdict_on(look_at(seen, rule=rule))
    assert found.state == "COLLAPSED" and found.reason.endswith(said)
    assert re.search(advice, found.advice)


@pytest.mark.parametrize(
    "steps, floor, state",
    [
        ((110, 130, 150, 170, 190), 2.0**-48, "UNSTABLE"),
        ((110, 130, 150, 170), 2.0**-48, "HEALTHY"),  # a few are nothing
        ((10, 20, 30, 40, 190), 2.0**-48, "HEALTHY"),  # by which the scale was found
        ((110, 130, 150, 170, 190), 2.0**-60, "HEALTHY"),  # not at the floor
    ],
)
def test_batches_that_overflow_at_the_floor_of_the_scale(steps, floor, state):
    """Few enough not to count by their rate, but the same batches will overflow again."""
    events = tuple(OverflowEvent(step, 2.0**-48, "w", 1, True) for step in reversed(steps))
    report = dataclasses.replace(after(900, len(steps)), loss_scale=2.0**-48, events=events)
    rule = kmp.DynamicLossScale(min_scale=floor)
    found = verdict_on(look_at(report, rule=rule, fit_start=after(100, 0)))
    assert found.state == state, str(found)
    if state == "UNSTABLE":
        assert "5 steps since step 110 overflowed" in found.reason
        assert "locate_nonfinite" in found.advice and "min_scale=1.0" in found.advice


@pytest.mark.filterwarnings("ignore:.*encountered")
@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_though_its_gradients_are(loss):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(
        kmp.scaled("sgd", learning_rate=0.01), lambda y, outputs: ops.mean(outputs) + float(loss)
    )
    watch = GradientHealth()
    x = np.ones((40, 4), "float32")
    with pytest.warns(kmp.PrecisionWarning, match="FORWARD-NAN"):
        model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[watch])
    assert watch.report.skipped_steps == 0 and watch.verdict.state == "FORWARD-NAN"
    assert f"`loss` of the epoch is {loss}" in watch.verdict.reason


def test_a_loss_that_is_not_finite_in_validation_alone():
    """As where moving statistics are lost, which training does not read."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    model.add(keras.layers.Dense(1))
    model.compile(kmp.scaled("sgd", learning_rate=0.01), "mse")
    model.layers[0].moving_variance.assign(np.full(4, np.nan))
    watch = GradientHealth()
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    data = {"batch_size": 4, "verbose": 0, "validation_data": (x, x[:, :1])}
    with pytest.warns(kmp.PrecisionWarning, match="FORWARD-NAN"):
        model.fit(x, x[:, :1], callbacks=[watch], **data)
    assert watch.report.skipped_steps == 0 and watch.verdict.state == "FORWARD-NAN"
    assert "`val_loss` of the epoch is nan" in watch.verdict.reason


@pytest.mark.parametrize("lost", [np.nan, np.inf])
def test_weights_that_are_lost_where_nothing_else_shows_it(lost):
    """Their layer's answers are replaced: loss and gradients stay finite."""
    keras.config.set_dtype_policy("float32")
    inputs = keras.Input((4,))
    masked = keras.layers.Dense(8, name="masked")(inputs)
    masked = keras.layers.Lambda(ops.nan_to_num, output_shape=(8,))(masked * 0.0)
    both = keras.layers.Concatenate()([keras.layers.Dense(8)(inputs), masked])
    model = keras.Model(inputs, keras.layers.Dense(1)(both))
    model.get_layer("masked").kernel.assign(np.full((4, 8), lost))
    model.compile(kmp.scaled("sgd", learning_rate=0.01), "mse")
    watch = GradientHealth(update_freq=5)
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[watch])
    assert (watch.verdict.state, watch.verdict.blame) == ("UNSTABLE", "masked/kernel")
    assert "1 of 6 weights hold inf or NaN" in watch.verdict.reason


def test_weights_that_an_update_has_lost():
    """The gradient was finite; what the optimizer made of it was not."""

    class Ends(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return ops.where(ops.cast(step, "float32") > 30.0, np.nan, 0.01)

    with pytest.warns(kmp.PrecisionWarning, match="optimizer's epsilon"):
        found = watched_run(learning_rate=Ends(), steps=60).verdict
    assert found.state == "FORWARD-NAN" and found.blame.endswith("head/bias")
    assert "the loss was not finite" in found.reason and "weights hold inf or NaN" in found.reason
    assert "load a checkpoint" in found.advice


def test_updates_that_are_too_large():
    def found(looks):
        seen = [of_norm(500 + i, 1.0, 10**-0.5) for i in range(looks)]
        return verdict_on(*(look_at(x, rule=kmp.DynamicLossScale()) for x in seen))

    assert found(10).state == "UNSTABLE" and "0.32 of their norm" in found(10).reason
    assert found(9).state == "HEALTHY"


def of_norm(step, norm, update):
    """Two variables with weights of norm 1."""
    details = np.zeros((2, len(COLUMNS) + BINS), "float32")
    details[:, COLUMNS.index("weight_norm")] = 1
    details[:, COLUMNS.index("update_norm")] = update
    health = np.float32([[norm, norm, 0, 0, 0], [0, 0, 0, 0, 0]])
    return kmp.GradientReport(("a", "b"), health, 1024.0, step, 0, 0, details=details)


@pytest.mark.parametrize(
    "before, norm, update, state",
    [
        (1e6, 1e6, 1e-3, "HEALTHY"),  # a loss in dollars
        (None, 1e6, 1e-3, "HEALTHY"),
        (1e6, 1e6, 0.5, "UNSTABLE"),
        (1e4, 2e6, 1e-3, "UNSTABLE"),
        (1e4, 0.5e6, 1e-3, "HEALTHY"),
        (1.0, 9e3, 1e-3, "HEALTHY"),
        (None, 1e6, 0.0, "UNSTABLE"),  # nobody knows the update: the step was skipped
    ],
)
def test_large_gradients_are_sound_if_they_were_so_and_move_the_weights_as_usual(
    before, norm, update, state
):
    seen = [of_norm(300, before, 1e-3)] if before else []
    seen.append(of_norm(400, norm, update))
    found = verdict_on(*(look_at(x, rule=kmp.NoOpLossScale()) for x in seen))
    assert found.state == state, str(found)
    assert state == "HEALTHY" or found.blame == "a"


@pytest.mark.parametrize("of_head, state", [(2.0**-5, "HEALTHY"), (2.0**-6, "UNDERFLOW")])
def test_zeros_next_to_a_large_gradient_are_not_lost_ones(of_head, state):
    """At a scale of 2**15. float16 loses what is below 2**-25: a layer in between is dead."""
    matrix = np.float32([[0, 0, 1, 0, 0], [of_head, of_head, 0, 0, 0]])
    seen = kmp.GradientReport(("half/kernel", "head/kernel"), matrix, 2.0**15, 500, 0, 0)
    weights = {"half/kernel": Weight("half", "float16"), "head/kernel": Weight("head")}
    found = verdict_on(look_at(seen, rule=kmp.DynamicLossScale(), weights=weights))
    assert found.state == state, str(found)


@pytest.mark.parametrize("update, state", [(1e-3, "HEALTHY"), (10.0, "UNSTABLE")])
def test_an_update_of_now_counts_however_small_the_last_ones_were(update, state):
    seen = [of_norm(step, 1e6, 1e-3) for step in (300, 310, 320)] + [of_norm(400, 1e6, update)]
    assert verdict_on(*(look_at(x, rule=kmp.NoOpLossScale()) for x in seen)).state == state
