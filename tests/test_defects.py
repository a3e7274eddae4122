"""Defects that were measured in Keras and its peers, each with the test that kmp has none of it.

Where it is cheap, a `test_keras_still_...` proves that Keras 3.15 has the defect, so that the day
it is fixed there is noticed.
"""

import keras
import numpy as np
import pytest
from keras import ops
from older import of_keras
from oracle import BACKEND, MODES, Run, compiled, few, number

import kmp
from kmp.health import measure as health
from kmp.health.measure import group_gradients

k = keras.optimizers
COMPILED = {"tensorflow": "graph", "jax": "jit", "torch": "eager"}[BACKEND]
COMPILE = {"run_eagerly": True} if BACKEND == "torch" else {"jit_compile": BACKEND == "jax"}


def run_of(make_optimizer, **kwargs):
    variable = keras.Variable(np.float32([1, 2]), name="kernel")
    return Run(make_optimizer(k.SGD(0.5), **kwargs), COMPILED, [variable])


def kernel(run):
    return ops.convert_to_numpy(run.variables[0]).tolist()


# The scale: floor, ceiling, growth, validation.


def test_170_overflows_then_a_finite_step():
    """Keras and PyTorch: the scale halves to 0, and the next finite step writes 0/0."""
    run = run_of(kmp.LossScaleOptimizer)
    for _ in range(170):
        run.step([[np.inf, 0]])
    run.step([[1.0, 1.0]])
    assert kernel(run) == [0.5, 1.5]


def test_keras_still_loses_its_weights_after_170_overflows():
    run = run_of(k.LossScaleOptimizer)
    for _ in range(170):
        run.step([[np.inf, 0]])
    run.step([[1.0, 1.0]])
    assert np.isnan(kernel(run)).all()


def fit_on(make_optimizer, bad_batches, good_batches):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(make_optimizer(k.SGD(0.1)), "mse", **COMPILE)
    x = np.ones((bad_batches + good_batches, 1), "float32")
    x[:bad_batches] = np.nan
    model.fit(x, np.ones_like(x), batch_size=1, shuffle=False, verbose=0)
    return model


def test_170_bad_batches_in_fit():
    """Keras: the same end to end; after some bad data a run is lost for ever."""
    model = fit_on(kmp.LossScaleOptimizer, 170, 30)
    assert np.isfinite(ops.convert_to_numpy(model.trainable_variables[0])).all()
    # The loss is NaN: no scale is to blame. On JAX the optimizer is not told: down to the floor.
    floor = kmp.DynamicLossScale.min_scale
    assert number(model.optimizer.dynamic_scale) == (floor if BACKEND == "jax" else 2.0**15)
    assert number(model.optimizer.skipped_steps) == 170
    assert number(model.optimizer.iterations) == 30


def test_keras_still_loses_a_fit_after_170_bad_batches():
    model = fit_on(k.LossScaleOptimizer, 170, 1)
    assert np.isnan(ops.convert_to_numpy(model.trainable_variables[0])).all()


def test_the_scale_does_not_grow_into_infinity():
    """Keras: inf at the 113th growth, and inf for ever after."""
    run = run_of(kmp.LossScaleOptimizer, dynamic_growth_steps=1)
    for _ in range(120):
        run.step([[0.0, 0.0]])
    assert number(run.optimizer.dynamic_scale) == 2.0**24
    run.step([[np.inf, 0.0]])
    assert number(run.optimizer.dynamic_scale) == 2.0**23


def test_keras_still_grows_its_scale_into_infinity():
    run = run_of(k.LossScaleOptimizer, dynamic_growth_steps=1)
    for _ in range(120):
        run.step([[0.0, 0.0]])
    assert number(run.optimizer.dynamic_scale) == np.inf


def grown_after_the_interval_was_lowered(make_optimizer):
    run = run_of(make_optimizer, initial_scale=8.0, dynamic_growth_steps=10)
    run.optimizer.step_counter.assign(15)  # as in a run resumed with a shorter interval
    for _ in range(12):
        run.step([[0.0, 0.0]])
    return number(run.optimizer.dynamic_scale)


def test_a_lowered_growth_interval_still_grows():
    """Keras: it waits for a counter to equal a number that it has passed."""
    assert grown_after_the_interval_was_lowered(kmp.LossScaleOptimizer) == 32.0


