"""DivergenceGuard: sees a loss that diverges, and goes back bit for bit."""

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from linear_runs import JIT, RATE, SPE, data, fit, last_progress, linear_model
from older import of_keras

import kmp
from kmp.callbacks import DivergenceGuard, SpikeDetector
from kmp.callbacks.snapshot import restore_snapshot, take_snapshot

pytestmark = pytest.mark.slow

QUICK = {"update_freq": 1, "detector": SpikeDetector(window=10)}
HIGH_FROM = 40


def fit_high(model, guard, steps=56, **arguments):
    """A run whose targets grow a thousandfold from step 40 on."""
    x, y = data(steps=steps)
    y[4 * HIGH_FROM :] *= 1000
    fixed = {"batch_size": 4, "shuffle": False, "verbose": 0}
    return model.fit(x, y, callbacks=[guard], **{**fixed, **arguments}).history


def messages(caught):
    return [str(w.message) for w in caught if w.category is kmp.PrecisionWarning]


@pytest.mark.parametrize("spe", SPE)
def test_a_spike_is_warned_of_once(spe):
    model = linear_model(kmp.scaled("sgd", learning_rate=0.0), steps_per_execution=spe)
    guard = DivergenceGuard(update_freq=1, detector=SpikeDetector(window=40))
    with pytest.warns(UserWarning) as caught:
        fit_high(model, guard)
    step = HIGH_FROM + 3 * spe
    _, y = data(steps=56)
    losses = np.square(y).reshape(-1, 4 * spe).mean(axis=1)[: HIGH_FROM // spe]
    high = 1e6 * np.square(y).reshape(-1, 4 * spe).mean(axis=1)[step // spe - 1]
    assert messages(caught) == [
        f"Step {step}: the loss diverged: {high:.3g}, where the median of the last "
        f"{HIGH_FROM // spe} readings is {np.median(losses):.3g}. Nothing was done."
    ]
    assert last_progress(model).seen_steps == 56 and guard.rollbacks == 0


@pytest.mark.quick
def test_stop():
    model = linear_model(kmp.scaled("sgd", learning_rate=0.0))
    with pytest.warns(UserWarning, match=r"Step 43: the loss diverged.*Training stops\.$"):
        fit_high(model, DivergenceGuard("stop", **QUICK))
    assert last_progress(model).seen_steps == 44


@pytest.mark.parametrize("spe", SPE)
def test_skipped_steps_are_no_divergence(spe):
    model = linear_model(steps_per_execution=spe)
    history = fit(model, [DivergenceGuard("stop", **QUICK)], poisoned=range(20, 28), steps=40)
    assert history["skipped_steps"] == [8]


class Rewind(keras.callbacks.Callback):
    """Takes a snapshot before one step, and goes back to it before another."""

    def __init__(self, take_at, restore_at):
        super().__init__()
        self.take_at, self.restore_at = take_at, restore_at

    def values(self):
        return {v.path: np.array(ops.convert_to_numpy(v)) for v in self.variables()}

    def variables(self):
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        layers = [*self.model.weights, *self.model.non_trainable_variables]
        spikes = [v for v in self.model.optimizer.variables if "/spike_" in v.path]
        return [*layers, *optimizer.variables, *spikes]

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.take_at:
            self.taken = self.values()
            self.snapshot = take_snapshot(self._model, step=batch)
        if batch == self.restore_at:
            self.before = self.values()
            self.changes = restore_snapshot(self.model, self.snapshot, lr_factor=0.5)
            self.restored = self.values()


@pytest.mark.parametrize("jit", JIT)
@pytest.mark.parametrize("wrap", ["bare", "keras", "kmp"])
def test_a_rollback_restores_every_bit_but_the_learning_rate(wrap, jit):
    adam = keras.optimizers.Adam(0.125, use_ema=True)
    optimizer = {
        "bare": lambda: adam,
        "keras": lambda: keras.optimizers.LossScaleOptimizer(adam, initial_scale=256.0),
        "kmp": lambda: kmp.LossScaleOptimizer(
            adam, loss_scale=kmp.DynamicLossScale(256.0), spikes="skip"
        ),
    }[wrap]()
    layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse", jit_compile=jit)
    rewind = Rewind(3, 8)
    poisoned = [1, 6] if wrap == "kmp" else []
    fit(model, [kmp.callbacks.TerminateOnNaN(), rewind], poisoned=poisoned, steps=10)
    moved = 0
    for path, taken in rewind.taken.items():
        if path.endswith("learning_rate"):
            np.testing.assert_array_equal(rewind.restored[path], np.float32(0.0625))
        else:
            np.testing.assert_array_equal(rewind.restored[path], taken, err_msg=path)
            if path.endswith("spike_norms"):
                assert rewind.before[path] > taken > 0
            moved += (taken != rewind.before[path]).any()
    # Two kernels (that before BatchNormalization has a bias without gradient), gamma, beta, bias;
    # two moments and an average of each; two statistics, a seed, the iterations.
    assert moved >= 5 * 4 + 4
    assert "learning rate 0.125 -> 0.0625" in rewind.changes
    if wrap == "kmp":
        # Losses that are not finite have not moved it; what happened has happened.
        assert "loss scale 256 -> 128" in rewind.changes
        assert float(optimizer.dynamic_scale) == 128.0
        assert int(optimizer.steps) == 10 and int(optimizer.skipped_steps) == 2
        assert any(path.endswith("spike_norms") for path in rewind.taken)
    if wrap == "keras":
        assert float(optimizer.dynamic_scale) == 128.0


class RewindTwice(Rewind):
    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if batch == self.restore_at + 3:
            self.changes += restore_snapshot(self.model, self.snapshot, lr_factor=0.5)


@pytest.mark.parametrize("make", [kmp.scaled, lambda optimizer: optimizer])
def test_a_second_rollback_to_a_snapshot_lowers_the_learning_rate_further(make):
    model = linear_model(make(keras.optimizers.SGD(0.125)))
    rewind = RewindTwice(3, 6)
    fit(model, [rewind], steps=10)
    rates = [change for change in rewind.changes if "rate" in change]
    assert rates == ["learning rate 0.125 -> 0.0625", "learning rate 0.0625 -> 0.03125"]
    assert float(model.optimizer.learning_rate) == 0.03125


def test_a_rollback_lowers_the_rate_of_each_part_of_an_optimizer():
    sgd, rate = keras.optimizers.SGD, keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    body, head = sgd(0.125, name="body"), sgd(rate, name="head")
    parts = of_keras("optimizers.MultiOptimizer")(lambda v: body if "kernel" in v.path else head)
    rewind = Rewind(3, 8)
    fit(linear_model(kmp.scaled(parts, "none")), [rewind], steps=10)
    assert rewind.changes == [
        "learning rate 0.125 -> 0.0625 (body)",
        "learning rate left to its schedule, which no callback can lower (head)",
    ]
    assert float(body.learning_rate) == 0.0625


OVERFLOW = 3e18  # of inputs: their loss is finite, and their gradient at a scale of 64 is not


class Causal(keras.layers.Layer):
    """Adds a mask of -inf that is kept as a variable, as a checkpoint of another library has it."""

    def build(self, shape):
        self.mask = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x):
        return ops.softmax(x + self.mask)


def test_a_mask_of_minus_inf_in_a_variable_is_no_obstacle():
    mask = Causal()
    model = keras.Sequential([keras.Input((2,)), mask, keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd", learning_rate=RATE), "mse")
    mask.mask.assign(np.float32([0, -np.inf]))
    with pytest.warns(UserWarning, match=r"Rollback 1 of 3 to step 1[2-9]:"):
        x, y = data(steps=24)
        y[4 * 20 :] *= 1000
        guard = DivergenceGuard("rollback", snapshot_freq=2, **QUICK)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[guard])
    assert ops.convert_to_numpy(mask.mask).tolist() == [0, -np.inf]


@pytest.mark.quick
@pytest.mark.parametrize("floor, change", [(64.0, "64 -> 128"), (256.0, "256 -> 256")])
def test_the_loss_scale_goes_back_to_half_of_what_it_was(floor, change):
    """The steps that diverged have taken it down, and it would take long to grow again."""
    rule = kmp.DynamicLossScale(256.0, min_scale=floor)
    model = linear_model(kmp.scaled("sgd", rule, learning_rate=RATE))
    rewind = Rewind(1, 8)
    fit(model, [kmp.callbacks.TerminateOnNaN(), rewind], poisoned=[3, 4, 5], poison=OVERFLOW)
    assert f"loss scale {change}" in rewind.changes


def test_a_scale_of_keras_own_has_no_floor():
    scale = 2.0**-60
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE), scale)
    model = linear_model(optimizer)
    optimizer.build(model.trainable_variables)
    restore_snapshot(model, take_snapshot(model, 1), 0.5)
    assert float(optimizer.dynamic_scale) == scale


