"""STALLED: runs whose weights do not move although there are gradients, and sound ones beside."""

import math

import keras
import numpy as np
import pytest
from keras import ops
from older import of_keras
from oracle import few
from reports import look_at

import kmp
from kmp.callbacks import GradientHealth
from kmp.callbacks.verdict.observation import Weight
from kmp.callbacks.verdict.stalled import FrozenWeights, ZeroGradients
from kmp.health.details import UNMOVED_SHARE, WEIGHT_NORM

pytestmark = [pytest.mark.filterwarnings("ignore:Step", "ignore:float16 without"), pytest.mark.slow]

STEPS = 160


def watched_run(
    optimizer, policy="float32", change=lambda model: None, noise=0.1, epochs=1, update_freq=10
):
    """Fit a small regression; return the callback and the model."""
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu", name="hidden"),
            keras.layers.Dense(8, activation="relu", name="middle"),
            keras.layers.Dense(1, name="head"),
        ]
    )
    change(model)
    model.compile(optimizer, "mse")
    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS * 4, 4)).astype("float32")
    y = x[:, :1] + noise * random.normal(size=(STEPS * 4, 1)).astype("float32")
    watch = GradientHealth(update_freq=update_freq)
    model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=[watch])
    return watch


def test_weights_in_bfloat16_that_no_update_of_adam_moves():
    optimizer = kmp.scaled("adam", "none", rounding="nearest", learning_rate=1e-4)
    found = watched_run(optimizer, "bfloat16").verdict
    assert found.state == "STALLED", str(found)
    assert "stored in bfloat16" in found.reason and "hidden/kernel" in found.reason
    assert 'the policy "mixed_bfloat16"' in found.advice
    assert "master_weights=True" in found.advice


@pytest.mark.parametrize("rate", [0.0, 1e-12])
def test_a_learning_rate_of_nothing(rate):
    found = watched_run(kmp.scaled("sgd", learning_rate=rate)).verdict
    assert found.state == "STALLED" and f"the learning rate is {rate:g}" in found.reason


@pytest.mark.parametrize("memory", [{}, {"master_weights": True}], ids=str)
def test_a_learning_rate_of_nothing_in_bfloat16(memory):
    optimizer = kmp.scaled("adam", "none", learning_rate=0.0, **memory)
    found = watched_run(optimizer, "bfloat16").verdict
    assert found.state == "STALLED" and "the learning rate is 0" in found.reason


@pytest.mark.parametrize("memory", [{}, {"rounding": "nearest"}], ids=str)
def test_a_learning_rate_next_to_nothing_in_bfloat16(memory):
    """Three looks are enough, though most numbers seldom move. No precision cures such a rate."""
    optimizer = kmp.scaled("adam", "none", learning_rate=1e-11, **memory)
    watch = watched_run(optimizer, "bfloat16", update_freq=60)
    assert watch.report.step == STEPS
    assert watch.verdict.state == "STALLED" and "the learning rate is 1e-11" in watch.verdict.reason
    assert "Raise it" in watch.verdict.advice
    # The kernels stand still: NaN, or next to nothing where rounding at random has moved a number.
    # It moves one by its last bit with a chance of 1e-11 over that bit: in one run of 5,000 one
    # that is more than 1e-9 of the norm. Rounded to nearest, it moves what TensorFlow has drawn to
    # be zero. The biases, which began at zero, say nothing of them.
    assert math.isnan(watch._ratio) or watch._ratio < -9


@pytest.mark.parametrize("window", [None, 4])
def test_a_schedule_that_ends_at_zero(window):
    """Keras gives a schedule the number of micro-batches: 100 are 25 windows of 4."""
    rate = keras.optimizers.schedules.PolynomialDecay(0.01, 100, end_learning_rate=0.0)
    optimizer = kmp.scaled("sgd", learning_rate=rate, gradient_accumulation_steps=window)
    found = watched_run(optimizer).verdict
    assert found.state == "STALLED" and "schedule" in found.advice, str(found)


def test_a_learning_rate_of_nothing_for_some_of_the_weights():
    """The rate that counts is that of the weights that stand still, not of the others."""
    resting, moving = keras.optimizers.SGD(0.0), keras.optimizers.SGD(0.01)
    parts = of_keras("optimizers.MultiOptimizer")(lambda v: moving if "head" in v.path else resting)
    found = watched_run(kmp.scaled(parts)).verdict
    assert found.state == "STALLED" and "the learning rate is 0" in found.reason
    assert "2 of 3 weights" in found.reason


