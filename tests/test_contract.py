"""The contract: an invisible scale, and steps that happen wholly or not at all."""

import functools
import itertools

import keras
import numpy as np
import oracle
import pytest
from keras import ops
from older import muon, of_keras
from oracle import (
    BACKEND,
    COMPILED_MODES,
    MODES,
    Run,
    assert_close,
    assert_same,
    few,
    number,
    random_gradients,
)

import kmp

pytestmark = [pytest.mark.core, pytest.mark.gpu]

BAD = {"inf": np.inf, "minus_inf": -np.inf, "nan": np.nan}
k = keras.optimizers
OPTIMIZERS = {
    "sgd": functools.partial(k.SGD, 0.1),
    "momentum": functools.partial(k.SGD, 0.1, momentum=0.9, nesterov=True),
    "schedule": lambda: k.SGD(k.schedules.ExponentialDecay(0.5, decay_steps=1, decay_rate=0.5)),
    "weight_decay": functools.partial(k.SGD, 0.1, weight_decay=0.01),
    "rmsprop": functools.partial(k.RMSprop, 0.1, momentum=0.9, centered=True),
    "adam": functools.partial(k.Adam, 0.1, amsgrad=True),
    "adamw": functools.partial(k.AdamW, 0.1),
    "adadelta": functools.partial(k.Adadelta, 0.1),
    "adagrad": functools.partial(k.Adagrad, 0.1),
    "adamax": functools.partial(k.Adamax, 0.1),
    "adafactor": functools.partial(k.Adafactor, 0.1),
    "nadam": functools.partial(k.Nadam, 0.1),
    "ftrl": functools.partial(k.Ftrl, 0.1),
    "lion": functools.partial(k.Lion, 0.1),
    "lamb": functools.partial(k.Lamb, 0.1),
    "muon": functools.partial(muon, 0.1),
    "schedule_free": functools.partial(of_keras("optimizers.ScheduleFreeAdamW"), 0.1),
    "clipnorm": functools.partial(k.Adam, 0.1, clipnorm=0.5),
    "global_clipnorm": functools.partial(k.SGD, 0.1, global_clipnorm=0.5),
    "clipvalue": functools.partial(k.SGD, 0.1, clipvalue=0.25),
    "ema": functools.partial(
        k.Adam, 0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2
    ),
    "accumulation": functools.partial(k.SGD, 0.1, momentum=0.9, gradient_accumulation_steps=2),
    "everything": functools.partial(
        k.AdamW,
        0.1,
        global_clipnorm=0.5,
        use_ema=True,
        ema_overwrite_frequency=3,
        gradient_accumulation_steps=2,
    ),
}


FEW_MODES = few(MODES, "eager", "xla", "jit")


def restless(**kwargs):
    """A scale that moves on every second step."""
    return kmp.DynamicLossScale(initial_scale=1024, growth_interval=2, **kwargs)


@pytest.mark.parametrize("mode", FEW_MODES)
@pytest.mark.parametrize("name", few(OPTIMIZERS, "everything"))
def test_scale_is_invisible_and_overflow_never_happened(name, mode):
    """Against the bare optimizer, which sees the finite steps alone; bit for bit, every slot.

    XLA contracts `a * b + c` differently where a division precedes it, scale or no scale: there
    the twin divides by a scale of 1, and the bare optimizer, which need not be compiled then, is
    met to the last bits.
    """
    gradients = random_gradients(5)
    in_xla = mode in ("xla", "jit")
    run = Run(kmp.scaled(OPTIMIZERS[name](), loss_scale=restless()), mode)
    bare = Run(OPTIMIZERS[name](), "eager" if in_xla else mode)
    always_one = kmp.DynamicLossScale(1, growth_interval=2, max_scale=1)
    one = Run(kmp.scaled(OPTIMIZERS[name](), loss_scale=always_one), mode) if in_xla else bare
    for i, gradient in enumerate(gradients):
        if i in (2, 3):  # the second of them in the middle of an accumulation
            before = run.state()
            bad = [gradient[0], gradient[1].copy()]
            bad[1][-1] = (np.inf, np.nan)[i - 2]  # the last number of the last variable
            run.step(bad)
            assert_same(run.state(), before)
        run.step(gradient)
        bare.step(gradient)
        if one is not bare:
            one.step(gradient)
    assert_same(run.state(), one.state())
    assert_close(run.state(), bare.state())
    optimizer = run.optimizer
    assert number(optimizer.steps) == 7
    assert number(optimizer.iterations) == number(bare.optimizer.iterations)
    assert number(optimizer.skipped_steps) == 2
    assert number(optimizer.consecutive_skips) == 0
    assert (
        number(optimizer.dynamic_scale)
        == oracle.loss_scales([1, 1, 0, 1, 0, 1, 1], initial_scale=1024, growth_interval=2)[-1]
    )
    np.testing.assert_array_equal(ops.convert_to_numpy(optimizer.gradient_health)[:, 4], [0, 2])


