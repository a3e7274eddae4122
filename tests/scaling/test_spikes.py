"""Spikes: the rule against plain Python, and steps left out bit for bit, in every mode."""

import math

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras import ops
from oracle import MODES, Run, compiled, few, number
from spiky_runs import COMPILED, classifier, digits, fit

import kmp

KNOWN = 16


class InPlainPython:
    """The rule in the words of the documentation, in float64."""

    def __init__(self, factor=10, half_life=128, patience=8):
        self.factor, self.fade, self.patience = factor, 2 ** (-1 / half_life), patience
        self.peak, self.norms, self.spent = 0.0, 0, 0

    def leaves_out(self, norm):
        """Whether a step of this norm is a spike; the next step has the next state."""
        watches = self.norms >= KNOWN and self.spent <= (self.patience - 1) * 10_000
        spike = watches and norm > self.factor * self.peak
        if norm > 0:
            self.peak = max(self.peak * self.fade, 2 * self.peak if spike else norm)
            self.norms += 1
            self.spent = max(self.spent - 1, 0) + 10_000 * spike
        return spike


def left_out(rule, norms, mode="eager", finite=True):
    """Which of the steps the rule leaves out."""
    limit, after = compiled(rule.limit, mode), compiled(rule.next, mode)
    state, found = rule.init(), []
    for norm in norms:
        norm = ops.convert_to_tensor(norm, "float32")
        found.append(bool(number(norm) > number(limit(state))))
        state = after(state, norm, ops.convert_to_tensor(finite))
    return found


def hostile(seed, steps):
    """Norms that spread over many orders of magnitude, with bursts, shifts and zeros."""
    random = np.random.default_rng(seed)
    norms = 10.0 ** random.normal(0, random.choice([0.1, 1, 3]), steps)
    norms[random.random(steps) < 0.05] *= 1e4
    norms[steps // 2 :] *= 10.0 ** random.uniform(-6, 6)
    norms[random.random(steps) < 0.02] = 0
    return norms.astype("float32")


@pytest.mark.parametrize("mode", MODES)
def test_the_rule_is_that_of_plain_python(mode):
    norms = hostile(0, 150)
    rule = {"factor": 4, "half_life": 16, "patience": 3}
    plain = InPlainPython(**rule)
    expected = [plain.leaves_out(float(x)) for x in norms]
    assert left_out(kmp.SkipSpikes(**rule), norms, mode) == expected
    assert any(expected)


def on_host(rule, norms):
    """How many steps the rule leaves out, and the state in the end, computed by NumPy."""
    state = type(rule.init())(np.float32(0), np.int32(0), np.int32(0))
    count = 0
    for norm in norms:
        count += bool(norm > rule.limit(state))
        state = rule.next(state, np.float32(norm), np.bool_(True))
    return count, state


@pytest.mark.any_backend
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.integers(1, 3000),
    patience=st.integers(1, 20),
    factor=st.floats(1.001, 1e6),
    half_life=st.integers(1, 10_000),
)
def test_whatever_the_norms_the_budget_holds(seed, steps, patience, factor, half_life):
    rule = kmp.SkipSpikes(factor=factor, half_life=half_life, patience=patience)
    count, state = on_host(rule, hostile(seed, steps))
    assert count <= patience + steps / 10_000
    assert all(np.isfinite(state))


@pytest.mark.any_backend
@pytest.mark.parametrize("level", [1e-30, 1.0, 1e30, 3e38])
def test_norms_at_the_ends_of_float32_leave_a_finite_state(level):
    rule = kmp.SkipSpikes()
    norms = [np.float32(level)] * 20 + [np.finfo("float32").max] * 20 + [np.float32(level)] * 20
    _, state = on_host(rule, norms)
    assert np.isfinite(state.peak) and state.peak > 0


@pytest.mark.any_backend
@pytest.mark.parametrize(("steps", "left_out"), [(9_999, 1), (10_000, 2)])
def test_after_10_000_steps_one_more_is_left_out(steps, left_out):
    rule = kmp.SkipSpikes(patience=1)
    count, _ = on_host(rule, [1.0] * 16 + [100.0] + [1.0] * steps + [100.0])
    assert count == left_out


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("shift", "most"), [(10, 0), (30, 2), (100, 4), (1e3, 7), (1e4, 8), (1e18, 8)]
)
def test_a_lasting_change_of_the_data_is_followed(shift, most):
    """Each step that is left out doubles the peak, until the norms are ten times it at most."""
    assert most == min(max(math.ceil(math.log2(shift / 10)), 0), 8)
    count, _ = on_host(kmp.SkipSpikes(), [1.0] * 200 + [shift] * 200)
    assert count == most


