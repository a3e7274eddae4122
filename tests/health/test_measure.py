"""Gradient health: the measurements against NumPy in float64, and what the report reads in them."""

import math

import keras
import numpy as np
import pytest
from keras import ops
from oracle import MODES, Run, compiled, few

import kmp
from kmp.health import measure as health
from kmp.health import telemetry
from kmp.health.measure import group_gradients

INF, NAN = np.inf, np.nan


def measure(gradients, sizes):
    return health.measure(group_gradients(gradients, sizes), sizes)


def measured_by_numpy(gradient):
    """The four columns in float64: levels over the finite numbers, counts over all."""
    gradient = np.asarray(gradient, "float64")
    finite = gradient[np.isfinite(gradient)]
    return [
        math.sqrt((finite**2).sum()),
        np.abs(finite).max(initial=0.0),
        (gradient == 0).mean() if gradient.size else 0.0,
        gradient.size - finite.size,
    ]


def assert_measured(row, expected):
    """All but the norm are exact; its float32 sum over n numbers errs by less than n * eps."""
    row = ops.convert_to_numpy(row)
    np.testing.assert_allclose(row[0], expected[0], rtol=64 * 2.0**-24)
    np.testing.assert_array_equal(row[1:], np.float32(expected[1:]))


GRADIENTS = {
    "matrix": [[3.0, 0.0], [-4.0, 0.0]],
    "scalar": -7.0,
    "zeros": [0.0, -0.0, 0.0, 0.0],
    "one_inf": [3.0, INF, 4.0, 0.0],
    "all_bad": [INF, -INF, NAN, NAN],
    "mixed": [NAN, 0.0, -INF, 0.5, 0.0, 0.0, 2.0, INF],
    "random": np.random.default_rng(3).normal(size=(4, 16)),
    "empty": np.zeros((0, 3)),
}


@pytest.mark.parametrize("dtype", few(["float32", "float16", "bfloat16"], "float16"))
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("mode", MODES)
def test_measure_equals_numpy(mode, gradient, dtype):
    gradient = ops.cast(ops.array(GRADIENTS[gradient], "float32"), dtype)
    as_float32 = ops.convert_to_numpy(ops.cast(gradient, "float32"))
    row = compiled(lambda g: measure([g], [as_float32.size])[0], mode)(gradient)
    assert_measured(row, measured_by_numpy(as_float32))


@pytest.mark.parametrize("mode", MODES)
def test_the_check_alone(mode):
    """What `measure_gradients=False` still needs."""
    gradients = [ops.array([1.0, NAN]), ops.array([[INF], [-INF]]), ops.ones(3, "float16")]
    found = compiled(
        lambda g: health.find_nonfinite(group_gradients([g[0], None, *g[1:]], [2, 9, 2, 3]), 4),
        mode,
    )
    found = ops.convert_to_numpy(found(gradients))
    np.testing.assert_array_equal(found > 0, [True, False, True, False])


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("xla", "jit")])
def test_norms_alone(mode):
    """1,000 float32 additions, in any order, are off by 1,000 times 6e-8 at most."""
    random = np.random.default_rng(0)
    rows = [random.normal(size=(50, 20)), random.normal(size=3) * 300, np.array([]), [np.inf, 1.0]]
    dtypes = ["bfloat16", "float16", "float32", "float32"]
    given = [ops.cast(ops.convert_to_tensor(x), d) for x, d in zip(rows, dtypes, strict=True)]
    sizes = [1000, 3, 0, 2]

    def find(*given):
        groups = [health.GradientGroup(x, (i,), False) for i, x in enumerate(given) if sizes[i]]
        return health.find_norms(groups, 4)

    found = ops.convert_to_numpy(compiled(find, mode)(*given))
    wide = [np.asarray(ops.convert_to_numpy(ops.cast(x, "float32")), "float64") for x in given[:2]]
    np.testing.assert_allclose(found[:2], [np.linalg.norm(x) for x in wide], rtol=1e-4)
    assert found[2] == 0 and not np.isfinite(found[3])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("mode", MODES)