@pytest.mark.parametrize(
    "clipping", few([{"clipvalue": 1e-12}, {"global_clipnorm": 1e-12}], {"clipvalue": 1e-12})
)
def test_updates_that_something_holds_back(clipping):
    found = watched_run(kmp.scaled("sgd", learning_rate=0.1, **clipping)).verdict
    assert found.state == "STALLED" and "would move them" in found.reason
    assert next(iter(clipping)) in found.advice


@pytest.mark.parametrize("rate", [0.0, 1e-9])
def test_a_run_of_two_looks_that_nothing_moves(rate):
    """Fits are short, and small weights may move where large ones do not."""
    found = watched_run(kmp.scaled("adam", learning_rate=rate), epochs=2, update_freq=1000).verdict
    assert found.state == "STALLED" and f"the learning rate is {rate:g}" in found.reason
    assert "in 2 looks over 160 steps" in found.reason


@pytest.mark.parametrize("rate, epochs", [(0.0, 2), (1e-8, 4)])
def test_looks_at_micro_batches_that_move_nothing(rate, epochs):
    """Of a rate above 0 a look says little: its micro-batch may be one without an update."""
    optimizer = kmp.scaled("adam", learning_rate=rate, gradient_accumulation_steps=2)
    found = watched_run(optimizer, epochs=epochs, update_freq=1000).verdict
    assert found.state == "STALLED" and f"the learning rate is {rate:g}" in found.reason


@pytest.mark.parametrize("several", [False, True])
def test_looks_between_updates_of_many_micro_batches(several):
    """No look sees a step that moves weights, and they move all the same."""
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=64)
    if several:
        optimizer = of_keras("optimizers.MultiOptimizer")(lambda v, sgd=optimizer: sgd)
    found = watched_run(kmp.scaled(optimizer)).verdict
    assert found.state == "HEALTHY", str(found)


@pytest.mark.parametrize("rate", [0.0, 1e-9])
def test_steps_that_were_skipped_before_a_look_hide_nothing(rate):
    optimizer = kmp.scaled("adam", kmp.DynamicLossScale(2.0**24), learning_rate=rate)
    watch = watched_run(optimizer, "mixed_float16", epochs=2, update_freq=1000)
    assert watch.report.skipped_steps
    assert watch.verdict.state == "STALLED", str(watch.verdict)
    assert f"the learning rate is {rate:g}" in watch.verdict.reason


@pytest.mark.parametrize("skips", [0, 13])
def test_weights_that_skipped_steps_hold_back(skips):
    """Other detectors tell of those; clipping is not what to look at."""
    detector, before = FrozenWeights(), None
    for i in (1, 2, 3):
        details = np.zeros((1, 50), "float32")
        details[:, [WEIGHT_NORM, UNMOVED_SHARE]] = 1.0
        matrix = np.float32([[1, 1, 0, 0, 0]])
        report = kmp.GradientReport(("w",), matrix, 1.0, 20 * i, skips * i, 0, details=details)
        look = look_at(report, 0.003, weights={"w": Weight("w")}, window=2, epoch_start=before)
        found, before = detector.see(look), report
    assert ("clipnorm" in found.advice) if not skips else found is None


@pytest.mark.quick
@pytest.mark.parametrize(
    "sample, rate, looks", [(4096, 1e-5, 3), (144, 1e-5, 36), (16, 1e-5, 314), (16, 1e-9, 3)]
)
def test_half_precision_that_rarely_moves_is_watched_for_longer(sample, rate, looks):
    """A step of 1e-5 may leave 16 numbers as they are for some hundred steps."""
    detector, found, i = FrozenWeights(), None, 0
    weights = {"w": Weight("w", "bfloat16", "bfloat16", moves_rarely=True, sample=sample)}
    before = None
    while found is None:
        i += 1
        details = np.zeros((1, 50), "float32")
        details[:, [WEIGHT_NORM, UNMOVED_SHARE]] = 1.0
        matrix = np.float32([[1, 1, 0, 0, 0]])
        report = kmp.GradientReport(("w",), matrix, 1.0, 20 * i, 0, 0, details=details)
        look = look_at(report, rate, weights=weights, epoch_start=before)
        found, before = detector.see(look), report
    assert (i, found.state) == (looks, "STALLED")


