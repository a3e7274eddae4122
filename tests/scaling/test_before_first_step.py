"""What is saved before the first step, when no optimizer is built yet, comes back as it was."""

import keras
import numpy as np
import pytest
from keras import ops
from older import of_keras
from oracle import few
from processes import environment, run_all

import kmp

BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(16, 2)).astype("float32")

INNER = {
    "adam": lambda: keras.optimizers.Adam(0.125),
    "sgd": lambda: keras.optimizers.SGD(0.125),
    "schedule": lambda: keras.optimizers.Nadam(
        keras.optimizers.schedules.ExponentialDecay(0.125, 2, 0.5)
    ),
    # Their `iterations` is computed, and no variable.
    "accumulating": lambda: keras.optimizers.Adam(0.125, gradient_accumulation_steps=2),
    "averaging": lambda: keras.optimizers.SGD(
        0.125, momentum=0.5, gradient_accumulation_steps=2, use_ema=True
    ),
}
WRITERS = {
    "bare": lambda inner: inner,
    "keras": keras.optimizers.LossScaleOptimizer,
    "kmp": kmp.scaled,
}


def make_model(optimizer, trainable=True):
    keras.utils.set_random_seed(7)
    dense = keras.layers.Dense(2, trainable=trainable)
    model = keras.Sequential([keras.Input((3,)), dense])
    model.compile(optimizer, "mse", run_eagerly=BACKEND == "tensorflow")
    return model


def built(model):
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model, **arguments):
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, **arguments)


def state(model):
    return [ops.convert_to_numpy(v) for v in (*model.variables, *model.optimizer.variables)]


def assert_equal(received, expected):
    for got, x in zip(received, expected, strict=True):
        np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("inner", few(INNER, "adam", "accumulating"))
def test_a_saved_model_loads_and_trains_as_the_one_that_was_saved(tmp_path, inner):
    model = make_model(kmp.scaled(INNER[inner](), 64.0))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    fresh = state(built(make_model(kmp.scaled(INNER[inner](), 64.0))))
    assert_equal(state(loaded), fresh)
    for each in (model, loaded):
        fit(each)
    assert_equal(state(loaded), state(model))
    assert int(loaded.optimizer.steps) == 2