def test_a_step_measures_each_gradient(mode):
    """Small ones of one size, which XLA gets as a stack; one of another size, and one missing."""
    shapes = [(4,), (3,), (2, 2), (4,), (5,)]
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=4.0)
    values = [np.arange(1, np.prod(shape) + 1, dtype="float32").reshape(shape) for shape in shapes]
    run = Run(optimizer, mode, variables)
    run.step([None if i == 3 else x for i, x in enumerate(values)])
    expected = [measured_by_numpy(x) for x in values]
    expected[3] = [0.0] * 4
    for row, numbers in zip(optimizer.gradient_report().matrix, expected, strict=True):
        assert_measured(row[:4], numbers)


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int32"])  # an integer becomes a float first
def test_shapes_that_tensorflow_does_not_know_while_it_traces(jit_compile, dtype):
    """As of gradients in keras-hub's Mistral and ALBERT; the variables' are known."""
    import tensorflow as tf

    shapes = [(4,), (3,), (2, 2), (), (70, 70), (70, 70)]
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=4.0)
    optimizer.build(variables)
    optimizer.sample_gradients(1)
    values = [np.arange(1, np.prod(shape) + 1, dtype=dtype).reshape(shape) for shape in shapes]

    @tf.function(jit_compile=jit_compile, input_signature=[[tf.TensorSpec(None, dtype)] * 6])
    def step(gradients):
        optimizer.scale_loss(0.0)
        optimizer.apply(gradients, variables)

    step([4 * x for x in values])
    for row, numbers in zip(optimizer.gradient_report().matrix, values, strict=True):
        assert_measured(row[:4], measured_by_numpy(numbers))


def test_half_gradients_are_measured_in_float32():
    """60000 ** 2 is inf in float16, and 4096 ones sum to 2048 there."""
    row = measure([ops.full((4096,), 60000.0, "float16")], [4096])[0]
    # Squares and sums of these are not exact in float32: n * eps as above, but n = 4096.
    np.testing.assert_allclose(ops.convert_to_numpy(row)[0], 64 * 60000.0, rtol=4096 * 2.0**-24)


def test_measure_has_a_row_for_each_variable():
    matrix = measure([None, ops.array([2.0]), None], [5, 1, 3])
    np.testing.assert_array_equal(
        ops.convert_to_numpy(matrix), [[0, 0, 0, 0], [2, 2, 0, 0], [0, 0, 0, 0]]
    )
    assert keras.backend.standardize_dtype(matrix.dtype) == "float32"


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "indices, values",
    [
        ([1, 3], [[1.0, 2.0], [3.0, 4.0]]),
        ([2, 2], [[1.0, 2.0], [3.0, 4.0]]),
        ([4, 0, 4, 0, 4], [[1.0, 0.0], [2.0, 3.0], [1.0, -1.0], [-2.0, 1.0], [1.0, 0.0]]),
        ([1, 1], [[1.0, 5.0], [-1.0, -5.0]]),
        ([1, 1, 0], [[1.0, NAN], [INF, 0.0], [2.0, 0.0]]),
        ([1, 1], [[INF, 1.0], [-INF, 1.0]]),
    ],
    ids=["apart", "twice", "interleaved", "cancels", "nonfinite", "inf_minus_inf"],
)
def test_sparse_gradients_are_measured_by_their_summed_rows(indices, values, mode):
    """A word that is used twice in a batch yields two slices; Keras's norm ignores that."""
    import tensorflow as tf

    dense = np.zeros((5, 2))
    with np.errstate(invalid="ignore"):
        np.add.at(dense, indices, values)

    def measure_sparse(values, indices):
        return measure([tf.IndexedSlices(values, indices, tf.constant([5, 2]))], [10])[0]

    row = compiled(measure_sparse, mode)(tf.constant(values), tf.constant(indices))
    assert_measured(row, measured_by_numpy(dense))


@pytest.mark.only("tensorflow")
def test_an_empty_sparse_gradient_is_all_zeros():
    import tensorflow as tf

    nothing = tf.IndexedSlices(tf.zeros((0, 2)), tf.zeros((0,), "int32"), tf.constant([5, 2]))
    np.testing.assert_array_equal(measure([nothing], [10]), [[0, 0, 1, 0]])


@pytest.mark.parametrize("mode", MODES)
def test_counters_accumulate_and_levels_do_not(mode):
    accumulate = compiled(telemetry.accumulate, mode)
    matrix = ops.zeros((3, len(telemetry.COLUMNS)), "float32")
    for overflow in ([1, 0, 0], [1, 0, 1], [0, 0, 1], [0, 1, 1]):
        levels = [[1.0, 2.0, 0.5, 9.0], [3.0, 4.0, 0.25, 3.0], [0.0, 0.0, 0.0, 0.0]]
        matrix = accumulate(ops.array(levels), ops.array(overflow, "float32"), matrix)
    expected = [[1, 2, 0.5, 0, 2], [3, 4, 0.25, 3, 1]]
    expected.append([0, 0, 0, 1, 3])  # a scale of float8, which has no levels
    np.testing.assert_array_equal(ops.convert_to_numpy(matrix), expected)


def report(rows, loss_scale=1024.0, paths=None):
    paths = paths or tuple("abcdefgh"[: len(rows)])
    return kmp.GradientReport(paths, np.array(rows, "float32"), loss_scale, 100, 7, 2)


