"""The rule: worked examples, an oracle, PyTorch's own rule, and what users can get wrong."""

import dataclasses
import functools
import pathlib
import re

import keras
import numpy as np
import oracle
import pytest
from keras import ops
from oracle import COMPILED_MODES, MODES, compiled, few, number

import kmp
from kmp.scaling import rules as scaling

NO_FLOOR = {"min_scale": 2.0**-126, "max_scale": 2.0**126}


def follow(rule, finite, mode="eager", state=None):
    """The states after each step."""
    step = compiled(lambda state, finite: rule.next(state, finite), mode)
    state = rule.init() if state is None else state
    states = []
    for flag in finite:
        state = step(kmp.ScaleState(*state), ops.convert_to_tensor(bool(flag)))
        states.append(state)
    return states


def scales(*args, **kwargs):
    return np.array([number(state.scale) for state in follow(*args, **kwargs)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "finite, expected",
    [
        ("1110111", [128, 128, 256, 128, 128, 128, 256]),
        ("001110", [64, 32, 32, 32, 64, 32]),
    ],
)
def test_worked_examples(finite, expected, mode):
    rule = kmp.DynamicLossScale(initial_scale=128, growth_interval=3, **NO_FLOOR)
    np.testing.assert_array_equal(scales(rule, map(int, finite), mode), np.float32(expected))


def random_case(seed):
    """Rules of every kind; traces with stretches of mostly finite and mostly overflowing steps."""
    random = np.random.default_rng(seed)
    min_scale = 2.0 ** random.integers(-20, 4)
    max_scale = min_scale * 2.0 ** random.integers(1, 30)
    config = {
        "growth_factor": random.choice([2.0, 4.0, 1.5, 1.1, 3.7]),
        "backoff_factor": random.choice([0.5, 0.25, 0.8, 0.3]),
        "growth_interval": int(random.integers(1, 6)),
        "hysteresis": int(random.integers(1, 4)),
        "min_scale": min_scale,
        "max_scale": max_scale,
        "initial_scale": random.uniform(min_scale, max_scale),
    }
    good = np.repeat(random.uniform(0, 1, 8), 6)
    return config, random.uniform(size=48) < good


@pytest.mark.parametrize("seed", few(range(100), *range(25)))
def test_random_traces_equal_the_oracle(seed):
    """Factors, floors and ceilings of all kinds; eager and compiled in turn, each on its share."""
    config, finite = random_case(seed)
    states = follow(kmp.DynamicLossScale(**config), finite, MODES[seed % len(MODES)])
    expected = oracle.loss_scales(finite, **config)
    np.testing.assert_array_equal([number(state.scale) for state in states], expected)
    # The counters, from the trace alone: how many equal flags it ends in.
    overflows = (finite[::-1].argmax() if finite.any() else len(finite)) if not finite[-1] else 0
    assert number(states[-1].overflows) == overflows
    assert (number(states[-1].finite_steps) > 0) <= finite[-1]


@pytest.mark.parametrize("seed", range(20))
def test_what_the_host_has_read_is_moved_as_tensors_are(seed):
    """An eager step moves NumPy's numbers, and gets NumPy's of the same dtypes."""
    config, finite = random_case(seed)
    rules = kmp.DynamicLossScale(**config), kmp.StaticLossScale(12.5), kmp.NoOpLossScale()
    rule = rules[max(0, seed - 17)]
    state = kmp.ScaleState(*map(np.array, map(ops.convert_to_numpy, rule.init())))
    for flag, expected in zip(finite, follow(rule, finite), strict=True):
        state = rule.next(state, np.bool_(flag))
        for x, y in zip(state, map(ops.convert_to_numpy, expected), strict=True):
            assert isinstance(x, np.generic | np.ndarray)
            assert x.dtype == y.dtype and x.shape == ()
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("mode", MODES)
def test_oracle_without_floor_or_ceiling_in_sight(mode):
    config = {"initial_scale": 2.0**15, "growth_interval": 4, **NO_FLOOR}
    finite = np.random.default_rng(5).uniform(size=120) < 0.8
    expected = oracle.loss_scales(finite, **config)
    np.testing.assert_array_equal(scales(kmp.DynamicLossScale(**config), finite, mode), expected)


@pytest.mark.only("torch")
@pytest.mark.parametrize("factors", [(2.0, 0.5), (4.0, 0.25), (1.5, 0.75)], ids=str)
@pytest.mark.parametrize("interval", [1, 3, 7])
@pytest.mark.parametrize("seed", range(4))
def test_equals_torch_grad_scaler(seed, interval, factors):
    """PyTorch multiplies in float64; float32 holds these factors, so that both round once."""
    import torch

    growth, backoff = factors
    scaler = torch.amp.GradScaler("cpu", 2.0**15, growth, backoff, interval)
    parameter = torch.nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([parameter], lr=0.0)
    finite = np.random.default_rng(seed).uniform(size=60) < 0.75
    expected = []
    for flag in finite:
        sgd.zero_grad()
        scaler.scale((parameter * (1.0 if flag else float("inf"))).sum()).backward()
        scaler.step(sgd)
        scaler.update()
        expected.append(scaler.get_scale())
    factors = {"growth_factor": growth, "backoff_factor": backoff}
    rule = kmp.DynamicLossScale(2.0**15, **factors, growth_interval=interval, **NO_FLOOR)
    np.testing.assert_array_equal(scales(rule, finite), np.float32(expected))


@pytest.mark.parametrize("mode", MODES)
def test_floor_is_kept(mode):
    rule = kmp.DynamicLossScale(initial_scale=128, min_scale=32, growth_interval=2)
    states = scales(rule, [0] * 6 + [1, 1], mode)
    np.testing.assert_array_equal(states, np.float32([64, 32, 32, 32, 32, 32, 32, 64]))


@pytest.mark.parametrize("mode", MODES)
def test_floor_below_one_is_kept(mode):
    rule = kmp.DynamicLossScale(initial_scale=1, min_scale=0.01)
    np.testing.assert_array_equal(scales(rule, [0] * 9, mode)[-3:], np.float32([0.01] * 3))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("growth_factor", [2.0, 1e38])
def test_ceiling_is_kept(mode, growth_factor):
    rule = kmp.DynamicLossScale(
        initial_scale=2.0**23, growth_interval=1, growth_factor=growth_factor
    )
    states = scales(rule, [1, 1, 1, 0], mode)
    np.testing.assert_array_equal(states, np.float32([2**24, 2**24, 2**24, 2**23]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("min_scale", few([1.0, 2.0**-48, 2.0**-126], 2.0**-126))
def test_many_overflows_then_growth(mode, min_scale):
    rule = kmp.DynamicLossScale(min_scale=min_scale, growth_interval=2)
    trace = scales(rule, [0] * 160 + [1] * 4, mode)
    np.testing.assert_array_equal(trace[-5:], np.float32(min_scale) * np.float32([1, 1, 2, 2, 4]))
    assert np.isfinite(np.float32(1) / trace).all()


@pytest.mark.parametrize("mode", MODES)
def test_widest_range_stays_invertible(mode):
    rule = kmp.DynamicLossScale(initial_scale=2.0**126, growth_interval=1, **NO_FLOOR)
    trace = scales(rule, [1, 1], mode)
    np.testing.assert_array_equal(trace, np.float32([2.0**126] * 2))


@pytest.mark.parametrize("mode", MODES)
def test_lowered_growth_interval_still_grows(mode):
    """The counter of a resumed run is already past the new interval."""
    old = kmp.DynamicLossScale(growth_interval=2000)
    state = follow(old, [1] * 15)[-1]
    new = kmp.DynamicLossScale(growth_interval=10)
    np.testing.assert_array_equal(
        scales(new, [1, 1], mode, state=state), np.float32([2**16, 2**16])
    )


def test_below_1_the_scale_grows_after_200_steps():
    rule = kmp.DynamicLossScale(initial_scale=0.25, growth_interval=2000)
    state = kmp.ScaleState(*map(np.array, map(ops.convert_to_numpy, rule.init())))
    found = []
    for _ in range(2 * 200 + 2000):
        state = rule.next(state, np.bool_(True))
        found.append(float(state.scale))
    assert [found.index(x) + 1 for x in (0.5, 1.0, 2.0)] == [200, 400, 2400]
    assert np.diff(found).astype(bool).sum() == 3


@pytest.mark.any_backend
def test_the_default_growth_interval_is_what_the_texts_say():
    """Whoever changes the default changes these sentences."""
    told = {
        "kmp/scaling/rules.py": ("after {} finite steps in a row",),
        "kmp/scaling/amax.py": ("stays for {} finite steps", "doubles every {} steps"),
        "kmp/callbacks/verdict/states.py": ("from a share of 1 / {} on",),
        "docs/guide.md": ("after {} finite steps", "about one in {}"),
    }
    root, interval = pathlib.Path(kmp.__file__).parents[1], kmp.DynamicLossScale.growth_interval
    wanted = {(name, x.format(interval)) for name, sentences in told.items() for x in sentences}
    texts = {name: " ".join((root / name).read_text("utf-8").split()) for name in told}
    assert {(name, x) for name, x in wanted if x not in texts[name]} == set()


@pytest.mark.parametrize("mode", MODES)
def test_a_lower_growth_interval_holds_below_1_too(mode):
    rule = kmp.DynamicLossScale(initial_scale=0.25, growth_interval=3)
    found = [float(state.scale) for state in follow(rule, [True] * 6, mode)]
    assert found == [0.25, 0.25, 0.5, 0.5, 0.5, 1.0]


@pytest.mark.parametrize("mode", MODES)
def test_hysteresis_is_consecutive(mode):
    rule = kmp.DynamicLossScale(initial_scale=256, hysteresis=2)
    np.testing.assert_array_equal(scales(rule, [0, 1] * 12, mode), np.float32([256] * 24))


@pytest.mark.parametrize("mode", MODES)
def test_hysteresis_backs_off_from_the_hth_overflow_on(mode):
    rule = kmp.DynamicLossScale(initial_scale=256, hysteresis=3)
    trace = scales(rule, [0, 0, 0, 0, 0, 1, 0, 0, 0], mode)
    np.testing.assert_array_equal(trace, np.float32([256, 256, 128, 64, 32, 32, 32, 32, 16]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", [kmp.StaticLossScale(12.5), kmp.NoOpLossScale()], ids=repr)
def test_constant_scales_count_and_stay(rule, mode):
    states = follow(rule, [1, 1, 0, 0, 0], mode)
    constant = getattr(rule, "value", 1.0)
    assert [number(s.scale) for s in states] == [constant] * 5
    assert [number(s.finite_steps) for s in states] == [1, 2, 0, 0, 0]
    assert [number(s.overflows) for s in states] == [0, 0, 1, 2, 3]


RULES = [
    kmp.NoOpLossScale(),
    kmp.StaticLossScale(1024),
    kmp.DynamicLossScale(),
    kmp.DynamicLossScale(
        128,
        growth_factor=1.5,
        backoff_factor=0.25,
        growth_interval=7,
        min_scale=0.5,
        max_scale=4096,
        hysteresis=2,
    ),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("finite", [True, False])
def test_state_keeps_dtypes_and_shapes(rule, mode, finite):
    for state in (rule.init(), follow(rule, [finite], mode)[0]):
        dtypes = [keras.backend.standardize_dtype(x.dtype) for x in state]
        assert dtypes == ["float32", "int32", "int32"]
        assert [tuple(x.shape) for x in state] == [(), (), ()]


@pytest.mark.parametrize("floatx", ["float16", "bfloat16", "float64"])
def test_floatx_does_not_reach_the_scale(floatx):
    """Factors and scales are float32 whatever Keras's default: 1.1 in float16 is 1.0996."""
    config = {"initial_scale": 70001, "growth_factor": 1.1, "growth_interval": 1}
    keras.config.set_floatx(floatx)
    try:
        trace = scales(kmp.DynamicLossScale(**config), [1, 1, 0, 1])
    finally:
        keras.config.set_floatx("float32")
    np.testing.assert_array_equal(trace, oracle.loss_scales([1, 1, 0, 1], **config))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES[1:3], ids=repr)
def test_half_losses_are_cast_up_before_multiplying(rule, mode, dtype):
    loss = ops.cast(60000.0, dtype)
    exact = float(ops.cast(loss, "float32")) * float(rule.init().scale)
    scaled = compiled(rule.scale, mode)(loss, rule.init())
    assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
    assert number(scaled) == np.float32(exact)


@pytest.mark.parametrize("rule", RULES[1:], ids=repr)
def test_unscale_divides_by_what_scale_multiplied_with(rule):
    state = rule.init()
    gradients = [ops.array([3.0, -0.1], "float32"), {"a": ops.ones((2, 2), "float32") * 7}]
    back = rule.unscale(rule.scale(gradients, state), state)
    for x, y in zip(keras.tree.flatten(back), keras.tree.flatten(gradients), strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(x), ops.convert_to_numpy(y))


@pytest.mark.only("jax", "torch")
def test_gradients_of_each_example():
    """By vectorising the gradient of a scaled loss, unscaled and checked in there."""
    if oracle.BACKEND == "jax":
        from jax import grad, vmap
    else:
        from torch.func import grad, vmap
    rule = kmp.DynamicLossScale(1024)
    state = rule.init()

    def of_example(x):
        scaled = grad(lambda w: rule.scale(ops.sum(ops.square(w)), state))(x)
        (gradient,) = rule.unscale([scaled], state)
        return scaled, gradient, kmp.all_finite([gradient])

    examples = ops.convert_to_tensor(np.float32([[1, 2], [3, np.inf]]))
    scaled, gradients, finite = vmap(of_example)(examples)
    np.testing.assert_array_equal(ops.convert_to_numpy(scaled), [[2048, 4096], [6144, np.inf]])
    np.testing.assert_array_equal(ops.convert_to_numpy(gradients), [[2, 4], [6, np.inf]])
    np.testing.assert_array_equal(ops.convert_to_numpy(finite), [True, False])


def test_unscale_keeps_what_is_no_float():
    rule = kmp.StaticLossScale(4)
    count = ops.array([8, 9], "int32")
    none, unchanged, half = rule.unscale(
        [None, count, ops.array([8.0, 1.0], "float16")], rule.init()
    )
    assert none is None
    assert unchanged is count
    assert keras.backend.standardize_dtype(half.dtype) == "float32"
    np.testing.assert_array_equal(ops.convert_to_numpy(half), np.float32([2, 0.25]))


@pytest.mark.parametrize("mode", MODES)
def test_unscale_of_half_gradients_does_not_underflow(mode):
    """6e-8 / 2**15 is zero in float16."""
    rule = kmp.StaticLossScale(2.0**15)
    tiny = ops.array([2.0**-24], "float16")
    back = compiled(rule.unscale, mode)(tiny, rule.init())
    np.testing.assert_array_equal(ops.convert_to_numpy(back), np.float32([2.0**-39]))


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("mode", MODES)
def test_unscale_keeps_sparse_gradients_sparse(mode):
    import tensorflow as tf

    rule = kmp.StaticLossScale(4)
    state = rule.init()

    def unscaled(values):
        slices = tf.IndexedSlices(values, tf.constant([5, 5]), tf.constant([9, 2]))
        return rule.unscale([slices], state)[0]

    result = compiled(unscaled, mode)(tf.constant([[4.0, 8.0], [2.0, 0.0]]))
    assert isinstance(result, tf.IndexedSlices)
    np.testing.assert_array_equal(result.values, np.float32([[1, 2], [0.5, 0]]))
    np.testing.assert_array_equal(result.indices, [5, 5])
    np.testing.assert_array_equal(result.dense_shape, [9, 2])


def test_no_op_returns_the_same_objects():
    rule, loss, gradients = kmp.NoOpLossScale(), ops.ones(()), [ops.ones(2), None]
    state = rule.init()
    assert rule.scale(loss, state) is loss
    assert rule.unscale(gradients, state) is gradients


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rules_are_frozen_and_compare_by_value(rule):
    same = type(rule)(**rule.get_config())
    assert same == rule
    assert hash(same) == hash(rule)
    assert sum(rule == other for other in RULES) == 1
    with pytest.raises(AttributeError):
        rule.initial_scale = 5.0


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rules_survive_serialisation(rule):
    config = keras.saving.serialize_keras_object(rule)
    assert keras.saving.deserialize_keras_object(config) == rule
    assert scaling.get(config) == rule


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rules_are_loss_scales(rule):
    assert isinstance(rule, scaling.LossScale)
    assert scaling.get(rule) is rule


@pytest.mark.parametrize(
    "identifier, expected",
    [
        ("dynamic", kmp.DynamicLossScale()),
        ("none", kmp.NoOpLossScale()),
        (1024, kmp.StaticLossScale(1024.0)),
        (np.float32(0.5), kmp.StaticLossScale(0.5)),
    ],
    ids=str,
)
def test_get(identifier, expected):
    assert scaling.get(identifier) == expected


dynamic, static = kmp.DynamicLossScale, kmp.StaticLossScale
POSITIVE = "`{}` of {} must be a positive, finite number .* Write a power of two, such as {}="
STEPS = "`{}` of DynamicLossScale must be a whole number of steps, at least 1. .* Write .* {}=1"
NUMBER = "`{}` of {} must be a number. Received: {}="
GROWTH = "`growth_factor` .* finite number above 1. .* Write growth_factor=2.0"
BACKOFF = "`backoff_factor` .* number between 0 and 1. .* Write backoff_factor=0.5"
LOSS_SCALE = r'`loss_scale` must be "dynamic", "none", .* Write loss_scale="dynamic"'
INSIDE = r"`initial_scale` .* \[min_scale, max_scale\]. .* Pass min_scale=.* or max_scale="


def positive(name, owner="DynamicLossScale"):
    return POSITIVE.format(name, owner, name)


@pytest.mark.parametrize(
    "build, message",
    [
        *[
            (functools.partial(dynamic, **{name: value}), positive(name))
            for name in ("initial_scale", "min_scale", "max_scale")
            for value in (0, -4, float("nan"), float("inf"), 2.0**127, 2.0**-127)
        ],
        *[
            (functools.partial(dynamic, **{name: value}), STEPS.format(name, name))
            for name in ("growth_interval", "hysteresis")
            for value in (0, -1, 2.5, float("nan"), float("inf"), 2**31)
        ],
        *[
            (functools.partial(dynamic, growth_factor=value), GROWTH)
            for value in (1, 0.5, -2, float("nan"), float("inf"))
        ],
        *[
            (functools.partial(dynamic, backoff_factor=value), BACKOFF)
            for value in (0, 1, 2, -0.5, float("nan"))
        ],
        *[
            (
                functools.partial(dynamic, **{name: value}),
                NUMBER.format(name, "DynamicLossScale", name),
            )
            for name in dynamic().get_config()
            for value in ("8", None, True, [1, 2])
        ],
        *[
            (functools.partial(static, value), positive("value", "StaticLossScale"))
            for value in (0, -1, float("nan"), float("inf"), 2.0**127)
        ],
        *[
            (functools.partial(static, value), NUMBER.format("value", "StaticLossScale", "value"))
            for value in ("8", None, True)
        ],
        *[
            (functools.partial(scaling.get, value), LOSS_SCALE)
            for value in ("dinamic", None, True, dynamic, [2.0], object())
        ],
        (functools.partial(scaling.get, -1), positive("value", "StaticLossScale")),
        (functools.partial(dynamic, min_scale=8, max_scale=4), "`min_scale` .* Swap the two"),
        (functools.partial(dynamic, 2.0**-49), INSIDE),
        (functools.partial(dynamic, 2.0**25), INSIDE),
    ],
    ids=lambda x: (
        re.sub(r"functools.partial\(|<class '|'>|\)$| at 0x\w+", "", repr(x))[:60]
        if callable(x)
        else ""
    ),
)
def test_bad_input_is_told_what_to_write(build, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        build()


def test_the_advice_for_an_initial_scale_outside_its_range_works():
    kmp.DynamicLossScale(0.5, min_scale=0.5)
    kmp.DynamicLossScale(2.0**25, max_scale=2.0**25)


@pytest.mark.only("tensorflow", "jax")
@pytest.mark.parametrize("mode", COMPILED_MODES)
def test_a_rule_is_no_part_of_the_traced_state(mode):
    """JMP's floor is lost in `jit`, because its rule is the traced state and forgets to list it."""
    rule = kmp.DynamicLossScale(initial_scale=32, min_scale=32)
    assert keras.tree.flatten(rule) == [rule]
    np.testing.assert_array_equal(scales(rule, [0, 0], mode), np.float32([32, 32]))


@dataclasses.dataclass(frozen=True)
class _WithAList(kmp.DynamicLossScale):
    seen: list = dataclasses.field(default_factory=list)


def test_a_rule_with_a_field_that_cannot_be_hashed():
    rule = _WithAList(growth_interval=1)
    assert float(rule.next(rule.init(), True).scale) == 2.0**16
