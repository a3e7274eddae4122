"""What `model.compile(jit_compile=True)` compiles on PyTorch, where it means `torch.compile`."""

import shutil

import keras
import numpy as np
import pytest

import kmp

pytestmark = [
    pytest.mark.only("torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's, of its own functions
]
without_compiler = not shutil.which("g++")
compiles = pytest.mark.skipif(without_compiler, reason="no g++ here, which torch.compile needs")


def fit(optimizer, jit_compile, callbacks=()):
    """Weights after two epochs of six steps, of which the third is of a batch with a NaN."""
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(8, activation="tanh")
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=jit_compile, auto_scale_loss=False)
    x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
    y = x[:, :1].copy()
    if isinstance(optimizer, kmp.LossScaleOptimizer):
        y[33] = np.nan
    options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    logs = model.fit(x, y, **options, callbacks=callbacks).history
    return model.get_weights(), logs


def graphs(*arguments):
    """How many graphs `torch.compile` made of a `fit`."""
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    found = fit(*arguments)
    return dynamo.utils.counters["stats"]["unique_graphs"], found


@compiles
@pytest.mark.slow
def test_the_update_is_one_graph_more_than_the_plain_step():
    """And numbers are those of the eager step, within a few roundings of float32 in 12 steps."""
    plain, _ = graphs(keras.optimizers.Adam(0.01), True)
    optimizer = kmp.scaled("adam", learning_rate=0.01)
    number, (weights, _) = graphs(optimizer, True)
    assert number <= plain + 1
    assert int(optimizer.skipped_steps) == 2
    eager, _ = fit(kmp.scaled("adam", learning_rate=0.01), False)
    for got, expected in zip(weights, eager, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


@compiles
@pytest.mark.slow
def test_a_watcher_names_the_bad_batch():
    watch = kmp.callbacks.GradientHealth()
    with pytest.warns(kmp.PrecisionWarning, match="in step 3 for one"):
        weights, logs = fit(kmp.scaled("adam", learning_rate=0.01), True, [watch])
    assert [x.split()[0] for x in map(str, logs["verdict"])] == ["FORWARD-NAN"] * 2
    assert np.isfinite(logs["loss"]).all() and all(np.isfinite(x).all() for x in weights)


@pytest.mark.parametrize(
    "dtype, arguments, number",
    [
        ("float32", {}, 1),
        ("bfloat16", {}, 0),
        ("float32", {"slot_dtype": "bfloat16"}, 0),
    ],
    ids=["float32", "half_weights", "half_slots"],
)
def test_an_update_through_views_is_not_compiled(monkeypatch, dtype, arguments, number):
    """Half-precision weights and slots: `torch.compile` takes minutes for four layers."""
    import torch

    from kmp._backend.torch import core

    compiled = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda f: compiled.append(f) or f)
    core._compiled_apply.cache_clear()
    weight = keras.Variable(np.ones(3), dtype=dtype)
    optimizer = kmp.scaled("adam", "none", learning_rate=0.1, **arguments)
    optimizer.apply([torch.ones(3, dtype=getattr(torch, dtype))], [weight])
    core._compiled_apply.cache_clear()
    assert len(compiled) == number
    assert (keras.ops.convert_to_numpy(weight) < 1).all()
