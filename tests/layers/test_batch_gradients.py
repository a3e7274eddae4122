"""Float32BatchNormalization backward: its gradients against differences of a float64 oracle."""

import keras
import numpy as np
import pytest
from keras import ops

from kmp.layers import Float32BatchNormalization

pytestmark = pytest.mark.slow

POLICIES = ["mixed_float16", "float32"]
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11}
EPSILON = 1e-3


def normalized(x, gamma, beta, axis, mask=None):
    """The layer in float64, straight from its definition."""
    weights = np.ones(x.shape) if mask is None else np.broadcast_to(mask[..., None], x.shape)
    axes = tuple(a for a in range(x.ndim) if a != axis % x.ndim)
    mean = np.average(x, axis=axes, weights=weights, keepdims=True)
    variance = np.average((x - mean) ** 2, axis=axes, weights=weights, keepdims=True)
    shape = mean.shape
    y = (x - mean) / np.sqrt(variance + EPSILON) * gamma.reshape(shape) + beta.reshape(shape)
    return y, mean.ravel(), variance.ravel()


def central_differences(function, values, step=1e-5):
    """The gradient of a scalar function, off by the order of step**2 and 1e-16 / step: 1e-10."""
    gradient = np.empty_like(values)
    for i in np.ndindex(values.shape):
        moved = [values.copy(), values.copy()]
        moved[0][i] += step
        moved[1][i] -= step
        gradient[i] = (function(moved[0]) - function(moved[1])) / (2 * step)
    return gradient


def case(shape, axis, dtype, mean=2.0):
    """Inputs that `dtype` holds exactly, a cotangent it holds exactly, gamma and beta."""
    random = np.random.default_rng(1)

    def exact(values):
        return np.asarray(values, "float32").astype(np.dtype(dtype))

    x, cotangent = exact(random.normal(mean, 1.5, shape)), exact(random.normal(size=shape))
    gamma, beta = random.normal(1, 0.2, (2, shape[axis])).astype("float32")
    return x, cotangent, gamma, beta


def layer_with(gamma, beta, shape, kind=Float32BatchNormalization, **kwargs):
    layer = kind(**kwargs)
    layer.build(shape)
    layer.gamma.assign(gamma)
    layer.beta.assign(beta)
    return layer