@pytest.mark.parametrize("rate, state", [(0.0, "STALLED"), (1e-9, "HEALTHY")])
def test_two_looks_that_are_close_together(rate, state):
    """They prove nothing, unless the learning rate is 0."""
    found = watched_run(kmp.scaled("adam", learning_rate=rate), epochs=1, update_freq=150).verdict
    assert found.state == state, str(found)


def test_two_looks_at_weights_that_have_moved_say_nothing():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([270], [0.01, 0.0])
    optimizer = kmp.scaled("sgd", learning_rate=schedule)
    found = watched_run(optimizer, epochs=2, update_freq=140).verdict
    assert found.state == "HEALTHY", str(found)


def freeze(*names):
    def change(model):
        for name in names:
            model.get_layer(name).trainable = False

    return change


SOUND = {
    "adam": {"optimizer": lambda: kmp.scaled("adam")},
    "mixed_bfloat16": {"optimizer": lambda: kmp.scaled("adam"), "policy": "mixed_bfloat16"},
    "bfloat16": {
        "optimizer": lambda: kmp.scaled("adam", "none", learning_rate=1e-4),
        "policy": "bfloat16",
    },
    "bfloat16 with masters": {
        "optimizer": lambda: kmp.scaled("adam", "none", master_weights=True, learning_rate=1e-4),
        "policy": "bfloat16",
    },
    "frozen": {"optimizer": lambda: kmp.scaled("adam"), "change": freeze("hidden", "middle")},
    "clipped": {"optimizer": lambda: kmp.scaled("adam", global_clipnorm=1e-3)},
    "accumulated": {"optimizer": lambda: kmp.scaled("sgd", gradient_accumulation_steps=4)},
    "converged": {"optimizer": lambda: kmp.scaled("sgd", learning_rate=0.05), "epochs": 8},
    "noiseless": {
        "optimizer": lambda: kmp.scaled("sgd", learning_rate=0.05),
        "epochs": 8,
        "noise": 0.0,
    },
}


@pytest.mark.parametrize("name", few(SOUND, "adam", "bfloat16"))
def test_sound_runs_are_not_stalled(name):
    arguments = {**SOUND[name]}
    verdict = watched_run(arguments.pop("optimizer")(), **arguments).verdict
    assert verdict.state == "HEALTHY", str(verdict)


def dead(model):
    model.get_layer("hidden").bias.assign(np.full(8, -100.0))


def all_zero(model):
    for layer in model.layers:
        layer.kernel.assign(np.zeros(layer.kernel.shape))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("change", few([dead, all_zero], dead))
def test_only_a_bias_has_a_gradient(policy, change):
    scale = "dynamic" if policy == "mixed_float16" else "none"
    found = watched_run(kmp.scaled("adam", scale), policy, change).verdict
    assert found.state == "STALLED" and "all 3 weights, biases aside" in found.reason, str(found)
    assert found.blame.endswith("hidden/kernel") and "relu" in found.advice


def dead_half(model):
    """The head learns from what the bias of the layer before it gives."""
    dead(model)
    model.get_layer("middle").bias.assign(np.ones(8))


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("optimizer", few(["adam", "adamw"], "adamw"))
def test_half_of_the_weights_have_no_gradient(optimizer, policy):
    scale = "dynamic" if policy == "mixed_float16" else "none"
    found = watched_run(kmp.scaled(optimizer, scale), policy, dead_half).verdict
    assert found.state == "STALLED" and "2 of 3 weights, biases aside" in found.reason, str(found)
    assert "hidden/kernel" in found.reason and found.blame.endswith("middle/kernel")
    assert ("loss scale" in found.advice) == (policy == "mixed_float16")


@pytest.mark.parametrize(
    "norms, decay, rests",
    [
        ((1.0, 1.0, 1.0), 0.0, True),
        ((1.0, 1.01, 1.02), 0.0, False),
        ((1.0, 0.99, 0.98), 1e-4, True),
        ((1.0, 0.97, 0.94), 1e-4, False),
    ],
)
def test_a_weight_without_a_gradient_that_something_moves(norms, decay, rests):
    """An expert that other batches call, or the copy of a network; and weight decay, which is no
    learning."""
    weights = {"a": Weight("a"), "b": Weight("b")}
    seen = [of_two(100 * i, norm) for i, norm in enumerate(norms, 1)]
    found = silence(seen, weights, decay)[-1]
    assert bool(found) == rests
    if found:
        assert "1 of 2 weights, biases aside, were exactly zero in 3 looks over 200 steps (b)" in (
            found.reason
        )