@pytest.mark.parametrize("mode", FEW_MODES)
def test_a_skipped_step_moves_scale_and_counters_alone(mode):
    """One compiled step, which each case takes from the start again."""
    run = Run(kmp.scaled(k.Adam(0.1, use_ema=True), loss_scale=restless()), mode)
    for where, bad in itertools.product(["first", "second", "both"], BAD.values()):
        run.restart()
        check_a_skipped_step(run, where, bad)


def check_a_skipped_step(run, where, bad):
    good = random_gradients(1)[0]
    run.step(good)
    before = run.state()
    flawed = [g.copy() for g in good]
    for g in {"first": flawed[:1], "second": flawed[1:], "both": flawed}[where]:
        g.flat[-1] = bad
    for skips in (1, 2, 3):
        run.step(flawed)
        assert_same(run.state(), before)
        optimizer = run.optimizer
        assert number(optimizer.dynamic_scale) == 1024 / 2**skips
        assert number(optimizer.step_counter) == 0
        assert number(optimizer.skipped_steps) == skips
        assert number(optimizer.consecutive_skips) == skips
        assert number(optimizer.steps) == skips + 1
        assert number(optimizer.iterations) == 1
    health = ops.convert_to_numpy(optimizer.gradient_health)
    overflowed = np.array([where != "second", where != "first"])
    np.testing.assert_array_equal(health[:, 4], overflowed * 3)
    np.testing.assert_array_equal(health[:, 3], overflowed * 1)
    assert np.isfinite(health).all()


@pytest.mark.parametrize("mode", FEW_MODES)
def test_an_overflow_is_counted_in_a_step_that_is_not_measured(mode):
    """Past the first hundred steps; in those between two measurements the last one stands."""
    run = Run(kmp.scaled("sgd", 8), mode)
    run.step([np.full((4, 3), 2.0), np.ones(3)])
    run.optimizer.steps.assign(150)
    run.step([np.full((4, 3), 3.0), np.ones(3)])
    largest = ops.convert_to_numpy(run.optimizer.gradient_health)[:, 1]
    np.testing.assert_array_equal(largest, [2, 1])
    bad = np.full((4, 3), 4.0)
    bad[1] = np.nan
    run.step([bad, np.ones(3)])
    health = ops.convert_to_numpy(run.optimizer.gradient_health)
    np.testing.assert_array_equal(health[:, [1, 3, 4]], [[4, 3, 1], [1, 0, 0]])


FIT_MODES = {
    "tensorflow": {
        "eager": {"run_eagerly": True},
        "graph": {"jit_compile": False},
        "xla": {"jit_compile": True},
        "graph_4": {"jit_compile": False, "steps_per_execution": 4},
        "xla_4": {"jit_compile": True, "steps_per_execution": 4},
    },
    "jax": {
        "eager": {"run_eagerly": True},
        "jit": {"jit_compile": True},
        "jit_4": {"jit_compile": True, "steps_per_execution": 4},
    },
    "torch": {"eager": {}},
}[BACKEND]
FEW_FIT_MODES = few(FIT_MODES, "graph", "jit", "jit_4")


