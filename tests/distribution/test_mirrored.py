"""tf.distribute: an overflow on any replica is everybody's, and nobody waits."""

import contextlib

import keras
import numpy as np
import pytest
from older import of_keras
from replicas import OVERFLOWS, Run, gradients, mirrored, no_merge_call

import kmp
from kmp.callbacks.snapshot import restore_snapshot, take_snapshot

pytestmark = [pytest.mark.only("tensorflow"), pytest.mark.slow]
tf = pytest.importorskip("tensorflow")


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("merge", [True, False], ids=["merge", "no_merge"])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_all_replicas_decide_together(replicas, merge, graph):
    """One compiled step, which each case takes from the start again."""
    strategy = mirrored(replicas)
    with contextlib.nullcontext() if merge else no_merge_call(strategy):
        run = Run(
            strategy,
            lambda: kmp.LossScaleOptimizer(
                keras.optimizers.SGD(0.5, momentum=0.5), initial_scale=1024
            ),
            graph=graph,
        )
        for overflow in OVERFLOWS:
            run.restart()
            run.step(gradients(replicas, overflow))
            check_the_decision(run, skipped=overflow != "none")


def check_the_decision(run, skipped):
    """The whole state on each replica, after one step."""
    optimizer = run.optimizer
    expected = [1.0, 2.0] if skipped else [0.75, 2.125]
    for weights in run.on_each_replica(run.variable):
        np.testing.assert_array_equal(weights, np.float32(expected))
    for momentum in run.on_each_replica(optimizer.inner_optimizer.momentums[0]):
        np.testing.assert_array_equal(momentum, np.float32([0, 0] if skipped else [-0.25, 0.125]))
    for scale in run.on_each_replica(optimizer.dynamic_scale):
        assert scale == (512.0 if skipped else 1024.0)
    assert int(optimizer.iterations.numpy()) == (0 if skipped else 1)
    assert int(optimizer.steps.numpy()) == 1
    assert int(optimizer.skipped_steps.numpy()) == int(skipped)
    for health in run.on_each_replica(optimizer.gradient_health):
        assert health[0, 4] == int(skipped)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize(
    "clip", [{"clipnorm": 0.25}, {"global_clipnorm": 0.25}, {"clipvalue": 0.125}], ids=str
)
def test_clipping_sees_the_reduced_gradient(clip, replicas):
    run = Run(mirrored(replicas), lambda: kmp.scaled("sgd", learning_rate=1.0, **clip))
    run.step(gradients(replicas, "none", value=(3.0, -4.0)))
    moved = run.on_each_replica(run.variable)[0] - np.float32([1.0, 2.0])
    # |(3, -4)| = 5: clipped by norm to 0.25 * (3, -4) / 5, by value to 0.125 * (1, -1).
    expected = [-0.125, 0.125] if "clipvalue" in clip else [-0.15, 0.2]
    np.testing.assert_allclose(moved, expected, rtol=1e-6)


@pytest.mark.parametrize("merge", [True, False], ids=["merge", "no_merge"])
def test_parts_of_several_optimizers_do_not_sum_again(merge):
    """SGD's step is as long as the gradient: with a second sum it would be twice as long."""
    several_of = of_keras("optimizers.MultiOptimizer")

    def make():
        sgd = keras.optimizers.SGD(0.5)  # which notes the strategy
        return kmp.LossScaleOptimizer(several_of(lambda v: sgd), initial_scale=1024)

    strategy = mirrored(2)
    with contextlib.nullcontext() if merge else no_merge_call(strategy):
        run = Run(strategy, make)
        for overflow in ("none", "last"):
            run.step(gradients(2, overflow))
            for weights in run.on_each_replica(run.variable):
                np.testing.assert_array_equal(weights, np.float32([0.75, 2.125]))
    several = run.optimizer.inner_optimizer
    for each in (several, *several.optimizers):
        assert "_all_reduce_sum_gradients" not in vars(each)


SETTINGS = {
    "accumulation": {"gradient_accumulation_steps": 2},  # a power of two: its division is exact
    "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "both": {
        "gradient_accumulation_steps": 2,
        "use_ema": True,
        "ema_momentum": 0.5,
        "ema_overwrite_frequency": 2,
    },
    "decay_and_clipping": {"weight_decay": 0.125, "clipnorm": 0.5},
}