def test_a_state_that_is_not_finite_is_no_snapshot():
    model = linear_model("sgd")
    fit(model, [], steps=2)
    assert take_snapshot(model, 2) is not None
    model.layers[0].kernel.assign([[np.nan], [0.0]])
    assert take_snapshot(model, 2) is None


@pytest.mark.parametrize("spe", SPE)
@pytest.mark.parametrize("optimizer", ["kmp", "bare"])
def test_after_a_rollback_the_run_goes_on_from_before_the_bad_batches(optimizer, spe):
    """Bare, the weights are NaN by then; with kmp finite, and so far off that the loss is not."""
    sgd = keras.optimizers.SGD(RATE)
    optimizer = kmp.LossScaleOptimizer(sgd, loss_scale=1.0) if optimizer == "kmp" else sgd
    model = linear_model(optimizer, steps_per_execution=spe)
    guard = DivergenceGuard("rollback", update_freq=4, snapshot_freq=4)
    message = r"Step 8\d: the loss diverged: .*Rollback 1 of 3 to step 64: learning rate 0.015625 -"
    with pytest.warns(UserWarning, match=message) as caught:
        fit(model, [guard], poisoned=[69], poison=1e16, steps=160)
    assert len(messages(caught)) == guard.rollbacks == 1
    x, y = data()
    clean = linear_model(keras.optimizers.SGD(RATE))
    fit(clean, [], steps=64)
    there, now = (np.abs(m.predict(x, verbose=0) - y).max() for m in (clean, model))
    assert now < there / 2


