"""Whatever `keras.config.set_floatx` says, kmp counts in int32 and measures in float32."""

import functools

import keras
import numpy as np
import pytest
from keras import ops
from oracle import BACKEND, MODES, Run, few

import kmp

FLOATX = ["bfloat16", "float16"]
if BACKEND != "jax":  # which has no float64 unless a flag is set before it starts
    FLOATX.append("float64")
POLICIES = ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16"]
quiet = pytest.mark.filterwarnings(
    "ignore:Step", "ignore:float16", "ignore:LearningRateFinder suggests nothing"
)


@pytest.fixture
def floatx():
    """Sets Keras's default float dtype, until the test ends."""
    yield keras.config.set_floatx
    keras.config.set_floatx("float32")


# Numbers that Keras itself makes in its default dtype, such as the learning rate, are powers of two
# here: the same in each of the dtypes.
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.125, momentum=0.5, global_clipnorm=0.5),
    "accumulating": lambda: keras.optimizers.SGD(0.125, gradient_accumulation_steps=2),
    "averaging": lambda: keras.optimizers.SGD(
        0.125, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
}
RULES = {
    "restless": lambda: kmp.DynamicLossScale(1024, growth_interval=2, hysteresis=2),
    "amax": kmp.AmaxLossScale,
}
CASES = {
    "restless": ("sgd", "restless"),
    "amax": ("sgd", "amax"),
    "accumulating": ("accumulating", "restless"),
    "averaging": ("averaging", "amax"),
}
SHAPES = [(40, 7), (7,), (3, 3, 2, 4), (300,)]


def after_eight_steps(dtype, mode, optimizer, rule, **arguments):
    """All that eight steps leave, of which two overflow: weights, slots, counters, measurements."""
    random = np.random.default_rng(3)
    starts = [random.integers(-64, 64, shape).astype("float32") / 64 for shape in SHAPES]
    variables = [
        keras.Variable(ops.convert_to_tensor(x, "float32"), dtype=dtype, name=f"v{i}")
        for i, x in enumerate(starts)
    ]
    scaled = kmp.scaled(OPTIMIZERS[optimizer](), RULES[rule](), **arguments)
    scaled.build(variables)
    scaled.sample_gradients(1)
    run = Run(scaled, mode, variables)
    for step in range(8):
        gradients = [
            random.normal(size=shape).astype("float32") * np.float32(10.0 ** -(i + step))
            for i, shape in enumerate(SHAPES)
        ]
        if step in (2, 5):
            gradients[1][0] = np.inf
        run.step(gradients)
    state = [ops.convert_to_numpy(ops.cast(v, "float32")) for v in run._all()]
    dtypes = [v.dtype for v in run._all() if v.name != "learning_rate"]
    return state, dtypes, str(scaled.gradient_report())


GRID = [
    *((x, "bfloat16", MODES[-1], case) for x in FLOATX for case in CASES),
    *(("bfloat16", "bfloat16", mode, "restless") for mode in MODES[:-1]),
    *(("bfloat16", "float32", mode, "restless") for mode in MODES),
]
QUICK = [("bfloat16", dtype, MODES[-1], "restless") for dtype in ("bfloat16", "float32")]