def silence(reports, weights, decay=0.0):
    """What `ZeroGradients` says of each report."""
    detector = ZeroGradients()
    looks = [look_at(report, weight_decay=decay, weights=weights) for report in reports]
    return [detector.see(look) for look in looks]


def of_two(step, weight_norm):
    """`a` has a gradient, `b` has none and this norm."""
    matrix, details = np.float32([[1, 1, 0, 0, 0], [0, 0, 1, 0, 0]]), np.zeros((2, 50), "float32")
    details[:, WEIGHT_NORM] = weight_norm
    return kmp.GradientReport(("a", "b"), matrix, 1.0, step, 0, 0, details=details)


def test_a_loss_without_a_gradient_from_the_first_step_on():
    reports = [report(step, 0.0) for step in (10, 20, 30, 40)]
    seen = silence(reports, {"kernel": Weight("dense")})
    assert seen[:2] == [None, None]
    assert "all 1 weights, biases aside, were exactly zero in 3 looks over 20" in seen[2].reason


@pytest.mark.parametrize("moves", [False, True])
def test_looks_that_all_fall_on_empty_batches(moves):
    """Every third batch weighs nothing: what has moved since has a gradient in the others."""

    def look(i):
        details = np.zeros((1, 50), "float32")
        details[:, WEIGHT_NORM] = 1.0 + 0.01 * i * moves
        matrix = np.float32([[0, 0, 1, 0, 0]])
        return kmp.GradientReport(("kernel",), matrix, 1.0, 30 * i, 0, 0, details=details)

    seen = silence([look(i) for i in (1, 2, 3)], {"kernel": Weight("dense")})
    assert [bool(x) for x in seen] == [False, not moves, not moves]


@pytest.mark.parametrize(
    "norms, skips", [((1.0, 0.0, 0.0, 0.0), 0), ((0.0, 1.0, 0.0, 1.0), 0), ((0.0,) * 4, 1)]
)
def test_gradients_that_are_zero_in_sound_runs(norms, skips):
    """A hinge loss that is satisfied; weights that begin at zero; steps that were skipped."""
    reports = [report(100 * i, norm, skips * i) for i, norm in enumerate(norms, 1)]
    assert not any(silence(reports, {"kernel": Weight("dense")}))


@pytest.mark.parametrize(
    ("first", "last", "found"),
    [
        ([0.5, 0.0], [0.0, 0.0], False),
        ([0.5, 0.0], [0.0, 0.1], True),
        ([0.5, 0.0], [], True),  # nobody knows them
        ([0.0, 0.0], [0.0, 0.0], True),  # sample weights of zero
        ([-0.5, 0.5], [0.0, 0.0], True),  # a loss that was lower, as of a critic that has died
    ],
)
def test_a_loss_that_is_zero_is_solved_if_it_was_above_before(first, last, found):
    detector = ZeroGradients()
    weights, losses = {"kernel": Weight("dense")}, [first, last, last, last]
    looks = [
        look_at(report(100 * i, 0.0), weights=weights, new_losses=x)
        for i, x in enumerate(losses, start=1)
    ]
    assert bool([detector.see(look) for look in looks][-1]) == found


@pytest.mark.parametrize("loss", ["hinge", "squared_hinge"])
def test_a_hinge_loss_that_is_satisfied_within_the_first_epoch(loss):
    random = np.random.default_rng(0)
    y = np.sign(random.normal(size=(2000, 1))).astype("float32")
    x = (0.05 * random.normal(size=(2000, 10)) + 0.3 * y).astype("float32")
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(32, "relu")
    model = keras.Sequential([keras.Input((10,)), hidden, keras.layers.Dense(1)])
    model.compile(kmp.scaled("adam", learning_rate=0.01), loss)
    watch = kmp.callbacks.GradientHealth()
    history = model.fit(x, y, batch_size=64, epochs=12, verbose=0, callbacks=[watch]).history
    assert history["loss"][-1] == 0 < history["loss"][0]
    assert watch.verdict.state == "HEALTHY" and set(map(str, history["verdict"])) == {"HEALTHY"}