def test_gradients_that_overflow_for_ever_are_a_divergence():
    """After a step to weights so large that the loss is finite and its gradient is not."""

    def steep(y, outputs):
        here = ops.stop_gradient(outputs)
        zero = ops.where(ops.abs(here) > 100.0, outputs - here, 1.0)
        return ops.minimum(ops.square(y - outputs), 1e30) + ops.sqrt(zero)

    model = linear_model(kmp.scaled("sgd", "none", learning_rate=RATE))
    model.compile(model.optimizer, steep)
    x, y = data(200)
    y[4 * 60] = 1e14
    guard = kmp.callbacks.DivergenceGuard("rollback", 2, snapshot_freq=2)
    with pytest.warns(UserWarning, match="Rollback 1 of 3"):
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[guard])
    assert guard.rollbacks == 1


def test_all_optimizers_of_a_model_go_back():
    """As a GAN has them; what `compile` has without an argument never steps.

    One has begun its first window of micro-batches, in which its `iterations` is 0.
    """
    model = linear_model()
    weights = model.trainable_variables
    model.one = kmp.scaled("sgd", learning_rate=RATE, momentum=0.5)
    model.two = keras.optimizers.SGD(RATE, momentum=0.5, gradient_accumulation_steps=3)
    inner = (model.one.inner_optimizer, model.two)

    def step():
        model.one.scale_loss(1.0)
        for optimizer in (model.one, model.two):
            optimizer.apply([ops.ones(v.shape) for v in weights], weights)

    def state():
        return [np.array(ops.convert_to_numpy(v)) for x in inner for v in x.variables]

    step()
    kept, snapshot = state(), take_snapshot(model, 1)
    step()
    changes = restore_snapshot(model, snapshot, 0.5)
    for before, after in zip(kept, state(), strict=True):
        assert (before == after).all() or (before, after) == (RATE, RATE / 2)
    rate = f"learning rate {RATE:g} -> {RATE / 2:g}"
    scale = "loss scale 32768 -> 16384"
    assert [x.split(" (")[0] for x in changes] == [rate, scale, rate]
    assert changes[0].endswith(f"({model.one.name})")


