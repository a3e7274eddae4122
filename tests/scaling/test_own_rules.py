"""Loss-scaling rules written by a user, with a state of their own: as the guide has one."""

import dataclasses
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from keras import ops
from oracle import COMPILED_MODES, MODES, Run, number

import kmp


class CautiousState(NamedTuple):
    scale: Any
    best: Any  # float32[], the highest scale at which a step was finite
    misses: Any  # int32[], overflows so far


@keras.saving.register_keras_serializable(package="tests")
@dataclasses.dataclass(frozen=True)
class Cautious:
    """Doubles up to the best scale so far; every overflow makes it grow more slowly."""

    initial_scale: float = 256.0

    def init(self):
        return CautiousState(self.initial_scale, 1.0, 0)

    def next(self, state, finite):
        best = ops.where(finite, ops.maximum(state.best, state.scale), state.best)
        misses = state.misses + ops.cast(ops.logical_not(finite), "int32")
        grown = state.scale * (1 + ops.cast(1 / (1 + ops.cast(misses, "float32")), "float32"))
        return CautiousState(ops.where(finite, grown, state.scale / 4), best, misses)

    def scale(self, loss, state):
        return loss * state.scale

    def unscale(self, tree, state):
        return [None if x is None else x / state.scale for x in tree]

    def get_config(self):
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config):
        return cls(**config)


def in_plain_python(finite):
    """Scale, best and misses after each step."""
    scale, best, misses = np.float32(256), np.float32(1), 0
    for step in finite:
        misses += not step
        if step:
            best, scale = max(best, scale), scale * np.float32(1 + np.float32(1 / (1 + misses)))
        else:
            scale = scale / np.float32(4)
        yield scale, best, misses


STEPS = (True, True, False, True, False, False, True, True)


def gradients(run, finite):
    return [np.full(v.shape, 0.5 if finite else np.inf, "float32") for v in run.variables]


@pytest.mark.parametrize("mode", MODES)
def test_its_fields_are_kept_and_counted(mode):
    run = Run(kmp.scaled("sgd", Cautious()), mode)
    skips = 0
    for finite, expected in zip(STEPS, in_plain_python(STEPS), strict=True):
        run.step(gradients(run, finite))
        assert tuple(number(x) for x in run.optimizer.scale_state) == expected
        skips = 0 if finite else skips + 1
        assert number(run.optimizer.consecutive_skips) == skips
    assert number(run.optimizer.skipped_steps) == 3


def of_rule(rule):
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(4, dtype="mixed_float16")
    model = keras.Sequential([keras.Input((3,)), hidden, keras.layers.Dense(2)])
    optimizer = kmp.scaled("adam", rule, learning_rate=0.1)
    model.compile(optimizer, "mse", jit_compile=bool(COMPILED_MODES))
    return model


def fit(model, epochs):
    x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
    y = 1e3 + x[:, :2]  # whose gradients overflow float16 at a scale of 256
    model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(tmp_path):
    straight, stopped = of_rule(Cautious()), of_rule(Cautious())
    fit(straight, 3)
    fit(stopped, 1)
    stopped.save(tmp_path / "model.keras")
    resumed = keras.models.load_model(tmp_path / "model.keras")
    assert resumed.optimizer.loss_scale == Cautious()
    fit(resumed, 2)
    assert number(resumed.optimizer.scale_state.misses) >= 2
    for x, y in zip(straight.variables, resumed.variables, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(x), ops.convert_to_numpy(y))
    mine, theirs = straight.optimizer.variables, resumed.optimizer.variables
    for x, y in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(x), ops.convert_to_numpy(y), x.path)


def test_the_state_of_another_rule_begins_anew():
    """But for the scale, which the present rule goes on from."""
    run = Run(kmp.scaled("sgd", kmp.DynamicLossScale(64, growth_interval=1)))
    run.step(gradients(run, True))
    store = {}
    run.optimizer.save_own_variables(store)
    other = kmp.scaled("sgd", Cautious())
    other.build(run.variables)
    other.scaled_step.counters.rule.misses.assign(9)
    other.load_own_variables(store)
    assert [number(x) for x in other.scale_state] == [128.0, 1.0, 0]


def test_a_field_that_the_file_lacks_begins_anew():
    """A rule may have been given another field since."""
    run = Run(kmp.scaled("sgd", Cautious()))
    run.step(gradients(run, False))
    store = {}
    run.optimizer.save_own_variables(store)
    del store["loss_scale_misses"]
    run.optimizer.load_own_variables(store)
    assert [number(x) for x in run.optimizer.scale_state] == [64.0, 1.0, 0]


class Nothing(NamedTuple):
    best: float = 1.0


class Flag(NamedTuple):
    scale: float = 1.0
    grows: bool = True


class Many(NamedTuple):
    scale: tuple = (1.0, 2.0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (1024.0, r"`init` of Given must return a NamedTuple with a field `scale`. Received: 1024"),
        (Nothing(), r"with a field `scale`. Received: Nothing\(best=1.0\). Write class State"),
        (Flag(), "'grows' of the state of Given must hold floats or integers. Received: bool"),
        (Many(), r"`scale` of the state of Given must be one number. Received: .* shape \(2,\)"),
    ],
    ids=["number", "no scale", "truth value", "vector"],
)
def test_a_state_that_cannot_be_kept_is_refused_at_construction(state, message):
    class Given(Cautious):
        def init(self):
            return state

    with pytest.raises(ValueError, match=message):
        kmp.scaled("sgd", Given())


def test_a_loss_that_is_not_finite_is_not_told_to_the_rule():
    model = of_rule(Cautious())
    x = np.float32([[np.nan] * 3, [1, 2, 3]])
    with kmp.protect(model):
        model.fit(x, x[:, :2], batch_size=1, shuffle=False, verbose=0)
    assert number(model.optimizer.skipped_steps) == 1
    assert [number(x) for x in model.optimizer.scale_state] == [512.0, 256.0, 0]
