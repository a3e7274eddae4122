"""Float32BatchNormalization: its moments against float64, Keras's layer as the peer."""

import keras
import numpy as np
import pytest
from keras import ops
from oracle import MODES, compiled

from kmp.layers import Float32BatchNormalization
from kmp.layers.normalization import moments

pytestmark = [pytest.mark.slow, pytest.mark.gpu]

POLICIES = ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16", "float32"]
# Unit roundoff: the largest relative error of rounding to nearest.
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
EPSILON = 1e-3


def rounded(x, dtype):
    return np.asarray(x, "float32").astype(np.dtype(dtype))


def batch_statistics(x, policy="float32", mode="eager"):
    """What one training step sees: with momentum 0 the moving statistics are the batch's."""
    layer = Float32BatchNormalization(momentum=0.0, dtype=policy)
    layer.build(x.shape)
    trainable, others = (
        [v.value for v in each]
        for each in (layer.trainable_variables, layer.non_trainable_variables)
    )

    def step(x):
        return layer.stateless_call(trainable, others, x, training=True)

    y, statistics = compiled(step, mode)(ops.convert_to_tensor(x))
    y = ops.convert_to_numpy(ops.cast(y, "float32"))
    return y, *(ops.convert_to_numpy(each).astype("float64") for each in statistics)


def oracle(x, axes, weights=None):
    """Weighted mean and biased variance in float64."""
    x = np.asarray(x).astype("float64")
    weights = np.ones_like(x) if weights is None else weights
    mean = np.average(x, axis=axes, weights=weights)
    shape = [1 if axis in axes else n for axis, n in enumerate(x.shape)]
    return mean, np.average((x - mean.reshape(shape)) ** 2, axis=axes, weights=weights)


@pytest.mark.parametrize("policy", POLICIES)
def test_integers_with_an_integer_deviation_come_out_exact(policy):
    # Mean 3 and variance 4, both without rounding; 1 / sqrt(4 + 0.001) is the only rounded number.
    x = np.tile([[1.0], [5.0]], (8, 2))
    half = keras.DTypePolicy(policy).compute_dtype
    y, mean, variance = batch_statistics(rounded(x, half), policy)
    np.testing.assert_array_equal(mean, [3, 3])
    np.testing.assert_array_equal(variance, [4, 4])
    bound = 4 * ROUNDOFF["float32"] + ROUNDOFF[half]
    np.testing.assert_allclose(y, (x - 3) / np.sqrt(4 + EPSILON), rtol=bound)


