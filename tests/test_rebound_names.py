"""Programs that put other classes under the names of Keras's, as a drop-in is dropped in."""

import inspect
import sys

import keras
import numpy as np
import pytest
from oracle import BACKEND, few

import kmp

NAMESPACES = [
    keras,
    keras.callbacks,
    keras.distribution,
    keras.dtype_policies,
    keras.layers,
    keras.losses,
    keras.metrics,
    keras.optimizers,
    keras.optimizers.schedules,
]


def rebind_all(monkeypatch):
    """Put a subclass under the name of each class of Keras: its own objects are no instances."""
    for namespace in NAMESPACES:
        for name, cls in inspect.getmembers(namespace, inspect.isclass):
            monkeypatch.setattr(namespace, name, type(name, (cls,), {}))


def train(make_model, make_optimizer, jit_compile=False):
    keras.utils.set_random_seed(1)
    model = make_model()
    model.compile(make_optimizer(keras.optimizers.Adam(0.1)), "mse", jit_compile=jit_compile)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    model.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0, shuffle=False)
    return model, x


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.parametrize(
    "jit_compile", few([False, True], False) if BACKEND != "torch" else [False]
)
def test_a_program_trains_on_what_stands_under_kerass_names(monkeypatch, tmp_path, jit_compile):
    """The program names only Keras's classes, but it gets kmp's: the result is that of kmp's."""

    def mine():
        return keras.Sequential(
            [
                keras.Input((4,)),
                kmp.layers.Float32BatchNormalization(),
                kmp.layers.Float32OutputDense(2),
            ]
        )

    expected, x = train(mine, kmp.LossScaleOptimizer, jit_compile)
    monkeypatch.setattr(keras.optimizers, "LossScaleOptimizer", kmp.LossScaleOptimizer)
    monkeypatch.setattr(keras.layers, "BatchNormalization", kmp.layers.Float32BatchNormalization)
    monkeypatch.setattr(keras.layers, "Dense", kmp.layers.Float32OutputDense)
    monkeypatch.setattr(keras.callbacks, "TerminateOnNaN", kmp.callbacks.TerminateOnNaN)

    def theirs():
        return keras.Sequential(
            [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        )

    model, _ = train(theirs, lambda inner: keras.optimizers.LossScaleOptimizer(inner), jit_compile)
    for ours, other in zip(expected.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, other)

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is kmp.LossScaleOptimizer
    stop = keras.callbacks.TerminateOnNaN()
    for each in (model, loaded):
        each.fit(x, x[:, :2], batch_size=8, verbose=0, shuffle=False, callbacks=[stop])
    for ours, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, other)


def test_compile_wraps_in_what_stands_in_the_trainers_module(monkeypatch):
    """Under mixed_float16 `compile` wraps an optimizer by a name of `keras.src`."""
    for module in (keras.optimizers, sys.modules["keras.src.trainers.trainer"]):
        monkeypatch.setattr(module, "LossScaleOptimizer", kmp.LossScaleOptimizer)
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    assert type(model.optimizer) is kmp.LossScaleOptimizer
    x = np.ones((8, 4), "float32")
    model.fit(x, x[:, :2], verbose=0)
    assert int(model.optimizer.steps) == 1


def run_everything(tmp_path):
    """A float32 model converted, audited, watched, looked into and saved."""
    keras.utils.set_random_seed(2)
    x = np.random.default_rng(1).normal(size=(64, 6)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    inputs = OWN["Input"]((6,))
    hidden = OWN["BatchNormalization"](name="norm")(inputs)
    hidden = OWN["Dense"](8, "relu", name="hidden")(hidden)
    block = OWN["Sequential"]([OWN["Dense"](8, name="inner")], name="block")
    outputs = OWN["Dense"](2, "softmax", name="head")(block(hidden))
    model = OWN["Model"](inputs, outputs, name="model")
    rate = OWN["ExponentialDecay"](0.01, 2, 0.5)
    model.compile(OWN["Adam"](rate), OWN["SparseCategoricalCrossentropy"](), jit_compile=False)
    found = [str(kmp.to_mixed_precision(model, "mixed_float16"))]
    found += [str(kmp.audit(model)), type(model.optimizer).__name__]
    health = kmp.callbacks.GradientHealth(log_dir=tmp_path / "logs")
    history = model.fit(x, y, batch_size=16, verbose=0, callbacks=[health])
    found += [str(health.verdict), str(health.report), str(history.history["loss"])]
    found.append(str(kmp.debug.locate_nonfinite(model, x * 1e6, y)))
    model.save(tmp_path / "model.keras")
    loaded = OWN["load_model"](tmp_path / "model.keras")
    found.append(str(loaded.evaluate(x, y, verbose=0)))
    return found


OWN = {
    "Adam": keras.optimizers.Adam,
    "BatchNormalization": keras.layers.BatchNormalization,
    "Dense": keras.layers.Dense,
    "ExponentialDecay": keras.optimizers.schedules.ExponentialDecay,
    "Input": keras.Input,
    "Model": keras.Model,
    "Sequential": keras.Sequential,
    "SparseCategoricalCrossentropy": keras.losses.SparseCategoricalCrossentropy,
    "load_model": keras.models.load_model,
}


@pytest.mark.slow
def test_kmp_knows_kerass_objects_whatever_stands_under_their_names(monkeypatch, tmp_path):
    """All that kmp does with a model of Keras's comes out the same with all names rebound."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    expected = run_everything(tmp_path / "a")
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session(free_memory=False)
    rebind_all(monkeypatch)
    assert run_everything(tmp_path / "b") == expected