def test_keras_still_never_grows_after_the_interval_was_lowered():
    assert grown_after_the_interval_was_lowered(k.LossScaleOptimizer) == 8.0


NONSENSE = [
    {"initial_scale": 0},
    {"initial_scale": -4},
    {"initial_scale": float("nan")},
    {"dynamic_growth_steps": 0},
    {"dynamic_growth_steps": -1},
]


@pytest.mark.parametrize("arguments", NONSENSE, ids=str)
def test_nonsense_is_refused_at_construction(arguments):
    """Keras: accepted, and the run ends in NaN or never grows."""
    with pytest.raises(ValueError, match="must be a"):
        kmp.LossScaleOptimizer(k.SGD(), **arguments)


@pytest.mark.parametrize("arguments", NONSENSE, ids=str)
def test_keras_still_accepts_nonsense(arguments):
    k.LossScaleOptimizer(k.SGD(), **arguments)


def test_a_name_is_an_optimizer():
    """Keras: the optimizer's name ends in AttributeError, and its class is accepted."""
    assert isinstance(kmp.LossScaleOptimizer("adam").inner_optimizer, k.Adam)


def test_keras_still_takes_no_name():
    with pytest.raises(AttributeError):
        k.LossScaleOptimizer("adam")


def test_a_model_without_input_is_watched_from_its_first_step():
    """kmp's own, once: the state that a skipped step keeps was asked for before it was built."""
    model = keras.Sequential([kmp.layers.Float32BatchNormalization(), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd"), "mse", **COMPILE)
    x = np.float32([[np.nan, 1], [1, 2], [3, 4]])
    watch = kmp.callbacks.GradientHealth()
    with pytest.warns(UserWarning):
        model.fit(x, x[:, 1:], batch_size=1, shuffle=False, verbose=0, callbacks=[watch])
    assert number(model.optimizer.skipped_steps) == 1


# Sparse gradients, on TensorFlow.


def embedding_model(optimizer, **kwargs):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(32, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse", **kwargs)
    return model


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize(
    "compile_kwargs",
    few([{"jit_compile": False}, {"run_eagerly": True}], {"run_eagerly": True}),
    ids=str,
)
@pytest.mark.parametrize("name", few(["sgd", "adam"], "adam"))
def test_embeddings_train_as_without_scaling(name, compile_kwargs):
    """Right in Keras too: sparse gradients survive being unscaled, and an overflow is skipped."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 32, (32, 4)), random.normal(size=(32, 1)).astype("float32")
    models = [embedding_model(o, **compile_kwargs) for o in (kmp.scaled(name, 1024), name)]
    for model in models:
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    before = [ops.convert_to_numpy(v) for v in models[0].trainable_variables]
    for weight, bare in zip(before, models[1].trainable_variables, strict=True):
        np.testing.assert_array_equal(weight, ops.convert_to_numpy(bare))
    models[0].fit(x[:8], np.full((8, 1), np.nan), verbose=0)
    for weight, old in zip(models[0].trainable_variables, before, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(weight), old)
    assert number(models[0].optimizer.skipped_steps) == 1


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("verb", ["all_finite", "unscale", "measure"])
def test_a_sparse_gradient_is_never_made_dense(verb):
    """Keras: checking 64 rows of a table fills the whole table. This one would need 4 TB."""
    import tensorflow as tf

    shape = [2**35, 32]
    slices = tf.IndexedSlices(tf.ones((2, 32)), tf.constant([1, 2**34], "int64"), shape)
    rule = kmp.StaticLossScale(2.0)
    if verb == "all_finite":
        assert number(kmp.all_finite([slices]))
    elif verb == "unscale":
        assert rule.unscale([slices], rule.init())[0].values.shape == (2, 32)
    else:
        assert number(health.measure(group_gradients([slices], [2**40]), [2**40])[0][0]) == 8.0


@pytest.mark.only("tensorflow")
def test_keras_still_fills_the_whole_table_to_check_it():
    import tensorflow as tf

    slices = tf.IndexedSlices(tf.ones((2, 4)), tf.constant([1, 2]), tf.constant([1000, 4]))
    assert ops.isfinite(slices).shape == (1000, 4)


# The wrapper: whose attributes, and how many times.


def test_the_wrapper_has_no_opinions_of_its_own():
    """Keras: it answers `clipnorm` with None and `use_ema` with False whatever the inner does."""
    optimizer = kmp.LossScaleOptimizer(k.Adam(clipnorm=1.0, use_ema=True))
    assert (optimizer.clipnorm, optimizer.use_ema) == (1.0, True)


def test_keras_still_answers_for_itself():
    optimizer = k.LossScaleOptimizer(k.Adam(clipnorm=1.0, use_ema=True))
    assert (optimizer.clipnorm, optimizer.use_ema) == (None, False)


def decayed(make_optimizer):
    variables = [keras.Variable(np.float32([1, 2]), name=name) for name in ("gamma", "kernel")]
    optimizer = make_optimizer(k.SGD(1.0, weight_decay=0.5))
    optimizer.exclude_from_weight_decay(var_names=["gamma"])
    run = Run(optimizer, COMPILED, variables)
    run.step([[0.0, 0.0], [0.0, 0.0]])
    assert ops.convert_to_numpy(variables[1]).tolist() == [0.5, 1]
    return kernel(run)


def test_exclude_from_weight_decay_is_heard():
    """Keras: silently ignored."""
    assert decayed(kmp.LossScaleOptimizer) == [1, 2]


def test_keras_still_ignores_exclude_from_weight_decay():
    assert decayed(k.LossScaleOptimizer) == [0.5, 1]


@pytest.mark.parametrize("scale", [kmp.LossScaleOptimizer, k.LossScaleOptimizer])
def test_two_scales_are_refused(scale):
    """Keras: allowed; the learning rate is then silently divided by the second scale."""
    with pytest.raises(ValueError, match="two scales would divide the learning rate"):
        kmp.LossScaleOptimizer(scale(k.SGD()))


def test_keras_still_allows_two_scales():
    k.LossScaleOptimizer(k.LossScaleOptimizer(k.SGD()))


def test_compile_adds_no_second_scale():
    """Keras wraps whatever is no LossScaleOptimizer of its own, self-scaling or not."""
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd"), "mse")
    assert type(model.optimizer) is kmp.LossScaleOptimizer
    assert type(model.optimizer.inner_optimizer).__name__ == "SGD"


# What a skipped step leaves behind.


def one_bad_batch_of_four(make_optimizer, layers=()):
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    model.compile(make_optimizer(k.SGD(0.01)), "mse", **COMPILE)
    x = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")
    x[5] = np.nan
    history = model.fit(x, x[:, :1] * 0 + 1, batch_size=4, shuffle=False, verbose=0)
    return model, history.history


def test_a_skipped_step_is_counted():
    """Keras: nothing tells that it happened, and the epoch's loss is NaN for no visible reason."""
    model, _ = one_bad_batch_of_four(kmp.LossScaleOptimizer)
    assert np.isfinite(ops.convert_to_numpy(model.trainable_variables[0])).all()
    optimizer = model.optimizer
    assert (number(optimizer.skipped_steps), number(optimizer.steps)) == (1, 4)
    assert number(optimizer.consecutive_skips) == 0
    np.testing.assert_array_equal(ops.convert_to_numpy(optimizer.gradient_health)[:, 4], [1, 1])


def test_keras_still_reports_a_loss_of_nan_after_a_skipped_step():
    _, history = one_bad_batch_of_four(k.LossScaleOptimizer)
    assert np.isnan(history["loss"]).all()


def test_batch_normalization_takes_in_no_bad_batch():
    """Keras, PyTorch, Flax's example: one bad batch and the moving statistics are NaN for ever."""
    layer = kmp.layers.Float32BatchNormalization()
    model, _ = one_bad_batch_of_four(kmp.LossScaleOptimizer, [layer])
    assert np.isfinite(ops.convert_to_numpy(layer.moving_mean)).all()
    assert np.isfinite(ops.convert_to_numpy(layer.moving_variance)).all()
    assert np.isfinite(model.predict(np.ones((2, 2)), verbose=0)).all()
    assert number(model.optimizer.skipped_steps) == 1


def test_keras_still_poisons_batch_normalization():
    layer = keras.layers.BatchNormalization()
    one_bad_batch_of_four(k.LossScaleOptimizer, [layer])
    assert np.isnan(ops.convert_to_numpy(layer.moving_mean)).all()


@pytest.mark.only("torch")
def test_keras_still_computes_a_negative_variance_on_torch():
    """E[x^2] - E[x]^2 of a constant channel; the layers' tests hold kmp to better."""
    _, variance = ops.moments(ops.full((64, 1), 1000.5), axes=[0])
    assert number(variance[0]) < 0 or number(variance[0]) > 0.01


# Other libraries.


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_on_the_growth_step(mode):
    """MPX, DeepSpeed: divided by the next scale, and so halved whenever the scale grows."""
    rule = kmp.DynamicLossScale(8, growth_interval=1)
    variable = keras.Variable(np.float32([8, 8]), name="kernel")
    run = Run(kmp.scaled("sgd", rule, learning_rate=1.0), mode, [variable])
    for i in range(1, 4):
        run.step([[1.0, 2.0]])
        assert kernel(run) == [8 - i, 8 - 2 * i]


@pytest.mark.parametrize("mode", MODES)
def test_the_floor_is_kept_when_compiled(mode):
    """JMP: a floor of 32 falls to 8 within `jit`, which rebuilds the rule without it."""
    rule = kmp.DynamicLossScale(initial_scale=32, min_scale=32)

    def two_overflows(state, finite):
        return rule.next(rule.next(state, finite), finite)

    state = compiled(two_overflows, mode)(rule.init(), ops.convert_to_tensor(False))
    assert number(state[0]) == 32


def test_the_floor_is_kept_after_save_and_load(tmp_path):
    """JMP again, across a checkpoint."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd", kmp.DynamicLossScale(64, min_scale=32)), "mse", **COMPILE)
    bad = [ops.full((1, 1), np.inf), ops.full((1,), np.inf)]
    model.optimizer.scale_loss(0.0)
    for _ in range(2):
        model.optimizer.apply(bad, model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert number(loaded.optimizer.dynamic_scale) == 32
    loaded.optimizer.apply(bad, loaded.trainable_variables)
    assert number(loaded.optimizer.dynamic_scale) == 32
    assert number(loaded.optimizer.skipped_steps) == 3


def test_growth_comes_after_the_interval_exactly():
    """Flax: one step late."""
    run = run_of(kmp.LossScaleOptimizer, initial_scale=8, dynamic_growth_steps=3)
    scales = []
    for _ in range(6):
        run.step([[0.0, 0.0]])
        scales.append(number(run.optimizer.dynamic_scale))
    assert scales == [8, 8, 16, 16, 16, 32]


def test_alternating_steps_never_back_off_with_hysteresis():
    """Megatron, DeepSpeed's default: overflows add up over good steps; 256 decays to 8."""
    run = run_of(kmp.LossScaleOptimizer, loss_scale=kmp.DynamicLossScale(256, hysteresis=2))
    for _ in range(6):
        run.step([[0.0, 0.0]])
        run.step([[np.inf, 0.0]])
    assert number(run.optimizer.dynamic_scale) == 256


def test_no_number_of_overflows_is_ever_applied():
    """Optax, `apply_if_finite`: after so many bad updates in a row the next one is applied."""
    run = run_of(kmp.LossScaleOptimizer)
    for _ in range(60):
        run.step([[np.nan, 1.0]])
    assert kernel(run) == [1, 2]
    assert number(run.optimizer.consecutive_skips) == 60


def test_the_run_goes_on_at_the_floor():
    """DeepSpeed, fairseq: the run is killed at the smallest scale, hours in."""
    rule = kmp.DynamicLossScale(2, min_scale=1)
    run = run_of(kmp.LossScaleOptimizer, loss_scale=rule)
    for _ in range(5):
        run.step([[np.inf, 1.0]])
    run.step([[1.0, 1.0]])
    assert kernel(run) == [0.5, 1.5]


# Averages of the weights: a second fit.


def fit_twice(optimizer):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **COMPILE)
    for _ in range(2):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    return int(optimizer.iterations)


def test_a_second_fit_with_averaged_weights():
    assert fit_twice(kmp.scaled("adam", use_ema=True)) == 2


def test_a_second_fit_with_averaged_weights_of_one_of_several_optimizers():
    adam, sgd = k.Adam(use_ema=True), k.SGD()
    no_variables = k.Adam(use_ema=True)
    choose = of_keras("optimizers.OptimizerMap")(sgd, {".*kernel": adam, "nothing": no_variables})
    assert fit_twice(kmp.scaled(k.MultiOptimizer(choose))) == 2


@pytest.mark.only("jax")
def test_keras_still_gives_weights_and_averages_one_buffer():
    with pytest.raises(TypeError):  # the step cannot donate it twice; its variables are gone then
        fit_twice(k.Adam(use_ema=True))