def test_a_snapshot_does_not_pass_for_scaling_the_loss():
    model = linear_model()
    model.optimizer.build(model.trainable_variables)
    restore_snapshot(model, take_snapshot(model, 1), 0.5)
    assert not model.optimizer.scale_was_read


@pytest.mark.quick
def test_rollbacks_are_used_up():
    model = linear_model(kmp.scaled("sgd", learning_rate=0.0))
    guard = DivergenceGuard("rollback", **QUICK, snapshot_freq=1, max_rollbacks=2)
    with pytest.warns(UserWarning) as caught:
        fit_high(model, guard)
    said = messages(caught)
    assert [x.split(":")[0] for x in said] == ["Step 43", "Step 46", "Step 49"]
    assert "Rollback 2 of 2 to step 39" in said[1]
    assert said[2].endswith("Nothing was done: max_rollbacks=2 are used up.")


def test_a_schedule_is_not_lowered():
    schedule = keras.optimizers.schedules.ExponentialDecay(RATE, 10, 0.5)
    model = linear_model(kmp.scaled("sgd", learning_rate=schedule))
    guard = DivergenceGuard("rollback", **QUICK, snapshot_freq=1)
    with pytest.warns(UserWarning, match="to step 39: learning rate left to its schedule"):
        fit_high(model, guard, steps=46)
    # 46 steps; at the 43rd it went back to the 39th.
    assert int(model.optimizer.iterations) == 39 + 3


def test_without_a_snapshot_nothing_is_done():
    model = linear_model(kmp.scaled("sgd", learning_rate=0.0))
    guard = DivergenceGuard("rollback", **QUICK)
    with pytest.warns(UserWarning, match="diverged before there was a snapshot"):
        fit(model, [guard], poisoned=range(12), steps=14)


def test_a_second_fit_begins_anew():
    model = linear_model(kmp.scaled("sgd", learning_rate=0.0))
    guard = DivergenceGuard("rollback", **QUICK, snapshot_freq=1)
    with pytest.warns(UserWarning, match="Rollback 1 of 3 to step 39"):
        fit_high(model, guard, steps=43 + 1)
    fit(model, [guard])
    assert guard.rollbacks == 0


@pytest.mark.parametrize("watch", [DivergenceGuard, kmp.callbacks.TerminateOnNaN])
def test_a_train_step_that_tells_no_loss_is_noticed(watch):
    class Silent(keras.Sequential):
        def train_step(self, *args):
            logs = {"nothing": ops.zeros(())}
            return (logs, args[0]) if BACKEND == "jax" else logs

    model = Silent([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    with pytest.warns(UserWarning, match=f"{watch.__name__} sees no loss") as caught:
        fit(model, [watch()], epochs=2)
    assert len([w for w in caught if "sees no loss" in str(w.message)]) == 1


@pytest.mark.filterwarnings("ignore:.* sees no loss")
@pytest.mark.parametrize("watch", [DivergenceGuard, kmp.callbacks.TerminateOnNaN])
def test_a_model_that_keeps_metrics_of_its_own_is_trained(watch):
    """Keras's loop on JAX has the state of those that `metrics` lists, and of no others."""

    class Model(keras.Sequential):
        metrics = property(lambda self: [self.own])

    model = Model([keras.Input((2,)), keras.layers.Dense(1)])
    model.own = keras.metrics.Mean(name="own")
    model.compile("sgd", loss="mse")
    fit(model, [watch(update_freq=2)])
    assert int(model.optimizer.iterations) == 12


def test_asynchronous_dispatch_stays_on():
    assert DivergenceGuard.on_train_batch_end is keras.callbacks.Callback.on_train_batch_end


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments",
    [
        {"action": "ignore"},
        {"update_freq": 0},
        {"detector": "mad"},
        {"snapshot_freq": 0},
        {"lr_factor": 0.0},
        {"lr_factor": 2},
        {"max_rollbacks": 0},
    ],
    ids=str,
)
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=f"`{next(iter(arguments))}`.* must"):
        DivergenceGuard(**arguments)