@pytest.mark.parametrize("merge", [True, False], ids=["merge", "no_merge"])
def test_the_inner_optimizer_can_be_used_alone_afterwards(merge):
    """It sums over the replicas again; otherwise their weights would drift apart."""
    strategy = mirrored(2)
    with contextlib.nullcontext() if merge else no_merge_call(strategy):
        run = Run(strategy, lambda: kmp.scaled("sgd", learning_rate=0.25), graph=False)
        run.step(gradients(2, "none"))
        run.optimizer = run.optimizer.inner_optimizer
        run.step([[1.0, 0.0], [0.0, 2.0]])
    weights = run.on_each_replica(run.variable)
    np.testing.assert_array_equal(weights[0], weights[1])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_settings_equal_a_single_device(replicas, graph, setting):
    """Against the bare inner optimizer without any strategy, on the finite steps alone."""
    random = np.random.default_rng(7)
    steps = [random.integers(-8, 8, 2) / 8.0 for _ in range(9)]
    overflow_at = {3: "first", 4: "last", 7: "all"}
    run = Run(
        mirrored(replicas),
        lambda: kmp.scaled("sgd", learning_rate=0.5, momentum=0.5, **SETTINGS[setting]),
        graph=graph,
    )
    variable = keras.Variable(np.float32([1.0, 2.0]))
    bare = keras.optimizers.SGD(0.5, momentum=0.5, **SETTINGS[setting])
    for i, value in enumerate(steps):
        run.step(gradients(replicas, overflow_at.get(i, "none"), value))
        if i not in overflow_at:
            bare.apply([tf.constant(value, "float32")], [variable])
    np.testing.assert_array_equal(run.on_each_replica(run.variable)[-1], variable.numpy())
    assert int(run.optimizer.iterations.numpy()) == int(bare.iterations)
    assert int(run.optimizer.skipped_steps.numpy()) == 3


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_sparse_gradients_of_an_embedding(graph):
    strategy = mirrored(2)
    with strategy.scope():
        table = keras.Variable(np.ones((4, 2), "float32"), name="table")
        optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
        optimizer.build([table])
        optimizer.scale_loss(0.0)

    def replica_step():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        values = optimizer.scale_loss(tf.constant([[1.0, 2.0]]))
        slices = tf.IndexedSlices(values, tf.reshape(index, [1]), tf.constant([4, 2]))
        optimizer.apply([slices], [table])

    def run():
        strategy.run(replica_step)

    (tf.function(run) if graph else run)()
    expected = np.ones((4, 2), "float32")
    expected[:2] -= [1.0, 2.0]
    np.testing.assert_array_equal(table.numpy(), expected)


@pytest.mark.parametrize("replicas", [1, 2])
def test_fit(replicas):
    """A poisoned half batch lands on one replica alone; fit goes on and learns."""
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    x[8:16][-1, 0] = np.nan  # step 2 of 4, last row: the last replica's
    with mirrored(replicas).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(kmp.scaled("sgd", learning_rate=0.1), loss="mse")
    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    assert np.isfinite(model.get_weights()[0]).all()
    assert int(model.optimizer.skipped_steps.numpy()) == 3
    assert int(model.optimizer.iterations.numpy()) == 9


@pytest.mark.parametrize(
    "tool", [kmp.debug.locate_nonfinite, kmp.debug.compare_precisions, kmp.debug.diagnose]
)
def test_the_tools_leave_each_replica_its_statistics(tool):
    strategy = mirrored(2)
    with strategy.scope():
        norm = keras.layers.BatchNormalization()
        model = keras.Sequential([keras.Input((4,)), norm])
        model.compile("sgd", loss="mse")
    parts = strategy.experimental_local_results(norm.moving_mean.value)
    for i, part in enumerate(parts):
        part.assign(tf.fill((4,), float(i)))
    tool(model, np.ones((2, 4)), np.ones((2, 4)))
    assert [part.numpy().tolist() for part in parts] == [[0.0] * 4, [1.0] * 4]


def test_keras_still_has_statistics_for_each_replica_and_saves_one(tmp_path):
    strategy = mirrored(2)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")

    def build():
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
            model.compile("sgd", "mse", jit_compile=False)
        return model

    def statistics(model):
        values = strategy.experimental_local_results(model.layers[0].moving_mean.value)
        return [x.numpy() for x in values]

    model, loaded = build(), build()
    model.fit(x, x, batch_size=16, verbose=0)
    first, second = statistics(model)
    assert (first != second).all()
    model.save_weights(tmp_path / "model.weights.h5")
    loaded.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(statistics(loaded), [first, first])


