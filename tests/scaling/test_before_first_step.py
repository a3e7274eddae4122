"""What is saved before the first step, when no optimizer is built yet, comes back as it was."""

import keras
import numpy as np
import pytest
from keras import ops
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


@pytest.mark.parametrize("inner", few(INNER, "adam"))
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
@pytest.mark.parametrize("inner", few(INNER, "adam"))
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