@pytest.mark.parametrize(
    "shape, axis, masked",
    [((6, 3), -1, False), ((4, 2, 3), 1, False), ((4, 5, 3), -1, True), ((4, 2, 3), 1, True)],
    ids=["last", "middle", "last_masked", "middle_masked"],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_of_float64(shape, axis, masked, policy, jit, pull_back):
    half = keras.DTypePolicy(policy).compute_dtype
    x, cotangent, gamma, beta = case(shape, axis, half)
    mask = np.random.default_rng(2).random(shape[:-1]) < 0.7 if masked else None
    layer = layer_with(gamma, beta, shape, axis=axis, dtype=policy)
    kwargs = {"mask": ops.convert_to_tensor(mask)} if masked else {}

    _, gradients = pull_back(layer, x, cotangent, jit, training=True, **kwargs)

    values = [z.astype("float64") for z in (x, gamma, beta)]
    for i, gradient in enumerate(gradients):

        def loss(moved, i=i):
            y, _, _ = normalized(*values[:i], moved, *values[i + 1 :], axis, mask)
            return np.sum(y * cotangent.astype("float64"))

        expected = central_differences(loss, values[i])
        # Some dozens of float32 operations on numbers of order 10; to `x` one rounding to half.
        u = ROUNDOFF[half] if i == 0 else 0
        assert gradient.dtype == (half if i == 0 else "float32")
        np.testing.assert_allclose(gradient.astype("float64"), expected, rtol=u, atol=2e-5)


@pytest.mark.only("jax")
def test_gradients_flow_through_the_moving_statistics():
    import jax

    shape = (6, 3)
    x, cotangent, gamma, beta = case(shape, -1, "float32")
    layer = layer_with(gamma, beta, shape, momentum=0.75)
    trainable, others = ([v.value for v in each] for each in (layer.weights[:2], layer.weights[2:]))
    to_mean, to_variance = np.random.default_rng(3).normal(size=(2, 3))

    def ours(x):
        y, (mean, variance) = layer.stateless_call(trainable, others, x, training=True)
        return ops.sum(y * cotangent) + ops.sum(mean * to_mean) + ops.sum(variance * to_variance)

    def theirs(x):
        y, mean, variance = normalized(x, gamma, beta, -1)
        return np.sum(y * cotangent) + (mean @ to_mean + variance @ to_variance) / 4

    expected = central_differences(theirs, x.astype("float64"))
    np.testing.assert_allclose(jax.grad(ours)(x), expected, rtol=1e-5, atol=1e-5)


def second_order(layer, x, cotangent):
    """The gradient of the squared gradient."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(tf.cast(layer(x, training=True), "float32") * cotangent)
            slope = inner.gradient(loss, x)
            total = tf.reduce_sum(tf.cast(slope, "float32") ** 2)
        return outer.gradient(total, x)
    if keras.backend.backend() == "jax":
        import jax

        state = [[v.value for v in each] for each in (layer.weights[:2], layer.weights[2:])]

        def loss(x):
            y, _ = layer.stateless_call(*state, x, training=True)
            return ops.sum(ops.cast(y, "float32") * cotangent)

        return jax.grad(lambda x: ops.sum(ops.cast(jax.grad(loss)(x), "float32") ** 2))(x)
    import torch

    x.requires_grad_()
    loss = ops.sum(ops.cast(layer(x, training=True), "float32") * cotangent)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad((slope.float() ** 2).sum(), x)[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_second_derivatives_are_those_of_keras(policy):
    shape, half = (6, 3), keras.DTypePolicy(policy).compute_dtype
    x, cotangent, gamma, beta = case(shape, -1, half)
    results = []
    for kind, dtype in (
        (Float32BatchNormalization, policy),
        (keras.layers.BatchNormalization, "float32"),
    ):
        layer = layer_with(gamma, beta, shape, kind, dtype=dtype)
        result = second_order(
            layer,
            ops.convert_to_tensor(x, layer.compute_dtype),
            ops.convert_to_tensor(cotangent, "float32"),
        )
        results.append(ops.convert_to_numpy(ops.cast(result, "float32")))
    ours, theirs = results
    # The slope is rounded to half before it is squared, and the result again.
    bound = 4 * ROUNDOFF[half] * np.abs(theirs).max() + 2e-5
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound)


@pytest.mark.only("tensorflow")
def test_gradients_of_synchronized_replicas_are_those_of_the_whole_batch(two_replicas, pull_back):
    import tensorflow as tf

    shape = (8, 3)
    x, cotangent, gamma, beta = case(shape, -1, "float32")
    whole = layer_with(gamma, beta, shape)
    _, expected = pull_back(whole, x, cotangent, training=True)
    with two_replicas.scope():
        layer = layer_with(gamma, beta, shape, synchronized=True)

    def step(x, cotangent):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) * cotangent)
        return tape.gradient(loss, [x, layer.gamma.value, layer.beta.value])

    def halves(values):
        return two_replicas.experimental_distribute_values_from_function(
            lambda context: tf.constant(np.split(values, 2)[context.replica_id_in_sync_group])
        )

    on_both = tf.function(lambda *args: two_replicas.run(step, args=args))
    found = on_both(halves(x), halves(cotangent))
    to_x, to_gamma, to_beta = (
        [z.numpy() for z in two_replicas.experimental_local_results(each)] for each in found
    )
    # Parameters get the gradient of their own replica's share; Keras sums those later.
    np.testing.assert_allclose(np.concatenate(to_x), expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sum(to_gamma), expected[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sum(to_beta), expected[2], rtol=1e-5, atol=1e-5)
