"""300 random schedules of faults against an oracle in NumPy: nothing lost, nothing applied.

Each schedule is sixteen steps in which an inf, -inf or NaN may turn up in any element of any
variable's gradient, on any replica, in any micro-batch. After every step the whole training state
is compared, bit for bit. That is provable: rates and windows are powers of two, so that what
rounds is sums of two numbers, and these have no order.
"""

import itertools

import keras
import numpy as np
import pytest
from keras import ops
from oracle import few

import kmp

pytestmark = pytest.mark.gpu

BACKEND = keras.backend.backend()
STEPS = 16
SCHEDULES_OF_A_SETTING = 25
SHAPES = ((2, 3), (4,))
INITIAL_SCALE, MIN_SCALE, MAX_SCALE = 8.0, 2.0, 64.0  # floor and ceiling are met now and then
LEARNING_RATE, MOMENTUM = 0.25, 0.5

# (micro-batches in a step, growth interval, hysteresis): twelve, 25 schedules for each.
SETTINGS = [
    *itertools.product([1], [1, 3], [1, 2]),
    *itertools.product([2], [2, 3], [1, 2]),
    *itertools.product([4], [2, 5], [1, 2]),
]


def on_overflow_of(setting):
    """Half of the settings with micro-batches drop the whole window."""
    return "drop_window" if SETTINGS.index(setting) % 4 in (1, 2) else "drop_micro_batch"


def replicas_of(setting):
    """Half of the settings run on two replicas where there is a strategy for it."""
    return 2 if BACKEND == "tensorflow" and SETTINGS.index(setting) % 2 else 1


def schedule(seed, replicas):
    """One list of float32[replicas, *shape] a step: the unscaled gradients with their faults."""
    random = np.random.default_rng(seed)
    probability = random.choice([0.0625, 0.25, 0.625])
    for _ in range(STEPS):
        gradients = [random.normal(size=(replicas, *s)).astype("float32") for s in SHAPES]
        while random.random() < probability:
            gradient = gradients[random.integers(len(SHAPES))]
            gradient.flat[random.integers(gradient.size)] = random.choice([np.inf, -np.inf, np.nan])
        yield gradients


class Oracle:
    """The training state and what a step does to it, in the words of the documentation."""

    def __init__(self, setting):
        self.window, self.growth_interval, self.hysteresis = setting
        self.drops_window = on_overflow_of(setting) == "drop_window"
        self.weights = [np.ones(s, "float32") for s in SHAPES]
        self.momenta = [np.zeros(s, "float32") for s in SHAPES]
        self.accumulators = [np.zeros(s, "float32") for s in SHAPES]
        self.scale = np.float32(INITIAL_SCALE)
        self.iterations = self.steps = self.skipped = self.finite_in_a_row = self.overflows = 0
        self.window_is_lost = False
        self.overflow_steps = np.zeros(len(SHAPES), "float32")

    def step(self, per_replica):
        with np.errstate(invalid="ignore"):
            gradients = [g.sum(axis=0) for g in per_replica]
        self.nonfinite = np.float32([np.sum(~np.isfinite(g)) for g in gradients])
        self.max_abs = np.float32([np.abs(g[np.isfinite(g)]).max(initial=0) for g in gradients])
        self.overflow_steps = self.overflow_steps + (self.nonfinite > 0)
        finite = not self.nonfinite.any()
        if self.drops_window and not finite:
            self.window_is_lost = True
            self.iterations -= self.iterations % self.window
            self.accumulators = [0 * a for a in self.accumulators]
        if finite and not self.window_is_lost:
            self.update(gradients)
        else:
            self.skipped += 1
        self.steps += 1
        if self.steps % self.window == 0:
            self.window_is_lost = False
        self.change_scale(finite)

    def update(self, gradients):
        self.iterations += 1
        self.accumulators = [a + g for a, g in zip(self.accumulators, gradients, strict=True)]
        if self.iterations % self.window == 0:
            for i, total in enumerate(self.accumulators):
                mean = total / np.float32(self.window)
                self.momenta[i] = np.float32(MOMENTUM) * self.momenta[i] - LEARNING_RATE * mean
                self.weights[i] = self.weights[i] + self.momenta[i]
                self.accumulators[i] = 0 * total

    def change_scale(self, finite):
        if finite:
            self.finite_in_a_row, self.overflows = self.finite_in_a_row + 1, 0
            if self.finite_in_a_row == self.growth_interval:
                self.finite_in_a_row = 0
                self.scale = min(self.scale * 2, np.float32(MAX_SCALE))
        else:
            self.finite_in_a_row, self.overflows = 0, self.overflows + 1
            if self.overflows >= self.hysteresis:
                self.scale = max(self.scale / 2, np.float32(MIN_SCALE))

    def state(self):
        state = {
            "weights": self.weights,
            "momenta": self.momenta,
            "iterations": self.iterations,
            "scale": self.scale,
            "step_counter": self.finite_in_a_row,
            "consecutive_skips": self.overflows,
            "skipped_steps": self.skipped,
            "steps": self.steps,
            "nonfinite": self.nonfinite,
            "max_abs": self.max_abs,
            "overflow_steps": self.overflow_steps,
        }
        return state if self.window == 1 else {**state, "accumulators": self.accumulators}