def test_only_biases_have_ever_had_a_gradient():
    """Two looks are enough then; where others had one before, three."""
    weights = {"kernel": Weight("dense"), "bias": Weight("dense", is_matrix=False)}

    def look(step, norm):
        matrix = np.float32([[norm, norm, norm == 0, 0, 0], [1, 1, 0, 0, 0]])
        return kmp.GradientReport(("kernel", "bias"), matrix, 1.0, step, 0, 0)

    found = silence([look(20, 0), look(40, 0)], weights)
    assert found[0] is None and "in 2 looks over 20 steps" in found[1].reason
    assert not any(silence([look(20, 1.0), look(40, 0), look(60, 0)], weights))


@pytest.mark.parametrize(
    "number, began, looks, found",
    [
        (2, 0.0, 1, False),
        (2, 0.0, 2, True),
        (2, 1.0, 3, False),  # two looks after the one in which it had a gradient
        (2, 1.0, 4, True),
        (4, 0.0, 2, True),
        (4, 1.0, 9, False),  # a quarter that has learned is no alarm
        (5, 0.0, 9, False),
    ],
)
def test_one_weight_of_some_that_has_no_gradient(number, began, looks, found):
    """If it never had one, two looks are enough, and a quarter of the weights."""
    paths = [f"layer_{i}/kernel" for i in range(number)]

    def look(i):
        matrix = np.full((number, 5), [1.0, 1, 0, 0, 0], "float32")
        norm = 0.0 if i else began
        matrix[0] = [norm, norm, norm == 0, 0, 0]
        return kmp.GradientReport(tuple(paths), matrix, 1.0, 20 * (i + 1), 0, 0)

    said = silence([look(i) for i in range(looks)], {x: Weight(x) for x in paths})
    assert bool(said[-1]) == found and not any(said[:-1])


def report(step, norm, skips=0):
    matrix = np.float32([[norm, norm, norm == 0, 0, 0]])
    return kmp.GradientReport(("kernel",), matrix, 1.0, step, skips, 0)


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_a_model_that_is_frozen_altogether():
    found = watched_run(kmp.scaled("adam"), change=freeze("hidden", "middle", "head")).verdict
    assert found.state == "STALLED" and "no weight to train" in found.reason
    assert "compile" in found.advice


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_the_key_biases_of_attention_are_no_alarm(policy, recwarn):
    """A softmax does not see them: their gradient is zero by mathematics, rounding errors aside."""
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    x = keras.Input((8, 16))
    y, _ = keras.layers.MultiHeadAttention(2, 8)(x, x, return_attention_scores=True)
    y = keras.layers.GlobalAveragePooling1D()(y)
    model = keras.Model(x, keras.layers.Dense(1, dtype="float32")(y))
    model.compile(kmp.scaled("adam"), "mse")
    x = np.random.default_rng(0).normal(size=(64, 8, 16)).astype("float32")
    watch = kmp.callbacks.GradientHealth(update_freq=1)
    model.fit(
        x, 0.1 * x.sum((1, 2))[:, None], epochs=2, batch_size=16, verbose=0, callbacks=[watch]
    )
    assert [str(w.message) for w in recwarn if issubclass(w.category, kmp.PrecisionWarning)] == []


class WithTarget(keras.Model):
    """Whose loss knows the larger of two networks through `ops.stop_gradient` alone."""

    def __init__(self):
        super().__init__()
        self.online = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
        self.target = keras.Sequential([keras.layers.Dense(8) for _ in range(3)])
        self.target.add(keras.layers.Dense(1))

    def call(self, x):
        return self.online(x) + 0.0 * ops.stop_gradient(self.target(x))


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_target_network_is_not_dead():
    """Its gradients are None, or in JAX's pure functions zeros."""
    keras.utils.set_random_seed(0)
    model = WithTarget()
    x = np.random.default_rng(0).normal(size=(STEPS * 4, 4)).astype("float32")
    model(x[:4])
    model.compile(kmp.scaled("adam", "none", learning_rate=0.01), "mse")
    watch = GradientHealth(update_freq=10)
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[watch])
    assert watch.verdict.state == "HEALTHY", str(watch.verdict)
