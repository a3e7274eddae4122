"""What `model.compile(jit_compile=True)` compiles on PyTorch, where it means `torch.compile`."""

import contextlib
import functools
import shutil
from unittest import mock

import keras
import numpy as np
import pytest
import spiky_runs

import kmp

pytestmark = [
    pytest.mark.only("torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's, of its own functions
]
without_compiler = not shutil.which("g++")
compiles = pytest.mark.skipif(without_compiler, reason="no g++ here, which torch.compile needs")


def fit(optimizer, jit_compile, callbacks=(), bad=slice(33, 34), compiler="eager"):
    """The model after two epochs of six steps, of which the third is of a batch with a NaN.

    "eager" makes the graphs and runs them operation by operation; "inductor", the default of
    `torch.compile`, compiles kernels of them, which takes longer.
    """
    import torch

    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(8, activation="tanh")
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=jit_compile, auto_scale_loss=False)
    x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
    y = x[:, :1].copy()
    if isinstance(optimizer, kmp.LossScaleOptimizer):
        y[bad] = np.nan
    options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    with mock.patch("torch.compile", functools.partial(torch.compile, backend=compiler)):
        model.fit(x, y, **options, callbacks=callbacks)
    return model


@contextlib.contextmanager
def graphs():
    """A list that gets the number of graphs that `torch.compile` makes meanwhile."""
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    number: list[int] = []
    yield number
    number.append(dynamo.utils.counters["stats"]["unique_graphs"])


def values(variables):
    return [keras.ops.convert_to_numpy(v) for v in variables]


AVERAGED = {"use_ema": True, "ema_overwrite_frequency": 4}
CASES = {
    "adam": ({}, {}),
    "clipped": ({"global_clipnorm": 0.1, "weight_decay": 0.01}, {"measure_gradients": False}),
    "averaged": ({**AVERAGED, "gradient_accumulation_steps": 2}, {}),
    "whole_windows": ({"gradient_accumulation_steps": 3}, {"on_overflow": "drop_window"}),
}


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_step_is_the_eager_one(case):
    """Weights, slots, counters and measurements, within a few roundings of float32 in 12 steps.

    The step has no more graphs than that of the plain optimizer.
    """
    of_adam, ours = CASES[case]
    compiler = "inductor" if case == "adam" else "eager"

    def trained(jit_compile):
        optimizer = kmp.LossScaleOptimizer(keras.optimizers.Adam(0.01, **of_adam), **ours)
        model = fit(optimizer, jit_compile, compiler=compiler)
        assert int(optimizer.skipped_steps) >= 2
        return values([*model.weights, *optimizer.variables])

    with graphs() as our_graphs:
        of_compiled = trained(True)
    if case == "adam":
        with graphs() as plain_graphs:
            fit(keras.optimizers.Adam(0.01), True)
        assert our_graphs == plain_graphs
    for found, expected in zip(of_compiled, trained(False), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@compiles
@pytest.mark.slow
def test_skipped_steps_change_no_bit():
    """Neither of weights nor of what the inner optimizer holds."""
    kept = []

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            inner = self.model.optimizer.inner_optimizer
            kept.append(values([*self.model.weights, *inner.variables]))

    optimizer = kmp.scaled("adam", learning_rate=0.01)
    fit(optimizer, True, [Keep()], bad=slice(None))
    assert int(optimizer.skipped_steps) == 12
    for before, after in zip(*kept, strict=True):
        assert before.tobytes() == after.tobytes()
    assert all(np.isfinite(x).all() for x in kept[1])


@compiles
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's, of its own tracing
def test_a_spike_is_left_out_on_the_device():
    """In a graph of its own, and bit for bit as if the batch had never been there."""
    import torch

    bad = spiky_runs.digits(25, bad=[20])
    never = [np.delete(x, 20, axis=0) for x in bad]
    models = [spiky_runs.classifier(name="adam", loss_scale="none") for _ in range(2)]
    for model in models:
        model.compile(model.optimizer, model.loss, jit_compile=True)
    with mock.patch("torch.compile", functools.partial(torch.compile, backend="eager")):
        with graphs() as number:
            spiky_runs.fit(models[0], *bad)
        spiky_runs.fit(models[1], *never)
    assert int(models[0].optimizer.skipped_spikes) == 1 and number[0] > 0
    for mine, theirs in zip(*(values(model.weights) for model in models), strict=True):
        assert mine.tobytes() == theirs.tobytes()


@compiles
@pytest.mark.slow
def test_a_watcher_names_the_bad_batch():
    watch = kmp.callbacks.GradientHealth()
    with pytest.warns(kmp.PrecisionWarning, match="in step 3 for one"):
        model = fit(kmp.scaled("adam", learning_rate=0.01), True, [watch])
    logs = model.history.history
    assert [x.split()[0] for x in map(str, logs["verdict"])] == ["FORWARD-NAN"] * 2
    assert np.isfinite(logs["loss"]).all()
    assert all(np.isfinite(x).all() for x in model.get_weights())


@pytest.mark.parametrize(
    "dtype, arguments, number",
    [
        ("float32", {}, 0),
        ("bfloat16", {}, 1),
        ("float32", {"slot_dtype": "bfloat16"}, 1),
    ],
    ids=["float32", "half_weights", "half_slots"],
)
def test_what_is_left_uncompiled(monkeypatch, dtype, arguments, number):
    """Half precision, which would take minutes to compile."""
    import torch

    from kmp._backend import torch as ours

    def run(step, *args):
        uncompiled.append(step)
        monkeypatch.undo()
        step(*args)

    uncompiled = []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(ours, "_uncompiled", run)
    weight = keras.Variable(np.ones(3), dtype=dtype)
    optimizer = kmp.scaled("adam", "none", learning_rate=0.1, **arguments)
    optimizer.apply([torch.ones(3, dtype=getattr(torch, dtype))], [weight])
    assert len(uncompiled) == number
    assert (keras.ops.convert_to_numpy(weight) < 1).all()


@pytest.mark.parametrize("shapes", [[(4,), (), (2, 2), (), (0,), (5,)], [()], [(6000,), (7, 700)]])
def test_a_compiled_step_measures_each_shape(monkeypatch, shapes):
    """What is compiled, run as it is: nothing is compiled here."""
    import torch

    def measured(compiling):
        variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
        optimizer = kmp.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
        optimizer.build(variables)
        optimizer.scale_loss(0.0)
        numbers = (np.arange(1, np.prod(shape) + 1, dtype="float32") for shape in shapes)
        gradients = [
            torch.as_tensor(4 * x.reshape(s)) for x, s in zip(numbers, shapes, strict=True)
        ]
        with monkeypatch.context() as patched:
            patched.setattr(torch.compiler, "is_compiling", lambda: compiling)
            optimizer.apply(gradients, variables)
        return [optimizer.gradient_report().matrix, *values(variables)]

    for found, expected in zip(measured(True), measured(False), strict=True):
        # Sums of squares in float32, in another order.
        np.testing.assert_allclose(found, expected, rtol=1e-6)