class Subject:
    """kmp's optimizer as the backend runs it: compiled once, fed one schedule after another."""

    def __init__(self, setting):
        window, growth_interval, hysteresis = setting
        self.replicas = replicas_of(setting)
        if self.replicas > 1:
            from replicas import mirrored

            self.strategy = mirrored(self.replicas)
            with self.strategy.scope():
                self.build(window, growth_interval, hysteresis, on_overflow_of(setting))
        else:
            self.build(window, growth_interval, hysteresis, on_overflow_of(setting))
        self.take_step = getattr(self, f"{BACKEND}_step")()
        self.watched = self.watched_variables()
        self.read = self.reader(keras.tree.flatten(self.watched))

    def build(self, window, growth_interval, hysteresis, on_overflow):
        self.weights = [keras.Variable(np.ones(s, "float32"), name=f"v{len(s)}") for s in SHAPES]
        inner = keras.optimizers.SGD(
            LEARNING_RATE,
            momentum=MOMENTUM,
            gradient_accumulation_steps=window if window > 1 else None,
        )
        rule = kmp.DynamicLossScale(
            initial_scale=INITIAL_SCALE,
            growth_interval=growth_interval,
            min_scale=MIN_SCALE,
            max_scale=MAX_SCALE,
            hysteresis=hysteresis,
        )
        self.optimizer = kmp.scaled(inner, rule, on_overflow=on_overflow)
        self.optimizer.build(self.weights)
        self.optimizer.scale_loss(0.0)
        self.variables = self.weights + self.optimizer.variables
        self.start = [ops.convert_to_numpy(v) for v in self.variables]

    def restart(self):
        for variable, value in zip(self.variables, self.start, strict=True):
            variable.assign(value)

    def tensorflow_step(self):
        import tensorflow as tf

        def apply(gradients):
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            self.optimizer.apply([tf.gather(g, replica) for g in gradients], self.weights)

        if self.replicas == 1:
            return tf.function(apply)
        return tf.function(lambda gradients: self.strategy.run(apply, args=(gradients,)))

    def torch_step(self):
        return lambda gradients: self.optimizer.apply([g[0] for g in gradients], self.weights)

    def jax_step(self):
        import jax

        step = jax.jit(self.optimizer.stateless_apply)

        def apply(gradients):
            state = [v.value for v in self.optimizer.variables]
            weights = [v.value for v in self.weights]
            weights, state = step(state, [g[0] for g in gradients], weights)
            for variable, value in zip(self.variables, weights + state, strict=True):
                variable.assign(value)

        return apply

    def step(self, gradients, scale):
        """Feed what backpropagation of the loss times `scale` would bring."""
        with np.errstate(invalid="ignore"):
            self.take_step([ops.convert_to_tensor(g * scale) for g in gradients])

    def reader(self, variables):
        """A function that returns the variables' numbers for each replica."""
        if BACKEND != "tensorflow":
            return lambda: [[ops.convert_to_numpy(v) for v in variables]]
        import tensorflow as tf

        # In one program: reading them one by one takes longer than the steps.
        values = [v.value for v in variables]
        if self.replicas > 1:
            values = [self.strategy.experimental_local_results(x) for x in values]
        replicas = list(zip(*values, strict=True)) if self.replicas > 1 else [values]
        read = tf.function(lambda: [[x.read_value() for x in each] for each in replicas])
        return lambda: keras.tree.map_structure(lambda x: x.numpy(), read())

    def watched_variables(self):
        optimizer = self.optimizer
        inner = optimizer.inner_optimizer
        variables = {
            "weights": self.weights,
            "momenta": inner.momentums,
            "iterations": inner._iterations,
            "scale": optimizer.dynamic_scale,
            "step_counter": optimizer.step_counter,
            "consecutive_skips": optimizer.consecutive_skips,
            "skipped_steps": optimizer.skipped_steps,
            "steps": optimizer.steps,
            "health": optimizer.gradient_health,
        }
        if inner.gradient_accumulation_steps:
            variables["accumulators"] = inner._accumulated_gradients
        return variables

    def states(self):
        """The state as each replica has it."""
        return [self.named(numbers) for numbers in self.read()]

    def named(self, numbers):
        state = keras.tree.pack_sequence_as(self.watched, numbers)
        health = state.pop("health")
        for name in ("max_abs", "nonfinite", "overflow_steps"):
            state[name] = health[:, kmp.health.telemetry.COLUMNS.index(name)]
        return state


def assert_equal(expected, received, where):
    assert expected.keys() == received.keys()
    for name, x in expected.items():
        pairs = (
            zip(x, received[name], strict=True) if isinstance(x, list) else [(x, received[name])]
        )
        for a, b in pairs:
            np.testing.assert_array_equal(b, a, err_msg=f"{name}, {where}")


@pytest.mark.core
@pytest.mark.parametrize(
    "setting",
    few(SETTINGS, SETTINGS[1], SETTINGS[6], SETTINGS[11]),
    ids=lambda s: "window{}-growth{}-hyst{}".format(*s),
)
def test_faults(setting):
    subject = Subject(setting)
    skipped, scales = 0, set()
    for n in range(SCHEDULES_OF_A_SETTING):
        seed = SETTINGS.index(setting) * SCHEDULES_OF_A_SETTING + n
        oracle = Oracle(setting)
        subject.restart()
        for i, gradients in enumerate(schedule(seed, subject.replicas)):
            subject.step(gradients, oracle.scale)
            oracle.step(gradients)
            for state in subject.states():
                assert_equal(oracle.state(), state, f"step {i} of schedule {seed}")
            scales.add(oracle.scale)
        skipped += oracle.skipped
    total = SCHEDULES_OF_A_SETTING * STEPS
    assert total / 8 < skipped < 7 * total / 8  # enough faults, enough training
    assert {MIN_SCALE, INITIAL_SCALE} <= scales


def test_there_are_300_schedules():
    assert len(SETTINGS) * SCHEDULES_OF_A_SETTING == 300