@pytest.mark.parametrize("reader_is_built", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("inner", few(INNER, "adam", "accumulating"))
def test_weights_load_with_the_learning_rate(tmp_path, inner, writer, reader_is_built):
    model = make_model(WRITERS[writer](INNER[inner]()))
    if inner != "schedule":
        model.optimizer.learning_rate = 0.5
    model.save_weights(tmp_path / "m.weights.h5")
    reader = make_model(kmp.scaled(INNER[inner]()))
    expected = make_model(kmp.scaled(INNER[inner]()))
    if inner != "schedule":
        expected.optimizer.learning_rate = 0.5
    if reader_is_built:
        built(reader)
    reader.load_weights(tmp_path / "m.weights.h5")
    assert_equal(state(built(reader)), state(built(expected)))


def test_a_trained_optimizer_keeps_its_state_and_says_so(tmp_path):
    make_model(kmp.scaled(INNER["adam"]())).save_weights(tmp_path / "m.weights.h5")
    model = built(make_model(kmp.scaled(INNER["adam"]())))
    weights = [ops.convert_to_numpy(v) for v in model.variables]
    fit(model)
    before = state(model)
    with pytest.warns(UserWarning) as said:
        model.load_weights(tmp_path / "m.weights.h5")
    said = [str(each.message) for each in said if issubclass(each.category, UserWarning)]
    assert "saved before the optimizer's first step" in said[0]
    assert said[1:] and all(each.startswith("Skipping variable loading") for each in said[1:])
    assert_equal(state(model), [*weights, *before[len(weights) :]])


def test_an_optimizer_without_slots_is_not_taken_for_one_that_is_not_built(tmp_path):
    """Plain SGD holds two numbers before its first step and after it."""
    model = make_model(INNER["sgd"]())
    fit(model)
    model.save_weights(tmp_path / "m.weights.h5")
    ours = built(make_model(kmp.scaled(INNER["sgd"]())))
    ours.load_weights(tmp_path / "m.weights.h5")
    assert int(ours.optimizer.iterations) == int(ours.optimizer.steps) == 2


def test_a_trained_optimizer_without_slots_goes_back_to_the_beginning(tmp_path):
    """All the state of plain SGD is in the file: its iteration and its learning rate."""
    rule = kmp.DynamicLossScale(initial_scale=64, growth_interval=1)
    model = make_model(kmp.scaled(INNER["sgd"](), rule))
    model.save_weights(tmp_path / "m.weights.h5")
    expected = state(built(make_model(kmp.scaled(INNER["sgd"](), rule))))
    built(model)
    fit(model)
    assert float(model.optimizer.dynamic_scale) == 256
    model.optimizer.telemetry.sampling.assign([7, 0, 2, 2])
    model.load_weights(tmp_path / "m.weights.h5")
    sampling = ops.convert_to_numpy(model.optimizer.telemetry.sampling)
    assert sampling.tolist() == [7, 0, 2, 2]  # as was asked
    model.optimizer.telemetry.sampling.assign([0, 0, 0, 0])
    assert_equal(state(model), expected)


def test_micro_batches_that_a_bare_optimizer_has_accumulated_are_kept():
    """They were taken before it was wrapped; within the first window its `iterations` is 0."""
    file = {}
    make_model(kmp.scaled(INNER["accumulating"]())).optimizer.save_own_variables(file)
    model = built(make_model(INNER["accumulating"]()))
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    assert int(ops.convert_to_numpy(model.optimizer.iterations)) == 0
    model.compile(kmp.scaled(model.optimizer), "mse")
    before = state(built(model))
    with pytest.warns(UserWarning, match="saved before the optimizer's first step"):
        model.optimizer.load_own_variables(file)
    assert_equal(state(model), before)


class Subclassed(keras.Model):
    """Its layer's name comes after `optimizer`, in whose order Keras loads."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.zz_dense = keras.layers.Dense(2)

    def build(self, input_shape):
        self.zz_dense.build(input_shape)

    def call(self, x):
        return self.zz_dense(x)


MODELS = {
    "sequential": lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]),
    "subclassed": Subclassed,
}


@pytest.mark.parametrize("memory", few(["float32", "bfloat16", "masters"], "float32"))
@pytest.mark.parametrize("kind", few(MODELS, "subclassed"))
@pytest.mark.parametrize("name", few(["model.keras", "m.weights.h5"], "model.keras"))
def test_slots_that_begin_with_the_weights(tmp_path, name, kind, memory):
    """Those of a loaded model begin with its own weights, not with those it was made with."""
    optimizer = of_keras("optimizers.ScheduleFreeAdamW")
    keras.config.set_dtype_policy("float32" if memory == "float32" else "bfloat16")

    def make(seed):
        keras.utils.set_random_seed(seed)
        model = MODELS[kind]()
        model.build((None, 3))
        wrapped = kmp.scaled(optimizer(0.125), master_weights=memory == "masters")
        model.compile(wrapped, "mse", run_eagerly=BACKEND == "tensorflow")
        return model

    model = make(1)
    if name == "model.keras":
        model.save(tmp_path / name)
        with keras.saving.custom_object_scope({"Subclassed": Subclassed}):
            loaded = keras.models.load_model(tmp_path / name)
    else:
        model.save_weights(tmp_path / name)
        loaded = built(make(2))
        loaded.load_weights(tmp_path / name)
    for each in (model, loaded):
        fit(each)
    for got, expected in zip(loaded.variables, model.variables, strict=True):
        np.testing.assert_array_equal(
            *(np.array(ops.convert_to_numpy(ops.cast(v, "float32"))) for v in (got, expected))
        )


def test_keras_still_begins_slots_with_weights_that_it_has_replaced(tmp_path):
    """One step at a rate of 1e-6 moves the loaded weights back to where they were made."""
    model = make_model(of_keras("optimizers.ScheduleFreeAdamW")(1e-6))
    model.save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    before = ops.convert_to_numpy(loaded.variables[0])
    fit(loaded)
    assert np.abs(ops.convert_to_numpy(loaded.variables[0]) - before).max() > 0.01


OTHERS = ("LossScaleOptimizer", "MultiOptimizer", "Optimizer")
KERASS = [x for x in dir(keras.optimizers) if hasattr(getattr(keras.optimizers, x), "apply")]
SETTINGS = {
    "plain": {},
    "all": {"gradient_accumulation_steps": 2, "use_ema": True, "ema_overwrite_frequency": 3},
}


@pytest.mark.wide
@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", [x for x in KERASS if x not in OTHERS])
def test_each_optimizer_of_keras_begins_as_it_was_saved(tmp_path, name, settings, policy):
    keras.config.set_dtype_policy(policy)

    def make():
        inner = getattr(keras.optimizers, name)(0.125, **SETTINGS[settings])
        return make_model(kmp.scaled(inner))

    def floats(model):
        values = (*model.variables, *model.optimizer.variables)
        return [ops.convert_to_numpy(ops.cast(v, "float32")) for v in values]

    model, reader = make(), built(make())
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    reader.load_weights(tmp_path / "m.weights.h5")
    for each in (loaded, reader):
        assert_equal(floats(each), floats(built(model)))


@pytest.fixture
def just_wrapped():
    """Adam has taken two steps; the wrapper around it none."""
    model = built(make_model(INNER["adam"]()))
    fit(model)
    model.compile(kmp.scaled(model.optimizer), "mse")
    return model


def test_an_inner_optimizer_with_as_many_numbers_as_a_wrapper_that_is_not_built(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.125, momentum=0.5), "mse")
    model.optimizer.build(model.trainable_variables)
    model.compile(kmp.scaled(model.optimizer), "mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_equal(state(loaded), state(built(model)))


def test_a_trained_optimizer_that_has_just_been_wrapped_keeps_its_slots(tmp_path, just_wrapped):
    just_wrapped.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_equal(state(loaded), state(built(just_wrapped)))
    assert int(loaded.optimizer.iterations) == 2
    assert int(loaded.optimizer.steps) == 0


def test_where_the_slots_of_the_inner_optimizer_do_not_fit(just_wrapped):
    store = {}
    just_wrapped.optimizer.save_own_variables(store)
    reader = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    reader.compile(kmp.scaled("adam"), "mse")
    with pytest.warns(UserWarning, match="the optimizer is not built yet"):
        reader.optimizer.load_own_variables(store)
    before = state(built(reader))
    with pytest.raises(ValueError, match=r"does not fit Adam of this model.*Compile with"):
        reader.optimizer.load_own_variables(store)
    assert_equal(state(reader), before)


def test_a_model_without_trainable_variables(tmp_path):
    model = built(make_model(kmp.scaled(INNER["adam"]()), trainable=False))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_equal(state(loaded), state(model))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_an_optimizer_that_does_not_measure(tmp_path, name):
    def make():
        return make_model(kmp.LossScaleOptimizer(INNER[name](), measure_gradients=False))

    make().save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_equal(state(loaded), state(built(make())))


def test_a_model_that_is_not_built(tmp_path):
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile(kmp.scaled("adam"), "mse")
    with pytest.warns(UserWarning, match="not yet been built"):
        model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    fit(loaded)
    assert int(loaded.optimizer.steps) == 2


def test_a_backup_and_a_checkpoint_of_the_beginning(tmp_path):
    """What is written before `fit` is taken up by the callbacks that read it in `fit`."""
    model = make_model(kmp.scaled(INNER["adam"]()))
    (tmp_path / "backup").mkdir()
    model.save_weights(tmp_path / "backup" / "latest.weights.h5")
    resumed = make_model(kmp.scaled(INNER["adam"]()))
    fit(resumed, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "backup")])

    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "checkpoint.keras", verbose=0)
    checkpoint.set_model(make_model(kmp.scaled(INNER["adam"]())))
    checkpoint.on_epoch_end(0, {"loss": 1.0})
    loaded = keras.models.load_model(tmp_path / "checkpoint.keras")
    for each in (model, loaded):
        fit(each)
        assert_equal(state(each), state(resumed))


LOAD = """
import sys, keras, numpy as np, kmp
model = keras.models.load_model(sys.argv[1])
model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
assert int(model.optimizer.steps) == int(model.optimizer.iterations) == 1
"""


@pytest.mark.only("tensorflow")  # files are the same code on all backends
@pytest.mark.slow
def test_a_file_loads_in_a_new_process(tmp_path):
    make_model(kmp.scaled(INNER["adam"]())).save(tmp_path / "model.keras")
    run_all(
        [["-W", "error::UserWarning", "-c", LOAD, tmp_path / "model.keras"]],
        [environment(KERAS_BACKEND=BACKEND)],
        tmp_path,
        timeout=100,
    )