def fit(optimizer, mode, layers, x, y, loss="mse", **kwargs):
    """A model after one epoch of batches of 4, in order."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input(x.shape[1:]), *layers()])
    model.compile(optimizer, loss, **FIT_MODES[mode])
    model.optimizer.build(model.trainable_variables)  # or TensorFlow traces the step twice
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, **kwargs)
    return model


def training_state(model):
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    variables = [*model.trainable_variables, *inner.variables]
    return {v.path: ops.convert_to_numpy(v.value) for v in variables}


@pytest.mark.parametrize("mode", FEW_FIT_MODES)
@pytest.mark.parametrize("name", few(["momentum", "clipnorm", "everything"], "everything"))
def test_scale_is_invisible_in_fit(name, mode):
    """A power of two multiplies every number of the backward pass exactly.

    Inside XLA against a scale of 1, and against the bare optimizer up to contraction, as above.
    """
    random = np.random.default_rng(2)
    x, y = random.normal(size=(32, 3)).astype("float32"), random.normal(size=(32, 1))

    def layers():
        return [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]

    in_xla = mode.startswith(("xla", "jit"))
    scaled = fit(kmp.scaled(OPTIMIZERS[name](), loss_scale=1024), mode, layers, x, y)
    bare = fit(OPTIMIZERS[name](), "eager" if in_xla else mode, layers, x, y)
    if in_xla:
        one = fit(kmp.scaled(OPTIMIZERS[name](), loss_scale=1), mode, layers, x, y)
        assert_same(training_state(scaled), training_state(one))
    else:
        assert_same(training_state(scaled), training_state(bare))
    assert_close(training_state(scaled), training_state(bare))
    assert number(scaled.optimizer.skipped_steps) == 0


def whole_training_state(finite, means, rule):
    """SGD with momentum on the loss `mean(x @ w + b)`, whose gradient is `mean(x)` and 1.

    float64, in which all of these numbers are exact: multiples of 2**-k that only halve.
    """
    weights, momentum = np.zeros(3), np.zeros(3)
    applied = skipped = streak = 0
    for flag, mean in zip(finite, means, strict=True):
        streak = 0 if flag else streak + 1
        skipped += not flag
        if flag:
            momentum = 0.5 * momentum - 0.5 * np.append(mean, 1.0)
            weights = weights + momentum
            applied += 1
    return {
        "weights": weights,
        "momentum": momentum,
        "iterations": applied,
        "steps": len(finite),
        "skipped_steps": skipped,
        "consecutive_skips": streak,
        "dynamic_scale": oracle.loss_scales(finite, **rule)[-1],
    }


@pytest.mark.parametrize("mode", few(FIT_MODES, "graph", "xla_4", "jit", "jit_4"))
@pytest.mark.parametrize("seed", few(range(4), 0))
def test_random_overflows_in_fit_equal_the_oracle(seed, mode):
    random = np.random.default_rng(seed)
    x = random.integers(-8, 8, (12, 4, 2)) / 8.0
    finite = random.uniform(size=12) < 0.6
    means = x.mean(axis=1)
    bad = list(BAD.values())[seed % 3]
    x[~finite, random.integers(0, 4), random.integers(0, 2)] = bad
    rule = {"initial_scale": 64.0, "growth_interval": 2, "max_scale": 128.0, "min_scale": 8.0}
    model = fit(
        kmp.scaled("sgd", kmp.DynamicLossScale(**rule), learning_rate=0.5, momentum=0.5),
        mode,
        lambda: [keras.layers.Dense(1, kernel_initializer="zeros")],
        x.reshape(48, 2).astype("float32"),
        np.zeros((48, 1), "float32"),
        # Finite whatever comes, so that the scale is to blame.
        loss=lambda y, outputs: ops.where(ops.isfinite(outputs), outputs, 0.0),
    )
    optimizer = model.optimizer
    expected = whole_training_state(finite, means, rule)
    flat = [ops.convert_to_numpy(v).ravel() for v in model.trainable_variables]
    np.testing.assert_array_equal(np.concatenate(flat), expected.pop("weights"))
    flat = [ops.convert_to_numpy(v).ravel() for v in optimizer.inner_optimizer.momentums]
    np.testing.assert_array_equal(np.concatenate(flat), expected.pop("momentum"))
    assert {name: number(getattr(optimizer, name)) for name in expected} == expected
    health = ops.convert_to_numpy(optimizer.gradient_health)
    assert health[0, 4] == (~finite).sum()
    if finite[-1]:
        assert health[0, 1] == np.abs(means[-1]).max()
        assert health[0, 3] == 0


@pytest.mark.parametrize("mode", FEW_MODES)
def test_the_schedule_does_not_advance_on_a_skipped_step(mode):
    run = Run(kmp.scaled(OPTIMIZERS["schedule"]()), mode)
    good = [np.ones((4, 3)), np.ones(3)]
    bad = [np.full((4, 3), np.nan), np.ones(3)]
    rates = []
    for gradient in (good, bad, bad, good):
        run.step(gradient)
        rates.append(float(number(run.optimizer.learning_rate)))
    assert rates == [0.25, 0.25, 0.25, 0.125]


@pytest.mark.parametrize("mode", FEW_MODES)
def test_gradients_are_divided_by_the_scale_of_their_own_loss(mode):
    """The scale doubles on every step; a weight still moves by 1 on each."""
    rule = kmp.DynamicLossScale(initial_scale=8, growth_interval=1)
    run = Run(kmp.scaled("sgd", rule, learning_rate=1.0), mode)
    start = run.state()["kernel"]
    for i in range(1, 5):
        run.step([np.ones((4, 3)), np.zeros(3)])
        moved = ops.convert_to_numpy(run.variables[0])
        np.testing.assert_allclose(moved, start - i, rtol=0, atol=1e-5)  # the sum's rounding
        assert number(run.optimizer.dynamic_scale) == 8 * 2**i


@pytest.mark.parametrize("mode", COMPILED_MODES or MODES)  # so many steps take long eagerly
@pytest.mark.parametrize("min_scale", few([1.0, 2.0**-48, 2.0**-126], 2.0**-126))
def test_160_overflows_and_the_next_finite_step(mode, min_scale):
    rule = kmp.DynamicLossScale(min_scale=min_scale)
    run = Run(kmp.scaled("sgd", rule, learning_rate=0.1), mode)
    bare = Run(k.SGD(0.1), mode)
    for _ in range(160):
        run.step([np.full((4, 3), np.inf), np.zeros(3)])
    assert number(run.optimizer.dynamic_scale) == np.float32(max(min_scale, 2.0**-145))
    # Powers of two, for at a scale of 2**-126 any other gradient is subnormal and loses bits.
    gradient = [np.full((4, 3), 2.0), np.full(3, -4.0)]
    run.step(gradient)
    bare.step(gradient)
    assert_same(run.state(), bare.state())
    assert number(run.optimizer.consecutive_skips) == 0
    assert number(run.optimizer.skipped_steps) == 160


@pytest.mark.parametrize("mode", FEW_MODES)
def test_growth_at_the_ceiling_stays_finite(mode):
    rule = kmp.DynamicLossScale(initial_scale=2.0**126, max_scale=2.0**126, growth_interval=1)
    run = Run(kmp.scaled("sgd", rule, learning_rate=0.1), mode)
    bare = Run(k.SGD(0.1), mode)
    for gradient in random_gradients(3):
        gradient = [g / 8 for g in gradient]  # float32 ends at 2**128
        run.step(gradient)
        bare.step(gradient)
        assert number(run.optimizer.dynamic_scale) == 2.0**126
    assert_same(run.state(), bare.state())
    assert number(run.optimizer.skipped_steps) == 0


def test_true_gradients_that_leave_float32_are_an_overflow():
    """Finite as it arrives, infinite after division by a scale below one."""
    run = Run(kmp.scaled("sgd", 2.0**-100))
    before = run.state()
    run.optimizer.scale_loss(0.0)
    run.optimizer.apply([ops.full((4, 3), 1e20), ops.zeros(3)], run.variables)
    assert_same(run.state(), before)
    assert number(run.optimizer.skipped_steps) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_loss_is_multiplied_in_float32(dtype):
    optimizer = kmp.scaled("sgd", 2.0**15)
    loss = ops.cast(ops.full((), 60000.0), dtype)
    expected = float(ops.cast(loss, "float32")) * 2.0**15
    for built in (False, True):
        if built:
            optimizer.build([keras.Variable(1.0)])
        scaled = optimizer.scale_loss(loss)
        assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
        assert number(scaled) == np.float32(expected)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("mode", FEW_MODES)
def test_a_variable_without_gradient_stays(mode):
    run = Run(kmp.scaled("sgd", 8, learning_rate=1.0), mode)
    before = run.state()
    run.step([None, np.ones(3)])
    after = run.state()
    np.testing.assert_array_equal(after["kernel"], before["kernel"])
    np.testing.assert_array_equal(after["bias"], before["bias"] - np.float32(1))
    run.step([None, np.full(3, np.inf)])
    assert_same(run.state(), after)
    np.testing.assert_array_equal(ops.convert_to_numpy(run.optimizer.gradient_health)[0], [0] * 5)


def test_no_gradient_at_all_is_an_error():
    run = Run(kmp.scaled("sgd"))
    with pytest.raises(ValueError, match=r"No gradients provided.*`compile` have a `loss`"):
        run.step([None, None])


def test_as_many_gradients_as_variables():
    run = Run(kmp.scaled("sgd"))
    with pytest.raises(ValueError, match=r"1 gradients for 2 variables"):
        run.step([np.ones((4, 3))])


def test_an_optimizer_that_is_not_built_is_told_to_build():
    with pytest.raises(ValueError, match=r"optimizer.build\(model.trainable_variables\)"):
        kmp.scaled("sgd").apply([ops.ones(2)])


def test_apply_builds_on_its_first_call():
    variable = keras.Variable(np.float32([1, 2]))
    optimizer = kmp.scaled("sgd", 8, learning_rate=0.5)
    optimizer.scale_loss(0.0)
    optimizer.apply([ops.full((2,), 8.0)], [variable])
    np.testing.assert_array_equal(ops.convert_to_numpy(variable), [0.5, 1.5])


@pytest.mark.parametrize("chosen", [0, 1])
def test_a_subset_of_the_variables(chosen):
    """As after freezing a layer: the health of each variable stays in its own row."""
    run = Run(kmp.scaled(k.SGD(0.1, momentum=0.9), loss_scale=8))
    before = run.state()
    variable = run.variables[chosen]
    run.optimizer.scale_loss(0.0)
    run.optimizer.apply([ops.full(variable.shape, 8.0)], [variable])
    after = run.state()
    np.testing.assert_array_equal(after[variable.path], before[variable.path] - np.float32(0.1))
    other = run.variables[1 - chosen]
    np.testing.assert_array_equal(after[other.path], before[other.path])
    health = ops.convert_to_numpy(run.optimizer.gradient_health)
    np.testing.assert_array_equal(health[:, 1], [chosen == 0, chosen == 1])


@pytest.mark.only("tensorflow", "torch")
def test_a_layer_that_is_frozen_after_the_first_step():
    """Not on JAX: there Keras's trainer itself refuses it until the model is compiled again."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd", 1024, learning_rate=0.1), "mse")
    x, y = np.ones((4, 2), "float32"), np.zeros((4, 1), "float32")
    model.fit(x, y, verbose=0)
    model.layers[0].trainable = False
    model.make_train_function(force=True)
    before = [ops.convert_to_numpy(v) for v in model.variables]
    model.fit(x, y, verbose=0)
    after = [ops.convert_to_numpy(v) for v in model.variables]
    moved = [bool((a != b).any()) for a, b in zip(before[:4], after[:4], strict=True)]
    assert moved == [False, False, True, True]
    assert number(model.optimizer.steps) == 2


