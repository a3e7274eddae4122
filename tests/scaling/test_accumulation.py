"""What one overflowing micro-batch costs: itself, or its window."""

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from older import of_keras
from oracle import MODES, Run, assert_close, assert_same, few, random_gradients

import kmp

k = keras.optimizers
WINDOW = 4  # a power of two, so that the mean of whole numbers is exact in float32


class Driver:
    """Feeds gradients to an optimizer in the way that the backend trains: compiled if it can."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.variable = keras.Variable(np.float32([8.0, -8.0]))
        optimizer.build([self.variable])
        self.apply = self.make_apply()

    def make_apply(self):
        optimizer, variable = self.optimizer, self.variable
        if BACKEND == "tensorflow":
            import tensorflow as tf

            return tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
        if BACKEND == "jax":
            import jax

            compiled = jax.jit(optimizer.stateless_apply)

            def apply(gradient):
                own = [v.value for v in optimizer.variables]
                new, own = compiled(own, [gradient], [variable.value])
                variable.assign(new[0])
                for v, value in zip(optimizer.variables, own, strict=True):
                    v.assign(value)

            return apply
        return lambda gradient: optimizer.apply([gradient], [variable])

    def step(self, gradient):
        scale = ops.convert_to_numpy(self.optimizer.dynamic_scale)
        self.apply(ops.convert_to_tensor(np.float32(gradient) * scale))


def optimizer(on_overflow):
    rule = kmp.DynamicLossScale(initial_scale=64, growth_interval=5)
    return kmp.scaled(
        "sgd",
        rule,
        on_overflow=on_overflow,
        learning_rate=1.0,
        momentum=0.5,
        gradient_accumulation_steps=WINDOW,
    )


def oracle(gradients, on_overflow):
    """Weights, momentum, iterations and skips after each micro-batch, in plain Python."""
    weight, momentum, held, iterations, skipped = 8.0, 0.0, [], 0, 0
    position, dropped, trace = 0, False, []
    for g in gradients:
        overflow = not np.isfinite(g)
        if on_overflow == "drop_window":
            if overflow:
                iterations, held, dropped = iterations - len(held), [], True
            used = not dropped
            position = (position + 1) % WINDOW
            dropped = dropped and position != 0
        else:
            used = not overflow
        if used:
            held, iterations = [*held, g], iterations + 1
        if len(held) == WINDOW:
            momentum = 0.5 * momentum - sum(held) / WINDOW
            weight, held = weight + momentum, []
        skipped += not used
        trace.append((weight, momentum, sum(held), iterations, skipped))
    return trace


@pytest.mark.parametrize("on_overflow", ["drop_micro_batch", "drop_window"])
@pytest.mark.parametrize("seed", few(range(6), 0, 1))
def test_against_plain_python(on_overflow, seed):
    random = np.random.default_rng(seed)
    gradients = random.integers(-4, 5, 26).astype("float32")
    gradients[random.random(26) < 0.2] = random.choice([np.inf, -np.inf, np.nan])
    driver = Driver(optimizer(on_overflow))
    inner = driver.optimizer.inner_optimizer
    for g, expected in zip(gradients, oracle(gradients, on_overflow), strict=True):
        driver.step([g, 0.0])
        received = (
            ops.convert_to_numpy(driver.variable)[0],
            ops.convert_to_numpy(inner.momentums[0])[0],
            ops.convert_to_numpy(inner._accumulated_gradients[0])[0],
            int(inner._iterations),
            int(driver.optimizer.skipped_steps),
        )
        assert received == expected


def test_the_boundary_of_a_dropped_window_stays():
    """An overflow in the second of four: the next update comes after eight, as in PyTorch."""
    for on_overflow, updates in (("drop_micro_batch", [5, 9]), ("drop_window", [8])):
        driver = Driver(optimizer(on_overflow))
        moved, before = [], 8.0
        for i in range(1, 10):
            driver.step([np.inf if i == 2 else 1.0, 0.0])
            weight = ops.convert_to_numpy(driver.variable)[0]
            if weight != before:
                moved.append(i)
            before = weight
        assert moved == updates


@pytest.mark.wide
def test_a_dropped_window_survives_save_and_load(tmp_path):
    def model():
        keras.utils.set_random_seed(0)
        net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        net.compile(optimizer("drop_window"), loss="mse")
        return net

    def fit(net, x):
        net.fit(x, x[:, :1], batch_size=1, shuffle=False, verbose=0)

    x = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")
    x[5] = np.inf
    whole, part = model(), model()
    fit(whole, x)
    fit(part, x[:6])  # in the middle of the window that was dropped
    part.save(tmp_path / "model.keras")
    resumed = keras.models.load_model(tmp_path / "model.keras")
    assert resumed.optimizer.on_overflow == "drop_window"
    fit(resumed, x[6:])
    for a, b in zip(
        whole.variables + whole.optimizer.variables,
        resumed.variables + resumed.optimizer.variables,
        strict=True,
    ):
        np.testing.assert_array_equal(ops.convert_to_numpy(a), ops.convert_to_numpy(b))


def test_without_accumulation_both_are_the_same():
    traces = []
    for on_overflow in ("drop_micro_batch", "drop_window"):
        driver = Driver(kmp.scaled("sgd", on_overflow=on_overflow, learning_rate=0.5))
        for g in (1.0, np.inf, 2.0):
            driver.step([g, g])
        traces.append(ops.convert_to_numpy(driver.variable).tolist())
    assert traces == [[6.5, -9.5]] * 2


ACCUMULATING = {
    "momentum": (k.SGD, {"momentum": 0.9, "nesterov": True, "global_clipnorm": 0.5}),
    "adam": (k.Adam, {"amsgrad": True, "clipnorm": 0.5, "weight_decay": 0.01}),
    "adafactor": (k.Adafactor, {}),
    "nadam": (k.Nadam, {}),
    "rmsprop": (k.RMSprop, {"momentum": 0.9, "centered": True, "clipvalue": 0.25}),
    "muon": (k.Muon, {}),
    "schedule_free": (of_keras("optimizers.ScheduleFreeAdamW"), {}),
}


@pytest.mark.only("jax")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ACCUMULATING)
def test_windows_are_those_of_keras(name, mode):
    """Keras branches at their ends, kmp selects; also around overflows, and for a schedule."""
    kind, arguments = ACCUMULATING[name]

    def make():
        rate = k.schedules.ExponentialDecay(0.1, decay_steps=1, decay_rate=0.5)
        return kind(rate, gradient_accumulation_steps=3, **arguments)

    run, bare = Run(kmp.scaled(make()), mode), Run(make(), mode)
    for i, gradient in enumerate(random_gradients(7)):
        if i in (1, 3):  # in the middle of a window, and at the beginning of one
            before = run.state()
            run.step([gradient[0], gradient[1] * np.nan])
            assert_same(run.state(), before)
        run.step(gradient)
        bare.step(gradient)
        assert_close(run.state(), bare.state())


@pytest.mark.only("jax")
@pytest.mark.parametrize("use_ema", [False, True])
def test_an_accumulating_step_has_no_branch(use_ema):
    """A moving average of the weights is left to Keras, which branches."""
    import jax

    inner = k.Adam(gradient_accumulation_steps=2, use_ema=use_ema)
    scaled, variable = kmp.scaled(inner), keras.Variable(np.ones(3, "float32"))
    scaled.build([variable])
    scaled.scale_loss(0.0)
    own = [v.value for v in scaled.variables]
    text = str(jax.make_jaxpr(scaled.stateless_apply)(own, [variable.value], [variable.value]))
    assert ("cond[" in text) == use_ema


@pytest.mark.only("jax")
def test_an_optimizers_own_accumulation_is_respected():
    class Own(k.SGD):
        def _backend_apply_gradients(self, grads, trainable_variables):
            trainable_variables[0].assign_add(grads[0] * 0 + 7)

    driver = Driver(kmp.scaled(Own(gradient_accumulation_steps=2)))
    driver.step([1.0, 1.0])
    np.testing.assert_array_equal(driver.variable, [15.0, -1.0])


@pytest.mark.only("tensorflow")
def test_under_a_strategy():
    import replicas
    import tensorflow as tf

    strategy = replicas.mirrored(2)
    with strategy.scope():
        variable = keras.Variable(np.float32([8.0]))
        kmp_optimizer = optimizer("drop_window")
        kmp_optimizer.build([variable])

    @tf.function
    def run(gradient):
        strategy.run(lambda g: kmp_optimizer.apply([tf.identity(g)], [variable]), args=(gradient,))

    gradients = np.float32([1, np.inf, 1, 1, 2, 2, 2, 2, 1])
    for g, expected in zip(gradients, oracle(gradients, "drop_window"), strict=True):
        run(tf.constant([g / 2 * kmp_optimizer.dynamic_scale.numpy()]))
        assert variable.numpy()[0] == expected[0]
    assert kmp_optimizer.skipped_steps.numpy() == 3


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match=r"`on_overflow` must be one of .*drop_window.*Received"):
        kmp.scaled("sgd", on_overflow="drop_everything")


def test_windows_of_an_optimizer_of_several_parts_are_not_dropped():
    sgd = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    several = of_keras("optimizers.MultiOptimizer")(lambda v: sgd)
    with pytest.raises(ValueError, match=r"of one optimizer's accumulation.*Leave on_overflow out"):
        kmp.scaled(several, on_overflow="drop_window")
    assert kmp.scaled(several).on_overflow == "drop_micro_batch"
