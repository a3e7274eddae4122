"""The dear measurements: exponents and updates of a sample, against NumPy on the same numbers."""

import math

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from oracle import MODES, compiled

import kmp
from kmp.health import details as _sample
from kmp.health.measure import group_gradients


@pytest.mark.parametrize(
    "shape", [(), (0, 3), (5,), (4096,), (4097,), (512, 512), (3, 3, 64, 128), (1, 100_000)]
)
def test_a_sample_is_large_enough_and_small_enough(shape):
    cut = _sample.cut(shape)
    assert cut.shape == shape
    number = np.zeros(shape)[slices(cut)].size
    assert number == cut.size <= _sample.SAMPLE_SIZE
    assert number >= min(math.prod(shape), _sample.SAMPLE_SIZE // 8)
    assert all(stride % 2 for stride in cut.strides)


@pytest.mark.parametrize(
    ("shape", "shard"),
    [
        ((512, 512), (512, 128)),
        ((512, 512), (256, 64)),
        ((100_000, 5), (6250, 5)),
        ((64, 64), (1, 1)),
    ],
)
def test_each_device_samples_its_own_shard(shape, shard):
    cut = _sample.cut(shape, shard)
    assert cut.shape == shard
    assert np.zeros(shard)[slices(cut)].size == cut.size
    sampled = cut.size * math.prod(shape) // math.prod(shard)
    assert min(math.prod(shape), _sample.SAMPLE_SIZE // 8) <= sampled <= _sample.SAMPLE_SIZE


def test_of_many_pieces_each_has_a_value():
    assert _sample.cut((128, 128), (1, 1)).size == 1
    assert _sample.cut((2**20,), (64,)).size == 1


def slices(cut):
    return tuple(slice(None, None, stride) for stride in cut.strides)


EXPONENTS = [-40, -28, -26, -25, -24, -15, -14, 0, 15, 16, 40]


def bins_by_numpy(values):
    """Zeros, exponents from -28 to 16 with those beyond, what is not finite."""
    values = np.asarray(values, "float64").ravel()
    bins = np.zeros(47)
    bins[0], bins[-1] = (values == 0).sum(), (~np.isfinite(values)).sum()
    inner = np.abs(values[np.isfinite(values) & (values != 0)])
    exponents = np.clip(np.frexp(inner)[1] - 1, -28, 16)
    np.add.at(bins, exponents + 29, 1)
    return bins


@pytest.mark.parametrize("mode", MODES)
def test_bins_are_the_exponents_of_the_scaled_gradient(mode):
    edges = 2.0 ** np.array(EXPONENTS, "float64")
    values = np.concatenate([edges, -1.5 * edges, [0.0, -0.0, np.inf, -np.inf, np.nan]])
    weight = keras.Variable(np.zeros(len(values), "float32"))

    def measure(gradient):
        cuts = [_sample.cut(weight.shape)]
        before = _sample.sample(group_gradients([gradient], [len(values)]), [weight.value], cuts)
        after = ops.zeros((len(values),), "float32")
        return _sample.measure_sample(before, after, cuts, [0])

    measured = compiled(measure, mode)(ops.convert_to_tensor(values.astype("float32")))
    bins = ops.convert_to_numpy(measured)[0, 3:]
    np.testing.assert_array_equal(bins, bins_by_numpy(values))


@pytest.mark.parametrize("mode", MODES)
def test_norms_of_weights_and_updates_and_what_did_not_move(mode):
    random = np.random.default_rng(2)
    shapes = [(4, 3), (80, 70), (), (7,), (2, 6), (3, 4)]
    cuts = list(map(_sample.cut, shapes))
    sizes = [math.prod(shape) for shape in shapes]
    after = [random.normal(size=shape).astype("float32") for shape in shapes]
    update = [random.normal(size=shape).astype("float32") * 1e-3 for shape in shapes]
    update[3][:3] = 0
    update[5][1] = 0
    gradients = [np.ones(shape, "float32") for shape in shapes]
    gradients[2], gradients[3] = None, np.float32([1, 1, 0, 1, 1, 0, 1])
    gradients[5] = gradients[5].astype("float16")
    before = [a - d for a, d in zip(after, update, strict=True)]
    variables = [keras.Variable(a) for a in after]
    earlier = [keras.Variable(b) for b in before]

    def measure(present):
        groups = group_gradients([*present[:2], None, *present[2:]], sizes)
        sample = _sample.sample(groups, [v.value for v in earlier], cuts)
        order = _sample.layout(groups, len(sizes))
        after = _sample.sample_weights([v.value for v in variables], cuts, order)
        return _sample.measure_sample(sample, after, cuts, order)

    present = [ops.convert_to_tensor(g) for g in gradients if g is not None]
    measured = ops.convert_to_numpy(compiled(measure, mode)(present))
    for row, a, b, cut in zip(measured, after, before, cuts, strict=True):
        every, a, b = slices(cut), np.reshape(a, cut.shape), np.reshape(b, cut.shape)
        of_whole = math.sqrt(a.size / a[every].size)
        # Float32 sums of squares, most of at most 12; the update is a difference, exact as stored.
        for found, numbers in ((row[0], a[every]), (row[1], (a - b)[every])):
            np.testing.assert_allclose(found, of_whole * np.linalg.norm(numbers), rtol=1e-5)
        np.testing.assert_array_equal(row[3:].sum(), a[every].size)
    np.testing.assert_array_equal(measured[:, 2], np.float32([0, 0, 0, 2 / 5, 0, 1 / 3]))


def test_the_norm_of_a_large_variable_is_estimated():
    weights = np.random.default_rng(1).normal(size=(300, 200)).astype("float32")
    variable = keras.Variable(weights)
    cuts = [_sample.cut(variable.shape)]
    before = _sample.sample([], [ops.convert_to_tensor(weights - 0.5)], cuts)
    after = _sample.sample_weights([variable.value], cuts, [0])
    row = _sample.measure_sample(before, after, cuts, [0])[0]
    # Of n normal numbers, the norm errs by 1 / sqrt(2 n): five standard deviations at n = 2,700.
    norm = np.linalg.norm(weights)
    np.testing.assert_allclose(ops.convert_to_numpy(row)[0], norm, rtol=0.07)
    np.testing.assert_allclose(ops.convert_to_numpy(row)[1], 0.5 * math.sqrt(60000), rtol=1e-3)


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("mode", MODES)
def test_a_sparse_gradient_is_sampled_where_the_weights_are(mode):
    import tensorflow as tf

    from kmp._backend import backend

    def sample(values, indices):
        slices = tf.IndexedSlices(values, indices, tf.constant([10, 4]))
        return backend.gradient_sample(slices, (3, 2), "host")

    values, indices = tf.reshape(tf.range(12.0), (3, 4)), tf.constant([3, 4, 3])
    dense = np.zeros((10, 4))
    np.add.at(dense, indices.numpy(), values.numpy())
    np.testing.assert_array_equal(compiled(sample, mode)(values, indices), dense[::3, ::2])


def train(steps, every, poisoned=()):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd", learning_rate=2.0**-6), loss="mse")
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    optimizer.sample_gradients(every, and_at=0)
    x = np.random.default_rng(0).normal(size=(steps * 2, 2)).astype("float32")
    for step in poisoned:
        x[2 * step - 2] = np.nan
    model.fit(x, x[:, :1], batch_size=2, shuffle=False, verbose=0)
    return optimizer


@pytest.mark.parametrize("every, last", [(5, 10), (4, 12), (13, 0)])
def test_details_are_of_the_last_sampled_step(every, last):
    optimizer = train(12, every)
    report = optimizer.gradient_report()
    assert ops.convert_to_numpy(optimizer.telemetry.sampling).tolist() == [every, 0, 12, last]
    assert report.measured_step == 12
    assert (report.details is None) == (last == 0)
    if last:
        np.testing.assert_array_equal(report.details[:, 3:].sum(axis=1), [6, 3, 3, 1])
        assert set(report.update_ratio) == set(report.paths)
        assert report.degraded_share == dict.fromkeys(report.paths, 0.0)
    optimizer.sample_gradients(7, and_at=30)  # what comes next; what was measured stays
    assert ops.convert_to_numpy(optimizer.telemetry.sampling).tolist() == [7, 30, 12, last]


def test_levels_stand_still_between_samples_and_events_do_not():
    report = train(109, 4, poisoned=[106]).gradient_report()
    assert report.measured_step == 108
    assert [(e.step, e.num_variables) for e in report.events] == [(106, 4)]
    assert report.events[0].first_variable == report.paths[-1]
    assert report.events[0].loss_finite == (BACKEND == "jax")  # not told
    assert set(report.overflowed.values()) == {1}
    # An overflow is measured.
    assert train(106, 4, poisoned=[106]).gradient_report().measured_step == 106


def test_the_step_after_an_overflow_is_measured():
    """It knows of its own levels, and the overflow's are not taken for them."""
    steps = 106, 107, 108
    overflow, after, later = (train(n, 100, poisoned=[106]).gradient_report() for n in steps)
    assert [x.measured_step for x in (overflow, after, later)] == [106, 107, 107]
    assert overflow.matrix[:, 3].all()
    assert not after.matrix[:, 3].any() and after.matrix[:, 0].all()


def test_the_ring_keeps_the_last_sixteen_overflows():
    report = train(20, 100, poisoned=range(2, 21)).gradient_report()
    assert [event.step for event in report.events] == list(range(20, 4, -1))


@pytest.mark.parametrize("call", ["gradient_report", "sample_gradients"])
def test_reading_and_planning_need_a_built_optimizer_that_measures(call):
    arguments = {"sample_gradients": [10]}.get(call, [])
    silent = kmp.LossScaleOptimizer(keras.optimizers.SGD(), measure_gradients=False)
    silent.build([keras.Variable(1.0)])
    for optimizer in (kmp.scaled("sgd"), silent):
        with pytest.raises(ValueError, match=rf"`{call}` needs.*Received: built=.*Call optimizer"):
            getattr(optimizer, call)(*arguments)


@pytest.mark.parametrize("update_freq", [0, 1.5, "often"])
def test_an_interval_is_a_number_of_steps(update_freq):
    optimizer = kmp.scaled("sgd")
    optimizer.build([keras.Variable(1.0)])
    with pytest.raises(ValueError, match="`update_freq` of sample_gradients must be"):
        optimizer.sample_gradients(update_freq)


@pytest.mark.only("jax")
def test_the_compiled_step_asks_nobody():
    """With everything measured: no callback, no infeed, no transfer to the host."""
    import jax

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(80), keras.layers.Dense(60)])
    model.compile(kmp.scaled("adam"), loss="mse")
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    optimizer.sample_gradients(10)
    optimizer.scale_loss(0.0)
    weights = [v.value for v in model.trainable_variables]

    def text(step):
        arguments = [v.value for v in optimizer.variables], weights, weights
        return jax.jit(step).lower(*arguments).compile().as_text()

    def leaking(state, gradients, weights):
        jax.debug.callback(lambda x: None, gradients[0])
        return optimizer.stateless_apply(state, gradients, weights)

    def transfers(text):
        # Its instructions alone: beside them stand the names of source files and functions.
        lines = (line for line in text.splitlines() if " = " in line)
        text = "\n".join(line.split(", metadata=")[0] for line in lines)
        verbs = ("callback", "infeed", "outfeed", " send(", " recv(", "is_host_transfer=true")
        return [verb for verb in verbs if verb in text]

    compiled_step = text(optimizer.stateless_apply)
    assert transfers(compiled_step) == []
    assert "conditional(" in compiled_step  # the sample is behind one
    assert transfers(text(leaking)) != []
