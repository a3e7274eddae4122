"""AmaxLossScale: the rule against plain Python, then in the optimizer, from its first step on."""

import keras
import numpy as np
import pytest
from keras import ops
from oracle import BACKEND, COMPILED_MODES, MODES, Run, compiled, number

import kmp


def follow(rule, steps, mode="eager"):
    """The scale after each step; a step is its largest gradient, or None for an overflow."""
    step = compiled(lambda *arguments: rule.next(*arguments), mode)
    state, scales = rule.init(), []
    for largest in steps:
        finite = ops.convert_to_tensor(largest is not None)
        value = ops.convert_to_tensor(0.0 if largest is None else largest, "float32")
        state = step(state, finite, value)
        scales.append(float(number(state.scale)))
    return scales


def expected_scales(
    steps, headroom_bits, interval, backoff=1 / 16, floor=2.0**-48, ceiling=2.0**24
):
    scale, wait, zeros, scales = 1.0, 0, 0, []
    enough = 2.0 ** (11 + 4 - headroom_bits)  # for a gradient of 1
    for largest in steps:
        zeros = zeros + 1 if largest == 0 and not wait and scale >= enough else 0
        if largest is None:
            scale, wait = max(scale * backoff, floor), interval
        elif wait:
            wait -= 1
        elif largest == 0 and scale < enough:
            scale *= 2
        elif largest == 0:
            if zeros == interval:
                scale, zeros = min(scale * 2, ceiling), 0
        else:
            scale = ceiling
            while scale > floor and largest * scale * 2**headroom_bits > 65504:
                scale /= 2
        scales.append(scale)
    return scales


@pytest.mark.parametrize("mode", MODES)
def test_random_traces_equal_plain_python(mode):
    random = np.random.default_rng(0)
    steps = [np.float32(2.0**e) for e in random.uniform(-40, 20, 60)]
    for i in random.integers(0, 60, 12):
        steps[i] = random.choice([None, np.float32(0)])
    steps[20:20] = [np.float32(0)] * 40
    rule = kmp.AmaxLossScale(headroom_bits=3, growth_interval=4)
    assert follow(rule, steps, mode) == expected_scales(steps, 3, 4)
    assert None in steps and 0 in steps


@pytest.mark.parametrize(
    "largest, scale",
    [
        (65504 / 2**14, 2.0**10),  # exactly at the bound
        (np.nextafter(np.float32(65504 / 2**14), np.float32(9)), 2.0**9),  # just above it
        (1e-30, 2.0**24),
        (1e12, 2.0**-28),
        (1e30, 2.0**-48),
        (float(np.finfo("float32").max), 2.0**-48),  # its headroom is beyond float32
    ],
)
def test_the_bound_is_exact(largest, scale):
    assert follow(kmp.AmaxLossScale(), [largest]) == [scale]


def test_zero_gradients_let_it_grow_step_by_step():
    assert follow(kmp.AmaxLossScale(), [0.0, 0.0, 1.0]) == [2, 4, 2.0**11]


@pytest.mark.parametrize("mode", MODES)
def test_after_many_zero_gradients_a_gradient_of_1_overflows_in_no_step(mode):
    """A frozen or masked beginning: the scale stood at 2**24, and a 1 cost three skipped steps."""
    assert follow(kmp.AmaxLossScale(), [0.0] * 30 + [1.0], mode)[10:] == [2.0**11] * 21


def test_gradients_that_vanish_in_float16_are_found_in_the_end():
    """The scale rises, slowly, for as long as everything is zero; one number ends that."""
    rule = kmp.AmaxLossScale(initial_scale=2.0**12, growth_interval=3)
    assert follow(rule, [0.0] * 6 + [1e-9, 0.0, 0.0, 0.0]) == [
        *[2.0**12] * 2,
        *[2.0**13] * 3,
        2.0**14,
        *[2.0**24] * 4,
    ]


def test_hysteresis_floor_and_ceiling():
    rule = kmp.AmaxLossScale(
        initial_scale=64, min_scale=3, max_scale=100, hysteresis=2, growth_interval=1
    )
    assert follow(rule, [None, None, None, 1e-9, 1e-9]) == [64, 4, 3, 3, 64]
    assert follow(kmp.AmaxLossScale(initial_scale=3, min_scale=3, max_scale=3), [1.0, None]) == [
        3,
        3,
    ]


