"""MirroredStrategy where gradients have several dtypes, which TensorFlow sums one by one."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops
from replicas import mirrored, no_merge_call

import kmp

pytestmark = [pytest.mark.only("tensorflow"), pytest.mark.slow]
tf = pytest.importorskip("tensorflow")

DTYPES = ("float32", "bfloat16", "float16", "float64")


@pytest.mark.filterwarnings("ignore:Weights in float16", "ignore:float16 without")
@pytest.mark.parametrize("policy", [*DTYPES, "mixed_bfloat16", "mixed_float16"])
def test_fit_with_a_head_in_float32(policy):
    """Each row asks for one number, and sums have few bits: two replicas agree with one device."""
    keras.config.set_dtype_policy(policy)
    x = np.eye(4, dtype="float32")[[0, 0, 1, 2, 2, 3, 3, 3]]

    def weights_after_fit(scope):
        with scope:
            ones = {"kernel_initializer": "ones"}
            stack = [keras.layers.Dense(4, **ones), keras.layers.Dense(1, dtype="float32", **ones)]
            model = keras.Sequential([keras.Input((4,)), *stack])
            optimizer = kmp.scaled("sgd", 8.0, learning_rate=2.0**-6, rounding="nearest")
            model.compile(optimizer, "mse", jit_compile=False)
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        assert model.optimizer.skipped_steps.numpy() == 0
        return [ops.convert_to_numpy(ops.cast(v, "float64")) for v in model.variables]

    alone = weights_after_fit(contextlib.nullcontext())
    for found, expected in zip(weights_after_fit(mirrored(2).scope()), alone, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_fit_with_a_table_in_bfloat16():
    """Its gradients are slices, which TensorFlow gathers from the replicas, but not in bfloat16."""
    keras.config.set_dtype_policy("bfloat16")
    x = np.array([[0], [1], [1], [2], [2], [3], [0], [1]])

    def table_after_fit(scope):
        with scope:
            table = keras.layers.Embedding(8, 4, "ones")
            model = keras.Sequential([keras.Input((1,), dtype="int32"), table])
            model.compile(kmp.scaled("sgd", 8.0, learning_rate=1.0), "mse", jit_compile=False)
        model.fit(x, x[:, :, None] - np.zeros((1, 1, 4)), batch_size=8, verbose=0)
        return ops.convert_to_numpy(ops.cast(table.embeddings, "float32"))

    alone = table_after_fit(contextlib.nullcontext())
    assert alone[:4, 0].tolist() == [0.875, 1.0, 1.125, 1.125]  # by 2/32 for each unit of error
    np.testing.assert_array_equal(table_after_fit(mirrored(2).scope()), alone)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("merge", [True, False], ids=["merge", "no_merge"])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_each_gradient_comes_back_to_its_variable(graph, merge):
    """Dtypes take turns, one gradient is missing, one is sparse; replica 1 overflows in half."""
    strategy = mirrored(2)
    with strategy.scope():
        variables = [keras.Variable([0.0, 0.0], dtype=d) for d in (*DTYPES, *DTYPES)]
        table = keras.Variable(np.zeros((2, 2), "float32"))
        optimizer = kmp.scaled(keras.optimizers.SGD(1.0), 2.0, master_weights=True)
        optimizer.build([*variables, table])

    def step(overflow):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        share = optimizer.scale_loss(tf.cast(replica, "float32") + 1.0)  # of 3 in all
        gradients = [
            tf.cast(tf.fill((2,), -(2.0**i) * share), v.dtype) for i, v in enumerate(variables)
        ]
        huge = tf.where(overflow & (replica == 1), np.float32(np.inf), 0.0)
        gradients[5] += tf.cast(huge, "bfloat16")
        gradients[2] = None
        rows = tf.IndexedSlices(
            -share * tf.ones((1, 2)), tf.reshape(replica, [1]), tf.constant([2, 2])
        )
        optimizer.apply([*gradients, rows], [*variables, table])

    run = lambda overflow: strategy.run(step, (overflow,))  # noqa: E731
    run = tf.function(run) if graph else run
    with contextlib.nullcontext() if merge else no_merge_call(strategy):
        for overflow in (False, True):
            run(tf.constant(overflow))
    assert optimizer.skipped_steps.numpy() == 1
    for i, v in enumerate(variables):
        expected = 0.0 if i == 2 else 3.0 * 2.0**i
        for value in strategy.experimental_local_results(v.value):
            assert tf.cast(value, "float64").numpy().tolist() == [expected] * 2
    assert table.numpy().tolist() == [[1.0, 1.0], [2.0, 2.0]]


def test_keras_still_sums_all_dtypes_at_once():
    keras.config.set_dtype_policy("bfloat16")
    with mirrored(2).scope():
        stack = [keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")]
        model = keras.Sequential([keras.Input((4,)), *stack])
        model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(TypeError, match=r"ConcatV2.*float32.*bfloat16"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)


def test_keras_still_cannot_compile_replicas_on_cpus():
    """docs/limits.md says so: XLA's step of one replica is handed the variables of another."""
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="located in device"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