@functools.cache
def under_float32(dtype, mode, case):
    return after_eight_steps(dtype, mode, *CASES[case])


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("case", few(GRID, *QUICK), ids="-".join)
def test_steps_and_measurements_are_those_under_float32(floatx, case):
    floatx_, dtype, mode, case = case
    expected, dtypes, report = under_float32(dtype, mode, case)
    floatx(floatx_)
    state, found, seen = after_eight_steps(dtype, mode, *CASES[case])
    assert found == dtypes and seen == report
    for x, y in zip(state, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("floatx_", few(FLOATX, "bfloat16"))
def test_masters_in_float32(floatx, floatx_):
    arguments = ("bfloat16", MODES[-1], "sgd", "restless")
    expected, dtypes, _ = after_eight_steps(*arguments, master_weights=True)
    floatx(floatx_)
    state, found, _ = after_eight_steps(*arguments, master_weights=True)
    assert found == dtypes
    for x, y in zip(state, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@quiet
@pytest.mark.parametrize("floatx_", FLOATX)
def test_spikes_are_counted_in_int32(floatx, floatx_):
    arguments = ("float32", MODES[-1], "sgd", "restless")
    expected, dtypes, _ = after_eight_steps(*arguments, spikes="skip")
    floatx(floatx_)
    state, found, _ = after_eight_steps(*arguments, spikes="skip")
    assert found == dtypes
    for x, y in zip(state, expected, strict=True):
        np.testing.assert_array_equal(x, y)


# Whole programs

X = np.random.default_rng(0).integers(-8, 9, (64, 8)).astype("float32") / 8
Y = X[:, :1]


def model_of(policy, **compile_arguments):
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    stack = [keras.layers.Dense(4, "relu", name="a"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((8,)), *stack, keras.layers.Dense(1, name="b")])
    model.compile(kmp.scaled("adam", 64.0, learning_rate=0.01), "mse", **compile_arguments)
    return model


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("floatx_", few(FLOATX, "bfloat16"))
@pytest.mark.parametrize("policy", few(POLICIES, "bfloat16", "mixed_bfloat16"))
def test_fit_with_every_callback(floatx, floatx_, policy, tmp_path):
    floatx(floatx_)
    model = model_of(policy)
    before = [ops.convert_to_numpy(ops.cast(v, "float32")) for v in model.trainable_variables]
    health = kmp.callbacks.GradientHealth(log_dir=tmp_path, update_freq=1, logs="all")
    others = [kmp.callbacks.DivergenceGuard("rollback"), kmp.callbacks.TerminateOnNaN()]
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[health, *others])
    assert history.history["verdict"] == ["HEALTHY"] * 2, str(health.verdict)
    assert health.report.step == 16 and health.report.details is not None
    assert health.report.matrix.dtype == health.report.details.dtype == np.float32
    assert np.isfinite(history.history["update_ratio"]).all()
    for x, v in zip(before, model.trainable_variables, strict=True):
        assert (ops.convert_to_numpy(ops.cast(v, "float32")) != x).any(), v.path


@quiet
@pytest.mark.parametrize("floatx_", few(FLOATX, "bfloat16"))
@pytest.mark.parametrize("policy", few(["mixed_bfloat16", "mixed_float16"], "mixed_bfloat16"))
def test_the_tools(floatx, floatx_, policy, tmp_path):
    floatx(floatx_)
    model = model_of(policy)
    assert not kmp.debug.locate_nonfinite(model, X, Y).path
    assert kmp.debug.compare_precisions(model, X, Y, policy=policy).output_sqnr > 20
    assert kmp.debug.diagnose(model, X, Y).policy is not None
    assert str(kmp.audit(model))
    finder = kmp.callbacks.LearningRateFinder(steps=10)
    finder.find(model, X, Y, batch_size=8)
    model.fit(X, Y, batch_size=8, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for x, y in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        assert x.dtype == y.dtype
        both = [ops.convert_to_numpy(ops.cast(v, "float32")) for v in (x, y)]
        np.testing.assert_array_equal(*both, err_msg=x.path)
    model.layers[0].kernel.assign(np.full((8, 4), np.nan, "float32"))
    assert kmp.debug.locate_nonfinite(model, X, Y).path == model.layers[0].path


BARE = {
    1: lambda: keras.optimizers.Adam(),
    1001: lambda: keras.optimizers.Adam(loss_scale_factor=1001.0),  # bfloat16 has no such number
    32768: lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
}


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("floatx_", few(FLOATX, "bfloat16"))
@pytest.mark.parametrize("expected", BARE)
def test_the_tools_on_a_model_without_kmps_optimizer(floatx, floatx_, expected):
    floatx(floatx_)
    model = model_of("float32")
    model.compile(BARE[expected](), "mse")
    assert f"at loss scale {expected}" in str(kmp.debug.locate_nonfinite(model, X, Y))
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert "mixed_float16" in str(report)
    model.fit(X, Y, batch_size=8, verbose=0)
    for v in model.variables:
        assert np.isfinite(ops.convert_to_numpy(ops.cast(v, "float32"))).all(), v.path