@pytest.mark.filterwarnings("ignore:LearningRateFinder suggests nothing")
def test_a_sweep_and_a_rollback_put_back_what_replicas_hold():
    with mirrored(2).scope():
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile(kmp.scaled("adam"), "mse")
    x = np.random.default_rng(0).normal(size=(16, 2))
    model.fit(x, x[:, :1], verbose=0)

    def state():
        inner = model.optimizer.inner_optimizer.variables
        return [keras.ops.convert_to_numpy(v) for v in model.variables + inner]

    before = state()
    snapshot = take_snapshot(model, step=1)
    kmp.callbacks.LearningRateFinder(steps=10).find(model, x, x[:, :1], batch_size=8)
    for value, expected in zip(state(), before, strict=True):
        np.testing.assert_array_equal(value, expected)
    model.fit(x, x[:, :1], verbose=0)
    assert restore_snapshot(model, snapshot, lr_factor=1.0)
    for value, expected in zip(state(), before, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_apply_in_cross_replica_context_is_refused():
    run = Run(mirrored(2), lambda: kmp.scaled("sgd"))
    run.optimizer.scale_loss(1.0)
    with run.strategy.scope(), pytest.raises(ValueError, match="inside the function that you give"):
        run.optimizer.apply([tf.constant([1.0, 1.0])], [run.variable])


@pytest.mark.parametrize("times, seen", [(1e30, "holds inf"), (1e9, "has grown from")])
@pytest.mark.parametrize("replica", [0, 1])
def test_statistics_that_a_huge_batch_has_ruined_on_one_replica(replica, times, seen):
    """Keras lets each replica have its own, and predicts with all of them."""
    x = np.random.default_rng(0).normal(size=(1000, 3)).astype("float32")
    y = x[:, :1].copy()
    x[904 + 4 * replica] *= times
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile(kmp.scaled("adam"), "mse")
    watch = kmp.callbacks.GradientHealth()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    with pytest.warns(kmp.PrecisionWarning, match="UNSTABLE in .*/moving_variance: "):
        model.fit(data, callbacks=[watch], shuffle=False, verbose=0)
    assert seen in watch.verdict.reason
    ruined = [np.max(v.numpy()) > 1e9 for v in model.layers[0].moving_variance.value.values]
    assert ruined == [replica == 0, replica == 1]


@pytest.mark.parametrize("merge", [True, False], ids=["merge", "no_merge"])
@pytest.mark.parametrize("replica", [0, 1])
def test_a_loss_that_is_nan_on_one_replica_leaves_the_scale_alone(replica, merge):
    x = np.ones((64, 3), "float32")
    x[24 + 4 * replica] = np.nan
    strategy = mirrored(2)
    with contextlib.nullcontext() if merge else no_merge_call(strategy), strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(kmp.scaled("sgd"), "mse")
        watch = kmp.callbacks.GradientHealth()
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
        with pytest.warns(
            kmp.PrecisionWarning, match="FORWARD-NAN: the loss was not finite in 1 of"
        ):
            model.fit(data, callbacks=[watch], shuffle=False, verbose=0)
    assert (watch.report.skipped_steps, watch.report.loss_scale) == (1, 2.0**15)
    assert [event.step for event in watch.report.events] == [4]


def test_what_another_function_has_noted_is_left_out():
    """A scale_loss whose step is traced elsewhere, or never."""
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")  # whose replica has no thread of its own
    with strategy.scope():
        weight = keras.Variable([1.0])
        optimizer = kmp.scaled("sgd", learning_rate=0.5)
        optimizer.build([weight])

    @tf.function
    def run(function):
        strategy.run(function)

    run(lambda: optimizer.scale_loss(tf.constant(np.nan)))
    run(lambda: optimizer.apply([tf.constant([2.0**15])]))
    assert weight.numpy() == [0.5]


@pytest.mark.parametrize("case", ["two optimizers", "two losses"])
def test_each_optimizer_has_the_losses_that_it_was_told_of(case):
    strategy = mirrored(2)
    with strategy.scope():
        weights = [keras.Variable([1.0]) for _ in range(2)]
        optimizers = [kmp.scaled("sgd", learning_rate=0.5) for _ in weights]
        for optimizer, weight in zip(optimizers, weights, strict=True):
            optimizer.build([weight])

    def step():
        if case == "two losses":
            optimizers[0].scale_loss(tf.constant(np.nan))
            optimizers[0].scale_loss(tf.constant(1.0))
        else:
            for optimizer in optimizers:
                optimizer.scale_loss(tf.constant(np.nan))
        for optimizer in optimizers[: 1 if case == "two losses" else 2]:
            optimizer.apply([tf.constant([np.nan])])

    tf.function(lambda: strategy.run(step))()
    for optimizer in optimizers:
        assert float(optimizer.dynamic_scale.numpy()) == 2.0**15
    assert [event.loss_finite for event in optimizers[0].gradient_report().events] == [False]


def test_the_loss_of_an_epoch_in_which_no_step_has_counted():
    x = np.ones((8, 3), "float32")
    x[7] = np.nan
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(kmp.scaled("sgd"), "mse")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
    with kmp.protect(model):
        history = model.fit(data, epochs=2, shuffle=False, verbose=0)
    assert all(not 1 < loss < np.inf for loss in history.history["loss"])
