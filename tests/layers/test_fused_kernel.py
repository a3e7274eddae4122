"""TensorFlow's fused kernel outside XLA: where Float32BatchNormalization uses it, and where not."""

import numpy as np
import pytest

from kmp.layers import Float32BatchNormalization

pytestmark = [pytest.mark.only("tensorflow"), pytest.mark.slow]


def graph_of(shape, policy="mixed_bfloat16", **kwargs):
    """A concrete function of the layer in training, outside XLA."""
    import tensorflow as tf

    layer = Float32BatchNormalization(dtype=policy, momentum=0.0, **kwargs)
    layer.build(shape)
    half = layer.compute_dtype

    @tf.function(input_signature=[tf.TensorSpec(shape, half)])
    def step(x):
        y = layer(x, training=True)
        return tf.cast(y, "float32"), layer.moving_mean.value, layer.moving_variance.value

    return step


def operations(step):
    graph = step.get_concrete_function().graph
    names = {op.type for op in graph.get_operations()}
    for function in graph._functions.values():  # the branches of a conditional
        names |= {node.op for node in function.cached_definition.node_def}
    return names


@pytest.mark.parametrize(
    "shape, policy, kwargs, fused, branches",
    [
        ((8, 4, 4, 3), "mixed_float16", {}, True, False),
        ((8, 4, 4, 3), "mixed_bfloat16", {"axis": 1}, True, False),
        ((None, 4, 4, 3), "mixed_float16", {}, True, True),
        ((2**14, 3), "mixed_float16", {}, False, False),
        ((2**16, 3), "mixed_bfloat16", {}, True, False),
        ((2**17, 3), "mixed_bfloat16", {}, False, False),
        ((8, 4, 4, 3), "float32", {}, False, False),
        ((8, 4, 4, 3), "mixed_float16", {"epsilon": 1e-6}, False, False),
        ((8, 4, 4, 3), "mixed_float16", {"synchronized": True}, False, False),
    ],
    ids=[
        "last",
        "first",
        "batch",
        "many float16",
        "bfloat16",
        "many bfloat16",
        "float32",
        "epsilon",
        "synchronized",
    ],
)
def test_where_it_is_used(shape, policy, kwargs, fused, branches):
    found = operations(graph_of(shape, policy, **kwargs))
    assert ("FusedBatchNormV3" in found, "StatelessIf" in found) == (fused, branches)


@pytest.mark.parametrize("rows", [0, 1, 48, 2**20])
def test_a_batch_size_that_is_known_at_run_time(rows):
    import tensorflow as tf

    x = tf.cast(100 + np.random.default_rng(0).normal(size=(rows, 8)), "bfloat16")
    y, mean, variance = (z.numpy() for z in graph_of((None, 8))(x))
    assert y.shape == (rows, 8)
    if rows == 0:
        assert (set(mean), set(variance)) == ({0}, {1})  # as they were
        return
    exact = tf.cast(x, "float64").numpy()
    np.testing.assert_allclose(mean, exact.mean(0), atol=1e-5, rtol=0)
    np.testing.assert_allclose(variance, exact.var(0), rtol=1e-5, atol=1e-9)