@pytest.mark.any_backend
def test_harder_data_by_and_by_are_no_spikes():
    norms = np.repeat(3.0 ** np.arange(12), 50)
    assert on_host(kmp.SkipSpikes(), norms)[0] == 0


@pytest.mark.any_backend
def test_of_the_first_16_norms_above_zero_none_is_a_spike():
    first = [norm for i in range(16) for norm in (0.0, 100.0**i)]
    assert on_host(kmp.SkipSpikes(), first)[0] == 0
    assert on_host(kmp.SkipSpikes(), [*first, 100.0**16])[0] == 1


@pytest.mark.slow
def test_after_loading_weights_alone_or_unfreezing_16_norms_are_waited_for():
    """Both need a new optimizer; Keras refuses to train what an optimizer was not built for."""
    x, y = digits(40, bad=[10, 20])
    model = classifier()
    fit(model, *digits(20))
    weights = model.get_weights()
    again = classifier()
    again.set_weights(weights)
    fit(again, x, y)
    assert number(again.optimizer.skipped_spikes) == 1  # the batch of step 20
    model.layers[0].trainable = False
    model.compile(classifier().optimizer, model.loss)
    fit(model, *digits(20))
    model.layers[0].trainable = True
    model.compile(classifier().optimizer, model.loss)
    fit(model, x, y)
    assert number(model.optimizer.skipped_spikes) == 1


@pytest.mark.slow
def test_a_learning_rate_that_jumps_makes_no_spikes():
    model, without = classifier(name="adam"), classifier(name="adam", spikes=None)
    for rate in (1e-3, 3e-2, 1e-4, 1e-2):
        for each in (model, without):
            each.optimizer.learning_rate = rate
            fit(each, *digits(40))
    assert number(model.optimizer.skipped_spikes) == 0
    for mine, theirs in zip(model.weights, without.weights, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(mine), ops.convert_to_numpy(theirs))


OPTIMIZERS = {
    "sgd": {"momentum": 0.9},
    "adam": {},
    "adamw": {"weight_decay": 0.1},
    "lion": {},
    "muon": {},
}
SKIP = kmp.SkipSpikes(factor=10)


def gradients(run, step, size=1.0):
    random = np.random.default_rng(step)
    return [size * random.normal(size=v.shape).astype("float32") for v in run.variables]


def state_of(run):
    """Weights and the inner optimizer's state, without what counts steps."""
    inner = [v for v in run.inner.variables if v.name not in ("iteration", "learning_rate")]
    return [np.array(ops.convert_to_numpy(v)) for v in run.variables + inner]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", few(OPTIMIZERS, "adam"))