def row(max_abs, overflows=0, norm=1.0):
    return [norm, max_abs, 0.0, 0.0, overflows]


def test_columns():
    table = report([[5, 4, 0.5, 2, 7], [1, 0.5, 0.25, 0, 0]])
    expected = {
        "l2_norm": [5, 1],
        "max_abs": [4, 0.5],
        "zero_share": [0.5, 0.25],
        "nonfinite": [2, 0],
        "overflow_steps": [7, 0],
    }
    assert tuple(expected) == telemetry.COLUMNS
    assert {name: list(table.column(name).values()) for name in expected} == expected
    assert list(table.column("l2_norm")) == ["a", "b"]


@pytest.mark.parametrize("name", ["norm", "", None])
def test_an_unknown_column_is_told_the_known_ones(name):
    with pytest.raises(ValueError, match=r"(?s)must be one of .*zero_share.*Received: name="):
        report([row(1)]).column(name)


def test_norm_and_largest_over_all_variables():
    table = report([row(0.5, norm=3), row(2.0, norm=4)])
    assert table.grad_norm == 5.0
    assert table.max_abs == 2.0


@pytest.mark.parametrize(
    "max_abs, loss_scale, expected",
    [
        (65504.0, 1.0, 0.0),
        (65504.0 / 8, 1.0, 3.0),
        (65504.0 / 8, 4.0, 1.0),
        (65504.0 * 4, 1.0, -2.0),
        (0.0, 1.0, math.inf),
    ],
)
def test_headroom_is_the_number_of_doublings_left(max_abs, loss_scale, expected):
    assert report([row(0.0), row(max_abs)], loss_scale).headroom_bits == expected


def test_overflowed_names_the_most_frequent_first():
    table = report([row(1, 2), row(1, 0), row(1, 9), row(1, 2)])
    assert table.overflowed == {"c": 9, "a": 2, "d": 2}
    assert list(table.overflowed) == ["c", "d", "a"]


@pytest.mark.parametrize(
    "rows, expected",
    [
        ([row(1), row(1, 1), row(2.0**40)], ["b", "c", "a"]),
        ([row(1, 3), row(1, 5), row(1)], ["b", "a", "c"]),
        ([row(2.0**20, 2), row(1, 2), row(1)], ["b", "a", "c"]),
        ([row(1), row(2), row(2.0**-30), row(2.0**20)], ["c", "d", "a", "b"]),
        ([row(1), row(0), row(1)], ["b", "a", "c"]),
    ],
    ids=["overflow_first", "most_often", "last_of_equals", "farthest_from_the_middle", "vanished"],
)
def test_worst(rows, expected):
    assert report(rows).worst(len(rows)) == expected
    assert report(rows).worst(1) == expected[:1]
    assert report(rows).worst() == expected[:3]


def test_printing_says_what_matters():
    table = report([[5, 4, 0.5, 2, 7], [0, 0, 1, 0, 0]], paths=("dense/kernel", "dense/bias"))
    lines = str(table).splitlines()
    assert lines[0] == (
        "Gradient health after step 100: loss scale 1024, 7 skipped (2 in a row now), "
        "gradients not finite"
    )
    sound = str(report([[5, 4, 0.5, 0, 7]]))
    assert "in a row now), gradient norm 5, headroom 4.0 bits\n" in sound
    assert lines[2].split() == ["dense/kernel", "5", "4", "50.0%", "2", "7"]
    assert lines[3].split() == ["dense/bias", "0", "0", "100.0%", "0", "0"]
    assert lines[4] == "Overflowed most often: dense/kernel"
    assert len({len(line) for line in lines[1:4]}) == 1


def test_a_summary_has_the_variables_to_look_at_first():
    rows = [row(1), row(2), row(2.0**-30), row(2.0**20)]
    lines = report(rows).summary(2).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["variable", "c", "d", "and"]
    assert lines[-1] == "and 2 more"
    assert report(rows).summary() == str(report(rows))
    twins = report(rows, paths=("a", "a", "b", "b"))  # layers of one name
    assert [line.split()[0] for line in str(twins).splitlines()[2:]] == ["a", "a", "b", "b"]


def test_printing_without_overflows_blames_nobody():
    assert "Overflowed" not in str(report([row(1)]))


def test_a_report_of_nothing():
    empty = kmp.GradientReport((), np.zeros((0, 5), "float32"), 1.0, 0, 0, 0)
    assert (empty.grad_norm, empty.max_abs, empty.headroom_bits) == (0.0, 0.0, math.inf)
    assert (empty.overflowed, empty.worst()) == ({}, [])
    assert "step 0" in str(empty)