@pytest.mark.parametrize("mode", FEW_MODES)
def test_variables_that_gradients_overwrite(mode):
    """Float8's scales arrive as gradients: never divided, and not written on a skipped step."""
    variables = [keras.Variable(np.float32([1, 2]), name=name) for name in ("kernel", "amax")]
    variables[1].overwrite_with_gradient = True
    run = Run(kmp.scaled("sgd", restless(), learning_rate=1.0), mode, variables)

    def step(kernel, amax):
        scale = number(run.optimizer.dynamic_scale)
        run.step([np.float32(kernel), np.float32(amax) / scale])  # arrives as it is
        return [ops.convert_to_numpy(v).tolist() for v in variables]

    assert step([1, 1], [5, 6]) == [[0, 1], [5, 6]]
    assert step([np.inf, 1], [7, 8]) == [[0, 1], [5, 6]]
    assert step([1, 1], [9, 10]) == [[-1, 0], [9, 10]]


@pytest.mark.parametrize("mode", FEW_MODES)
def test_constraints_act_on_good_steps_alone(mode):
    variable = keras.Variable(np.float32([1, -2]), name="kernel")
    run = Run(kmp.scaled("sgd", 8, learning_rate=1.0), mode, [variable])
    variable.constraint = keras.constraints.NonNeg()
    run.step([[np.nan, 0.0]])
    np.testing.assert_array_equal(ops.convert_to_numpy(variable), [1, -2])
    run.step([[0.5, 1.0]])
    np.testing.assert_array_equal(ops.convert_to_numpy(variable), [0.5, 0])