@pytest.mark.parametrize(
    "dtype, rows, mean, deviation",
    [
        ("float16", 64, 1000.5, 0.0),
        ("float16", 4096, 1000.0, 0.5),
        ("bfloat16", 4096, 1000.0, 30.0),
        ("float16", 65536, 100.0, 1.0),  # a sum of 6.5 million, a hundred times float16's largest
        ("float32", 4096, 1e3, 1.0),
        ("float32", 4096, 1e4, 1.0),
        ("float32", 4096, 1e5, 1.0),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_variance_about_a_large_mean(dtype, rows, mean, deviation, mode):
    noise = np.random.default_rng(0).normal(size=(rows, 3)) * deviation
    x = rounded(mean + noise, dtype)
    policy = "float32" if dtype == "float32" else f"mixed_{dtype}"

    y, batch_mean, batch_variance = batch_statistics(x, policy, mode)

    true_mean, true_variance = oracle(x, (0,))
    u = ROUNDOFF["float32"]
    # x - shift is exact near the mean, so the variance only carries the rounding of its own sums,
    # of the order of sqrt(rows) u; 1e-4 leaves a factor of five for unlucky orders.
    np.testing.assert_allclose(batch_variance, true_variance, rtol=1e-4, atol=1e-9)
    assert np.all(batch_variance >= 0)
    of_mean = 4 * u
    np.testing.assert_allclose(batch_mean, true_mean, rtol=of_mean)
    # An error of u * mean in the mean is one of u * mean / deviation in the output.
    true_y = (x.astype("float64") - true_mean) / np.sqrt(true_variance + EPSILON)
    shift = of_mean * mean / np.sqrt(true_variance + EPSILON)
    np.testing.assert_allclose(y, true_y, rtol=1e-4 + ROUNDOFF[dtype], atol=shift.max())


@pytest.mark.wide
@pytest.mark.parametrize(
    "shape, axis", [((10**6, 2), 1), ((2000, 2, 500), 1)], ids=["last", "first"]
)
@pytest.mark.parametrize("mean, deviation", [(6e4, 0.0), (1e4, 0.01), (1e3, 1.0), (1 / 3, 0.0)])
@pytest.mark.parametrize("mode", MODES)
def test_moments_of_a_million_elements(mean, deviation, shape, axis, mode):
    """Added one after another they had a variance of 1507 for a constant, and 400 for 1e-4."""
    x = mean + np.random.default_rng(0).normal(size=shape) * deviation
    x = x.astype("float32")
    found = compiled(lambda x: tuple(moments(x, None, axis)), mode)(ops.convert_to_tensor(x))
    found = [ops.convert_to_numpy(each) for each in found]
    axes = tuple(a for a in range(x.ndim) if a != axis)
    assert found[0].shape == tuple(2 if a == axis else 1 for a in range(x.ndim))
    of_mean, of_variance, count = (each.ravel() for each in found)
    true_mean, true_variance = oracle(x, axes)
    # A sum in blocks of 256 is off by a few u at most.
    u = ROUNDOFF["float32"]
    np.testing.assert_allclose(of_mean, true_mean, rtol=4 * u)
    # The shift is that near to the mean. Its square is part of both terms of the variance, which
    # XLA rounds differently.
    np.testing.assert_allclose(of_variance, true_variance, rtol=1e-5, atol=(4 * u * mean) ** 2)
    assert set(count) == {10**6}


@pytest.mark.parametrize("rows", [2**13, 2**14, 2**16])
@pytest.mark.parametrize(
    "policy, value", [("mixed_float16", 60_960), ("mixed_bfloat16", 1.9921875)]
)
@pytest.mark.parametrize("mode", MODES)
def test_a_constant_half_batch_has_no_variance(policy, value, rows, mode):
    """TensorFlow's fused kernel finds one of 2192 in 65536 equal float16 numbers."""
    half = keras.DTypePolicy(policy).compute_dtype
    y, mean, variance = batch_statistics(rounded(np.full((rows, 2), value), half), policy, mode)
    assert (set(mean), set(variance), set(y.ravel())) == ({value}, {0}, {0})


@pytest.mark.only("tensorflow", "torch")  # JAX has no float64 by default
@pytest.mark.parametrize("training", [True, False])
def test_float64_inputs(training, jit, pull_back):
    """TensorFlow multiplies no float64 by a float32."""
    random = np.random.default_rng(0)
    x, cotangent = random.normal(2, 3, (64, 3)), random.normal(size=(64, 3))
    results = []
    for dtype in ("float64", "float32"):
        layer = Float32BatchNormalization(dtype=dtype)
        results.append(pull_back(layer, x.astype(dtype), cotangent, jit, training=training))
        assert [v.dtype for v in layer.variables] == ["float32"] * 4
    (wide, to_wide), (y, to_y) = results
    assert wide.dtype == "float64"
    np.testing.assert_allclose(wide, y, rtol=1e-5, atol=1e-5)
    for one, other in zip(to_wide, to_y, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.quick
@pytest.mark.parametrize("policy", POLICIES)
def test_variables_are_float32_and_in_the_order_of_keras(policy):
    layer = Float32BatchNormalization(dtype=policy)
    layer.build((None, 2))
    peer = keras.layers.BatchNormalization()
    peer.build((None, 2))
    assert [v.dtype for v in layer.variables] == ["float32"] * 4
    assert [v.name for v in layer.weights] == [v.name for v in peer.weights]
    assert [v.trainable for v in layer.weights] == [v.trainable for v in peer.weights]


@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_are_not_rounded_to_half(policy):
    # (1000 - 999.9) * 1: in half, 999.9 would be 1000 and the output 0.
    layer = Float32BatchNormalization(dtype=policy)
    layer.build((None, 1))
    layer.moving_mean.assign([999.9])
    y = layer(np.full((1, 1), 1000.0))
    assert keras.backend.standardize_dtype(y.dtype) == layer.compute_dtype
    y = ops.convert_to_numpy(ops.cast(y, "float32")).item()
    expected = (1000 - np.float32(999.9)) / np.sqrt(1 + EPSILON)
    np.testing.assert_allclose(y, expected, rtol=2 * ROUNDOFF[layer.compute_dtype] + 1e-6)


@pytest.mark.parametrize(
    "axis, shape", [(-1, (6, 5)), (1, (4, 3, 5, 2)), (-1, (4, 5, 2, 3)), (2, (3, 4, 5))]
)
@pytest.mark.parametrize("training", [True, False])
def test_agrees_with_keras(axis, shape, training, jit, pull_back):
    random = np.random.default_rng(0)
    x = random.normal(2, 3, shape).astype("float32")
    cotangent = random.normal(size=shape)
    weights = [random.uniform(0.5, 2, shape[axis]) for _ in range(4)]
    results = []
    for kind in (Float32BatchNormalization, keras.layers.BatchNormalization):
        layer = kind(axis=axis)
        layer.build(shape)
        layer.set_weights(weights)
        results.append(pull_back(layer, x, cotangent, jit, training=training))
    (ours, our_gradients), (theirs, their_gradients) = results
    # Numbers of order 1 to 10 after some dozens of float32 operations each.
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for one, other in zip(our_gradients, their_gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("axis, shape", [(-1, (6, 5, 3)), (1, (6, 5, 3))])
@pytest.mark.parametrize("policy", POLICIES)
def test_masked_moments(axis, shape, policy, jit, pull_back):
    random = np.random.default_rng(0)
    mask = random.random(shape[:-1]) < 0.6
    mask[0] = True  # each channel of axis 1 keeps an element
    half = keras.DTypePolicy(policy).compute_dtype
    x = rounded(random.normal(5, 2, shape), half)
    axes = tuple(a for a in range(3) if a != axis % 3)
    weights = np.broadcast_to(mask[..., None], shape).astype("float64")
    mean, variance = (np.expand_dims(each, axes) for each in oracle(x, axes, weights))
    expected = (x.astype("float64") - mean) / np.sqrt(variance + EPSILON)

    layer = Float32BatchNormalization(axis=axis, dtype=policy)
    spoiled = np.where(mask[..., None], x, np.float32("nan")).astype(x.dtype)
    y, _ = pull_back(
        layer, spoiled, np.ones(shape), jit, training=True, mask=ops.convert_to_tensor(mask)
    )

    # A dozen float32 operations on numbers of order 10, then one rounding to the output dtype.
    bound = 2e-6 + ROUNDOFF[half]
    chosen = weights.astype(bool)
    np.testing.assert_allclose(y.astype("float64")[chosen], expected[chosen], rtol=bound, atol=5e-6)
    assert np.all(np.isnan(y.astype("float64")[~chosen]))


def test_refuses_a_mask_of_another_rank():
    with pytest.raises(ValueError, match=r"`mask` must have.*mask\.shape=\(2, 3\)"):
        Float32BatchNormalization()(np.ones((2, 3)), mask=np.ones((2, 3), bool), training=True)


@pytest.mark.quick
@pytest.mark.quick
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("training", [True, False])
def test_raw_inputs_are_not_rounded_first(policy, training):
    """In bfloat16 these 31 years are five numbers."""
    years = np.arange(1995, 2026, dtype="float32")[:, None]
    layer = Float32BatchNormalization(
        moving_mean_initializer=keras.initializers.Constant(2010),
        moving_variance_initializer=keras.initializers.Constant(80 - EPSILON),
        dtype=policy,
    )
    y = ops.convert_to_numpy(ops.cast(layer(years, training=training), "float32"))
    roundoff = ROUNDOFF[layer.compute_dtype] + 8 * ROUNDOFF["float32"]
    np.testing.assert_allclose(y, (years - 2010) / np.sqrt(80 + EPSILON * training), rtol=roundoff)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.75, 1.0])
def test_moving_statistics_follow_the_momentum(momentum):
    layer = Float32BatchNormalization(momentum=momentum)
    for _ in range(2):
        layer(np.array([[1.0], [5.0]]), training=True)  # mean 3, variance 4
    kept = momentum**2
    np.testing.assert_array_equal(layer.get_weights()[2:], [[3 - 3 * kept], [4 - 3 * kept]])


@pytest.mark.parametrize("training, trainable", [(False, True), (True, False), (None, True)])
def test_inference_uses_and_keeps_the_moving_statistics(training, trainable):
    layer = Float32BatchNormalization(epsilon=1.0, trainable=trainable)
    layer.build((None, 1))
    weights = [[2.0], [5.0], [10.0], [3.0]]
    layer.gamma.assign(weights[0])
    layer.beta.assign(weights[1])
    layer.moving_mean.assign(weights[2])
    layer.moving_variance.assign(weights[3])
    y = layer(np.array([[14.0]]), training=training)
    assert ops.convert_to_numpy(y).item() == (14 - 10) / np.sqrt(3 + 1) * 2 + 5
    assert [w.tolist() for w in layer.get_weights()] == weights


@pytest.mark.quick
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("scale", [True, False])
def test_center_and_scale_are_optional(center, scale):
    layer = Float32BatchNormalization(center=center, scale=scale)
    layer.build((None, 1))
    names = ["gamma"] * scale + ["beta"] * center + ["moving_mean", "moving_variance"]
    assert [v.name for v in layer.weights] == names
    assert np.all(np.isfinite(ops.convert_to_numpy(layer(np.ones((2, 1)), training=True))))


@pytest.mark.parametrize("policy", POLICIES)
def test_symbolic_output_has_the_compute_dtype_and_unknown_sizes_work(policy, jit):
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((None, 4))
    outputs = Float32BatchNormalization()(inputs)
    assert outputs.dtype == keras.DTypePolicy(policy).compute_dtype
    assert outputs.shape == (None, None, 4)
    model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit)
    model.optimizer.build(model.trainable_variables)  # or TensorFlow traces the step twice
    x = np.random.default_rng(0).normal(1e3, 1, (8, 3, 4))
    losses = model.fit(x, x[..., :1] - 1e3, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("synchronized", [True, False])
def test_replicas_share_their_moments(synchronized, two_replicas):
    import tensorflow as tf

    strategy = two_replicas
    with strategy.scope():
        layer = Float32BatchNormalization(momentum=0.0, synchronized=synchronized)
        layer.build((None, 1))
    # Mean 3 and variance 9 + 1 over both replicas; each replica alone has variance 1.
    x = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(
            [[[-1.0], [1.0]], [[5.0], [7.0]]][context.replica_id_in_sync_group]
        )
    )
    step = tf.function(lambda x: layer(x, training=True))
    outputs = strategy.experimental_local_results(strategy.run(step, args=(x,)))
    y = np.concatenate([each.numpy().ravel() for each in outputs])
    expected = np.array([-4, -2, 2, 4]) / np.sqrt(10) if synchronized else np.array([-1, 1, -1, 1])
    np.testing.assert_allclose(y, expected, rtol=EPSILON)
    if synchronized:
        assert layer.moving_mean.numpy() == 3
        assert layer.moving_variance.numpy() == 10


@pytest.mark.only("jax", "torch")
def test_refuses_synchronized_without_tensorflow():
    with pytest.raises(ValueError, match="synchronized"):
        Float32BatchNormalization(synchronized=True)


@pytest.mark.quick
@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"momentum": 1.5}, r"`momentum` must be between 0 and 1\. Received: momentum=1\.5"),
        ({"momentum": float("nan")}, "Received: momentum=nan"),
        ({"epsilon": 0.0}, r"`epsilon` must be above 0.*Received: epsilon=0\.0"),
        ({"renorm": True}, r"Received: renorm=True.*keras\.layers\.BatchNormalization"),
    ],
)
def test_construction_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Float32BatchNormalization(**kwargs)


@pytest.mark.parametrize("policy", POLICIES)
def test_saves_and_loads(policy, tmp_path):
    layer = Float32BatchNormalization(
        axis=1, momentum=0.9, epsilon=0.01, gamma_regularizer="l2", dtype=policy
    )
    model = keras.Sequential([keras.Input((3, 2)), layer])
    model(np.random.default_rng(0).normal(size=(4, 3, 2)), training=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").layers[0]
    assert loaded.get_config() == layer.get_config()
    assert [w.tobytes() for w in loaded.get_weights()] == [w.tobytes() for w in layer.get_weights()]
    assert [v.dtype for v in loaded.variables] == ["float32"] * 4