def test_a_step_that_is_left_out_was_never_there(name, mode):
    make = getattr(keras.optimizers, {"sgd": "SGD", "adamw": "AdamW"}.get(name, name.title()))
    with_spike, without = (
        Run(kmp.scaled(make(0.1, **OPTIMIZERS[name]), 128, spikes=SKIP), mode) for _ in range(2)
    )
    for step in range(20):
        with_spike.step(gradients(with_spike, step))
        without.step(gradients(without, step))
    for size in (1e2, 1e10, 1e30):
        with_spike.step(gradients(with_spike, 99, size))
        for step in (21, 22):
            with_spike.step(gradients(with_spike, step))
            without.step(gradients(without, step))
    optimizer = with_spike.optimizer
    assert number(optimizer.skipped_spikes) == number(optimizer.skipped_steps) == 3
    assert number(optimizer.consecutive_skips) == 0 and number(optimizer.dynamic_scale) == 128
    assert number(optimizer.iterations) == number(without.optimizer.iterations)
    for mine, theirs in zip(state_of(with_spike), state_of(without), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("mode", MODES)
def test_where_nothing_is_left_out_no_bit_changes(mode):
    with_rule = Run(kmp.scaled("adam", spikes="skip"), mode)
    without = Run(kmp.scaled("adam"), mode)
    for step in range(25):
        with_rule.step(gradients(with_rule, step, 1 + step % 5))
        without.step(gradients(without, step, 1 + step % 5))
    assert number(with_rule.optimizer.skipped_steps) == 0
    for mine, theirs in zip(state_of(with_rule), state_of(without), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("mode", MODES)
def test_the_event_says_which_variable_began_it(mode):
    run = Run(kmp.scaled("sgd", spikes="skip"), mode)
    for step in range(20):
        run.step(gradients(run, step))
    kernel, bias = gradients(run, 20)
    run.step([kernel, 1e3 * bias])
    report = run.optimizer.gradient_report()
    (event,) = report.spikes
    norm = np.sqrt(np.square(kernel).sum() + np.square(1e3 * bias).sum(dtype="float64"))
    peak = max(
        np.sqrt(sum(np.square(g).sum() for g in gradients(run, step))) * 2 ** ((step - 19) / 128)
        for step in range(20)
    )
    assert (event.step, event.variable) == (21, run.optimizer.variable_paths[1])
    assert event.norm == pytest.approx(norm, rel=1e-5)
    assert event.limit == pytest.approx(10 * peak, rel=1e-4)
    growth = 1e3 * np.linalg.norm(bias) / np.linalg.norm(gradients(run, 19)[1])
    assert event.growth == pytest.approx(growth, rel=1e-5)
    assert report.skipped_spikes == 1
    # The levels are those of the step before.
    np.testing.assert_allclose(
        report.matrix[:, 0], [np.linalg.norm(g) for g in gradients(run, 19)], rtol=1e-5
    )


def test_overflows_and_norms_of_zero_are_not_counted():
    run = Run(kmp.scaled("sgd", spikes="skip"))
    for step in range(40):
        run.step([np.full_like(g, np.inf) for g in gradients(run, step)])
        run.step([np.zeros_like(g) for g in gradients(run, step)])
    peak = run.optimizer.scaled_step.counters.peak
    assert [number(v) for v in peak] == [0, 0, 0]
    for step in range(15):
        run.step(gradients(run, step))
    run.step(gradients(run, 99, 1e6))  # the 16th norm
    assert number(run.optimizer.skipped_spikes) == 0


@pytest.mark.parametrize("given", ["clip", True, kmp.SkipSpikes, 10])
def test_what_is_no_rule_is_refused(given):
    with pytest.raises(ValueError, match=r'`spikes` must be None, "skip" or a kmp.SkipSpikes'):
        kmp.scaled("sgd", spikes=given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factor": 1}, "`factor` of SkipSpikes must be above 1. Received: factor=1.0"),
        ({"factor": "many"}, "`factor` of SkipSpikes must be a number"),
        ({"half_life": 0}, "`half_life` of SkipSpikes must be a whole number"),
        ({"patience": 1.5}, "`patience` of SkipSpikes must be a whole number"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kmp.SkipSpikes(**arguments)


@pytest.mark.parametrize("spe", few([1, 4], 4) if COMPILED else [1])
@pytest.mark.parametrize("jit", few([False, True], True))
def test_fit_goes_on_as_if_the_batch_had_never_been_there(jit, spe):
    bad = classifier(jit=jit, spe=spe)
    x, y = digits(40, bad=[30])
    with kmp.protect(bad):
        seen = fit(bad, x, y)
    never = classifier(jit=jit)
    with kmp.protect(never):
        expected = fit(never, np.delete(x, 30, axis=0), np.delete(y, 30, axis=0))
    assert number(bad.optimizer.skipped_spikes) == 1
    assert seen["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert seen["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-6)
    for mine, theirs in zip(bad.weights, never.weights, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(mine), ops.convert_to_numpy(theirs))


def never_there(make, x, y, bad):
    """Check that a fit with a bad batch ends as the fit that never saw it, bit for bit."""
    with_batch, without = make(), make()
    fit(with_batch, x, y)
    fit(without, np.delete(x, bad, axis=0), np.delete(y, bad, axis=0))
    assert number(with_batch.optimizer.skipped_spikes) == 1
    for mine, theirs in zip(with_batch.weights, without.weights, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(mine), ops.convert_to_numpy(theirs))


@pytest.mark.slow
def test_the_norm_is_that_before_clipping():
    x, y = digits(40, bad=[30])
    never_there(lambda: classifier(name="adam", global_clipnorm=0.1), x, y, 30)


@pytest.mark.slow
def test_gradients_of_rows_of_an_embedding():
    """On TensorFlow they are `tf.IndexedSlices`."""

    def make():
        keras.utils.set_random_seed(1)
        embedding = keras.layers.Embedding(50, 4)
        model = keras.Sequential([keras.Input((3,), dtype="int32"), embedding])
        model.add(keras.layers.Flatten())
        model.add(keras.layers.Dense(1))
        model.compile(kmp.scaled("adam", spikes="skip"), "mse")
        return model

    random = np.random.default_rng(0)
    x, y = random.integers(0, 50, size=(40, 16, 3)), random.normal(size=(40, 16))
    y[30] *= 1e6
    never_there(make, x, y, 30)


def test_two_optimizers_leave_out_each_its_own():
    """As in a GAN: the spike of one is no step of the other."""
    runs = [Run(kmp.scaled("adam", 128, spikes="skip")) for _ in range(2)]
    for step in range(20):
        for run in runs:
            run.step(gradients(run, step))
    runs[0].step(gradients(runs[0], 20, 1e6))
    runs[1].step(gradients(runs[1], 20))
    assert [number(run.optimizer.skipped_spikes) for run in runs] == [1, 0]


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_with_a_spike_to_come(tmp_path):
    x, y = digits(40, bad=[20, 30])
    straight, stopped = classifier(name="adam"), classifier(name="adam")
    fit(straight, x, y)
    fit(stopped, x[:25], y[:25])
    stopped.save(tmp_path / "model.keras")
    resumed = keras.models.load_model(tmp_path / "model.keras")
    assert resumed.optimizer.spikes == kmp.SkipSpikes()
    fit(resumed, x[25:], y[25:])
    assert number(resumed.optimizer.skipped_spikes) == 2
    for mine, theirs in zip(resumed.variables, straight.variables, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(mine), ops.convert_to_numpy(theirs))
    pairs = zip(resumed.optimizer.variables, straight.optimizer.variables, strict=True)
    for mine, theirs in pairs:
        np.testing.assert_array_equal(
            ops.convert_to_numpy(mine), ops.convert_to_numpy(theirs), mine.path
        )


@pytest.mark.slow
@pytest.mark.parametrize("on_overflow", ["drop_micro_batch", "drop_window"])
def test_a_spike_costs_its_micro_batch_or_its_window(on_overflow):
    inner = keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=4)
    run, without = (
        Run(kmp.scaled(inner.from_config(inner.get_config()), 8, on_overflow=on_overflow, **more))
        for more in ({"spikes": "skip"}, {})
    )
    for step in range(20):
        run.step(gradients(run, step))
        without.step(gradients(without, step))
    run.step(gradients(run, 20, 1e5))
    if on_overflow == "drop_window":
        for step in (21, 22, 23):
            run.step(gradients(run, step))
    for step in (24, 25, 26, 27):
        run.step(gradients(run, step))
        without.step(gradients(without, step))
    assert number(run.optimizer.skipped_spikes) == 1
    for mine, theirs in zip(state_of(run), state_of(without), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("policy", few(["mixed_bfloat16", "bfloat16", "mixed_float16"], "bfloat16"))
def test_half_precision(policy):
    """bfloat16 weights are rounded by the number of the step, which counts only applied ones."""
    keras.config.set_dtype_policy(policy)
    x, y = digits(40, bad=[30])
    bad, never = classifier(name="adam", loss_scale=64.0), classifier(name="adam", loss_scale=64.0)
    fit(bad, x, y)
    fit(never, np.delete(x, 30, axis=0), np.delete(y, 30, axis=0))
    assert number(bad.optimizer.skipped_steps) == 1
    for mine, theirs in zip(bad.weights, never.weights, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(mine), ops.convert_to_numpy(theirs))


def largest_variance(model):
    (norm,) = [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
    return float(ops.max(norm.moving_variance))


NORMS = {
    "keras": keras.layers.BatchNormalization,
    "float32": kmp.layers.Float32BatchNormalization,
}


@pytest.mark.parametrize("norm", few(NORMS, "keras"))
def test_no_batch_ruins_the_moving_statistics(norm):
    """Its gradients behind the normalization are ordinary, and its step is applied."""
    x, y = digits(120, bad=[110])
    bad, never = classifier((NORMS[norm](),)), classifier((NORMS[norm](),))
    with kmp.protect(bad), kmp.protect(never):
        fit(bad, x, y)
        fit(never, *digits(120))
    optimizer = bad.optimizer
    assert number(optimizer.held_statistics) == 1 and number(never.optimizer.held_statistics) == 0
    assert largest_variance(bad) < 1.5 * largest_variance(never)
    x, y = digits(4)
    losses = [m.evaluate(x.reshape(-1, 8), y.reshape(-1), verbose=0)[0] for m in (bad, never)]
    assert losses[0] < 1.2 * losses[1]


def test_a_true_change_of_scale_is_followed_by_the_statistics():
    x, y = digits(150)
    x[110:] *= 1e3
    model = classifier((keras.layers.BatchNormalization(momentum=0.9),))
    with kmp.protect(model):
        fit(model, x, y)
    assert number(model.optimizer.held_statistics) == 8
    true = float(np.square(x[-1]).mean())
    assert largest_variance(model) > 0.01 * true


@pytest.mark.wide
def test_sound_statistics_are_never_held():
    for momentum in (0.99, 0.9, 0.5):
        model = classifier((keras.layers.BatchNormalization(momentum=momentum),), name="adam")
        with kmp.protect(model):
            fit(model, *digits(300, batch=8))
        assert number(model.optimizer.held_statistics) == 0