@pytest.mark.parametrize("mode", few(MODES, "graph", "jit"))
@pytest.mark.parametrize("name", few(["adam", "everything"], "everything"))
def test_unmeasured_steps_end_in_the_same_weights(name, mode):
    def run(measure):
        optimizer = kmp.LossScaleOptimizer(
            OPTIMIZERS[name](), loss_scale=restless(), measure_gradients=measure
        )
        run = Run(optimizer, mode)
        for gradient in random_gradients(3):
            run.step(gradient)
            run.step([gradient[0], np.full(3, np.nan)])
        return run

    with_health, without = run(True), run(False)
    assert without.optimizer.gradient_health is None
    assert number(without.optimizer.skipped_steps) == 3
    assert_same(with_health.state(), without.state())


@pytest.mark.parametrize("mode", FEW_FIT_MODES)
def test_pure_float16_trains(mode):
    """Half weights, half gradients, half loss: the scale alone is float32."""
    keras.config.set_dtype_policy("float16")
    x = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
    y = x @ np.float32([[1.0], [-1.0]])
    optimizer = kmp.scaled("sgd", learning_rate=0.125)
    with pytest.warns(kmp.PrecisionWarning, match="Weights in float16 are rounded to nearest"):
        model = fit(optimizer, mode, lambda: [keras.layers.Dense(1)], x, y, epochs=8)
    assert model.trainable_variables[0].dtype == "float16"
    assert optimizer.dynamic_scale.dtype == "float32"
    kernel = ops.convert_to_numpy(model.trainable_variables[0])
    # 128 steps of gradient descent on an exact line; half precision has 11 bits.
    np.testing.assert_allclose(kernel, [[1], [-1]], atol=2.0**-7)
    assert number(optimizer.steps) == 128


@pytest.mark.filterwarnings("ignore:Weights in float16")
@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
@pytest.mark.parametrize("scale", ["none", 1, kmp.StaticLossScale(1.0)], ids=str)
def test_float16_without_loss_scaling_is_never_silent(policy, scale):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.warns(UserWarning, match='float16 without loss scaling .*loss_scale="dynamic"'):
        model.compile(kmp.scaled("sgd", scale), "mse")
        model.optimizer.build(model.trainable_variables)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_no_warning_where_no_scale_is_needed(policy):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd", "none"), "mse")
    model.optimizer.build(model.trainable_variables)