@pytest.mark.filterwarnings("ignore:Step 2")
def test_a_loss_that_is_not_finite_makes_nobody_wait():
    """The scale stays where it was, and the next step's maximum counts again."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(kmp.scaled("sgd", loss_scale=kmp.AmaxLossScale(), learning_rate=1e-6), "mse")
    x = np.float32([[np.nan], [2.0**-10]])
    callbacks = [kmp.callbacks.GradientHealth()]  # where JAX's optimizer is told of the loss
    model.fit(x, 0 * x + 1, batch_size=1, shuffle=False, verbose=0, callbacks=callbacks)
    assert int(model.optimizer.skipped_steps) == 1 and int(model.optimizer.scale_state.wait) == 0
    assert float(model.optimizer.dynamic_scale) >= 2.0**19


@pytest.mark.parametrize("mode", MODES)
def test_the_optimizer_hands_it_the_true_maximum(mode):
    run = Run(kmp.scaled("sgd", kmp.AmaxLossScale(), learning_rate=0.5), mode)
    good = [np.full((4, 3), 0.5, "float32"), np.array([0.1, -2.0, 0.0], "float32")]
    bad = [np.full((4, 3), np.inf, "float32"), good[1]]
    scales = []
    small = [good[0], np.zeros(3, "float32")]
    for gradients in (good, good, small, bad, good):
        run.step(gradients)
        scales.append(float(number(run.optimizer.dynamic_scale)))
    # 2 * 2048 * 16 is 65536, above float16's largest.
    assert scales == [2.0**10, 2.0**10, 2.0**12, 2.0**8, 2.0**8]
    assert number(run.optimizer.skipped_steps) == 1


def test_without_measurements():
    optimizer = kmp.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), loss_scale=kmp.AmaxLossScale(), measure_gradients=False
    )
    run = Run(optimizer)
    run.step([np.full((4, 3), 0.5, "float32"), np.zeros(3, "float32")])
    assert number(optimizer.dynamic_scale) == 2.0**12


@pytest.mark.only("tensorflow")
def test_the_whole_of_a_sparse_row_counts():
    import tensorflow as tf

    twice = tf.IndexedSlices(tf.constant([[1.5], [1.5]]), tf.constant([3, 3]), tf.constant([9, 1]))
    assert float(kmp.max_abs([twice, tf.constant([-2.0, float("inf")])])) == 3


def regression(loss_scale, jit=bool(COMPILED_MODES)):
    """float16, with targets of a thousand: the gradients overflow at the usual scale."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1, dtype="float32")]
    )
    optimizer = kmp.scaled("sgd", loss_scale, learning_rate=1e-6)
    model.compile(optimizer, "mse", jit_compile=jit)
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 8)).astype("float32")
    model.fit(x, 1e3 * x[:, :1] + 1e3, batch_size=4, verbose=0)
    return model


@pytest.mark.wide
def test_starts_without_the_skipped_steps_of_the_search():
    model = regression("dynamic")
    assert int(model.optimizer.skipped_steps) >= 5
    model = regression(kmp.AmaxLossScale())
    assert int(model.optimizer.skipped_steps) <= 1
    assert float(model.optimizer.dynamic_scale) <= 64


def test_saves_and_loads(tmp_path):
    model = regression(kmp.AmaxLossScale(headroom_bits=5), jit=BACKEND == "jax")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.loss_scale == kmp.AmaxLossScale(headroom_bits=5)
    assert float(loaded.optimizer.dynamic_scale) == float(model.optimizer.dynamic_scale)
    states = [[number(x) for x in m.optimizer.scale_state] for m in (model, loaded)]
    assert states[0] == states[1]


@pytest.mark.parametrize("bits", [-1, 16, float("nan"), "4"])
def test_refuses_a_headroom_that_is_none(bits):
    with pytest.raises((ValueError, TypeError), match="`headroom_bits` of AmaxLossScale must"):
        kmp.AmaxLossScale(headroom_bits=bits)


def test_errors_name_the_strategy_and_the_missing_maximum():
    with pytest.raises(ValueError, match="`growth_interval` of AmaxLossScale"):
        kmp.AmaxLossScale(growth_interval=0)
    rule = kmp.AmaxLossScale()
    with pytest.raises(ValueError, match=r"Received: max_abs=None\. Write rule\.next\(state"):
        rule.next(rule.init(), True)


def test_a_step_without_any_number():
    """Every gradient is empty: there is nothing to measure, and nothing to raise."""
    optimizer = kmp.scaled("sgd", kmp.AmaxLossScale(initial_scale=8.0))
    variables = [keras.Variable(np.zeros((0,), "float32"))]
    optimizer.build(variables)
    optimizer.scale_loss(0.0)
    optimizer.apply([ops.zeros((0,))], variables)
    assert int(ops.convert_to_numpy(optimizer.skipped_steps)) == 0


def test_a_number_without_a_name_is_refused():
    """It could be taken for the headroom, or for the first scale."""
    with pytest.raises(TypeError, match="positional argument"):
        kmp.AmaxLossScale(4.0)
