"""Each kind of sum that is traced into a graph of TensorFlow is rounded once, at its end."""

import keras
import numpy as np
import pytest

import kmp

tf = pytest.importorskip("tensorflow")
if keras.backend.backend() == "tensorflow":
    from kmp._backend.tensorflow.sums import _SUMMANDS, sum_in_float32

pytestmark = pytest.mark.only("tensorflow")
ONES = 4096


def gradient_of_a_resize(x):
    """Which has no gradient itself."""

    @tf.custom_gradient
    def gradient(x):
        grads = tf.reshape(x, (1, 64, 64, 1))
        y = tf.raw_ops.ResizeNearestNeighborGrad(grads=grads, size=(1, 1))
        return y, lambda dy: tf.ones_like(x) * tf.reshape(dy, ())

    return gradient(x)


KINDS = {
    "AvgPool": lambda x: tf.nn.avg_pool2d(tf.reshape(x, (1, 64, 64, 1)), 64, 64, "VALID") * ONES,
    "AvgPool3D": lambda x: (
        tf.nn.avg_pool3d(tf.reshape(x, (1, 16, 16, 16, 1)), 16, 16, "VALID") * ONES
    ),
    "BiasAddGrad": lambda x: tf.raw_ops.BiasAddGrad(out_backprop=tf.reshape(x, (ONES, 1))),
    "Cumsum": lambda x: tf.cumsum(x)[-1],
    "DepthwiseConv2dNativeBackpropFilter": lambda x: tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
        input=tf.reshape(x, (1, 64, 64, 1)),
        filter_sizes=(1, 1, 1, 1),
        out_backprop=tf.ones((1, 64, 64, 1), x.dtype),
        strides=(1, 1, 1, 1),
        padding="VALID",
    ),
    "Einsum": lambda x: tf.einsum("tb->b", tf.reshape(x, (ONES, 1))),
    "ResizeNearestNeighborGrad": lambda x: gradient_of_a_resize(x),
    "SegmentMean": lambda x: tf.math.segment_mean(x, tf.zeros(ONES, "int32")) * ONES,
    "SparseTensorDenseMatMul": lambda x: tf.sparse.sparse_dense_matmul(
        tf.sparse.SparseTensor([(0, i) for i in range(ONES)], tf.ones(ONES, x.dtype), (1, ONES)),
        tf.reshape(x, (ONES, 1)),
    ),
    "Mean": lambda x: tf.reduce_mean(tf.reshape(x, (ONES, 1)), axis=0) * ONES,
    "ScatterNd": lambda x: tf.scatter_nd(tf.zeros((ONES, 1), "int32"), x, (1,)),
    "SegmentSum": lambda x: tf.math.segment_sum(x, tf.zeros(ONES, "int32")),
    "Sum": lambda x: tf.reduce_sum(tf.reshape(x, (ONES, 1)), axis=0),
    "TensorScatterAdd": lambda x: tf.tensor_scatter_nd_add(
        tf.zeros((1,), x.dtype), tf.zeros((ONES, 1), "int32"), x
    ),
    "UnsortedSegmentSum": lambda x: tf.math.unsorted_segment_sum(x, tf.zeros(ONES, "int32"), 1),
}


MISSING = {
    ("AvgPool3D", "float16"),
    ("ResizeNearestNeighborGrad", "xla"),
    ("SegmentMean", "xla"),
    ("SegmentSum", "xla"),
    ("SparseTensorDenseMatMul", "xla"),
}


def made_by(function, times=1):
    """A program of `function`, its gradient, and its operations."""

    def run(x):
        for _ in range(times):
            sum_in_float32(tf.compat.v1.get_default_graph())
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reshape(function(x), ())
        return y, tape.gradient(y, x)

    return run


def kinds_in(function, x, **kwargs):
    graph = tf.function(made_by(function, **kwargs)).get_concrete_function(x).graph
    return sorted(each.type for each in graph.get_operations())


def test_all_kinds_are_tried():
    assert KINDS.keys() == _SUMMANDS.keys()


@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ones_count(kind, dtype, mode):
    if {(kind, mode), (kind, dtype)} & MISSING:
        pytest.skip("TensorFlow has no kernel for it")
    x = tf.ones((ONES,), dtype)
    y, gradient = tf.function(made_by(KINDS[kind]), jit_compile=mode == "xla")(x)
    assert y.dtype == gradient.dtype == x.dtype and float(y) == ONES
    np.testing.assert_array_equal(tf.cast(gradient, "float32"), np.ones(ONES))


EXACT = [
    ("Sum", "bfloat16"),
    ("Mean", "bfloat16"),
    ("BiasAddGrad", "float16"),
]


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "float32") for kind in KINDS), *EXACT])
def test_a_sum_in_float32_stays_as_it_is(kind, dtype):
    x = tf.ones((ONES,), dtype)
    assert kinds_in(KINDS[kind], x, times=0) == kinds_in(KINDS[kind], x)


def test_a_graph_that_another_replica_has_seen_to_stays_as_it_is():
    x = tf.ones((ONES,), "float16")
    assert kinds_in(KINDS["Sum"], x, times=2) == kinds_in(KINDS["Sum"], x)
    assert kinds_in(KINDS["Sum"], x) != kinds_in(KINDS["Sum"], x, times=0)


def test_a_step_that_runs_eagerly_leaves_the_default_graph_alone():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd"), "mse", run_eagerly=True)
    watch = [kmp.callbacks.TerminateOnNaN()]
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0, callbacks=watch)
    create = tf.compat.v1.get_default_graph()._create_op_internal
    assert create.__func__ is tf.Graph._create_op_internal
