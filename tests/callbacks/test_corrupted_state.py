"""What a bad batch spoils beside the weights: moving statistics, slots, averaged weights."""

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from linear_runs import SPE
from reports import Told, look_at

import kmp
from kmp.callbacks.snapshot import restore_snapshot, take_snapshot
from kmp.callbacks.verdict.nonfinite import RuinedVariance
from kmp.callbacks.verdict.observation import MovingVariance

BATCH = 8


class Masked(keras.layers.Layer):
    """A layer with a mask of -inf, as attention has it, that nothing assigns."""

    masked = -np.inf

    def build(self, shape):
        self.mask = self.add_weight(
            shape=(shape[-1],),
            initializer=keras.initializers.Constant(self.masked),
            trainable=False,
        )

    def call(self, x):
        return ops.maximum(x, self.mask)


def model_of(*first, **of_adam):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((3,)), *first, keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(kmp.scaled(keras.optimizers.Adam(0.01, **of_adam)), "mse")
    return model


def fit(model, steps=240, times=1.0, of=slice(0), watch=None, **kwargs):
    """Fit to as many steps, of which some have inputs so many times as large."""
    x = np.random.default_rng(0).normal(size=(steps, BATCH, 3)).astype("float32")
    y = x.sum(axis=-1, keepdims=True)
    x[of] *= times
    watch = watch or kmp.callbacks.GradientHealth()
    x, y = x.reshape(-1, 3), y.reshape(-1, 1)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[watch], **kwargs)
    return watch


def ruined(path):
    return pytest.warns(kmp.PrecisionWarning, match=f"UNSTABLE in [^:]*{path}: ")


@pytest.mark.slow
@pytest.mark.parametrize("times, seen", [(1e20, "holds inf or NaN"), (1e9, "has grown from")])
@pytest.mark.parametrize("spe", SPE)
def test_moving_statistics_that_one_huge_batch_has_ruined(times, seen, spe):
    """Its gradients are finite, so that its step is applied, and the training loss goes on well."""
    model = model_of(keras.layers.BatchNormalization(name="norm"))
    model.steps_per_execution = spe
    if BACKEND == "torch" and times == 1e20:  # whose gradients are NaN there: the step is skipped
        with pytest.warns(
            kmp.PrecisionWarning, match="FORWARD-NAN: the loss was not finite in 1 of"
        ):
            fit(model, times=times, of=160)
        assert int(model.optimizer.skipped_steps) == 1
        assert float(ops.max(model.get_layer("norm").moving_variance)) < 10
        return
    with ruined("norm/moving_variance"):
        watch = fit(model, times=times, of=160)
    assert int(model.optimizer.skipped_steps) == 0
    for _ in range(2):
        verdict = watch.verdict
        assert verdict.state == "UNSTABLE" and verdict.blame.endswith("norm/moving_variance")
        assert f"moving_variance {seen}" in verdict.reason
        fit(model, steps=20, watch=watch)  # good batches do not wash it out; it is told once


@pytest.mark.parametrize("first, found", [(19, False), (20, True)])
def test_a_variance_that_is_ruined_in_the_first_hundred_steps(first, found):
    """It begins at 1, and what it comes to in the first steps is no growth."""

    class Known(Told):
        def moving_variances(self, layers):
            return [MovingVariance("norm/moving_variance", self.largest, 1e-3)]

    detector, run = RuinedVariance(), Known()
    for step, run.largest in ((first, 1.0), (40, 2e4)):
        report = kmp.GradientReport((), np.zeros((0, 5), "float32"), 1.0, step, 0, 0)
        verdict = detector.see(look_at(report, run=run))
    assert bool(verdict) == found


def test_statistics_that_are_nan_from_the_start():
    """The loss of the training does not see them; on TensorFlow that of the validation neither."""
    model = model_of(keras.layers.BatchNormalization(name="norm"))
    mean = model.get_layer("norm").moving_mean
    mean.assign(ops.full(mean.shape, np.nan))
    with ruined("norm/moving_mean"):
        watch = fit(model, steps=4)
    assert watch.verdict.blame == mean.path and "holds inf or NaN" in watch.verdict.reason
    with pytest.warns(
        kmp.PrecisionWarning, match="norm/moving_mean: .*moving_mean holds inf or NaN"
    ):
        watch = fit(model, steps=4, validation_data=(np.ones((8, 3)), np.ones((8, 1))))
    assert watch.verdict.blame == mean.path


def test_a_layer_of_ones_own_may_hold_inf_and_not_nan(monkeypatch):
    monkeypatch.setattr(Masked, "masked", np.nan)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), Masked(name="unused")])
    model.compile(kmp.scaled("adam"), lambda y, predicted: ops.mean(ops.square(model.layers[0](y))))
    x = np.ones((BATCH, 3))
    with ruined("unused/variable"):
        model.fit(x, x, verbose=0, callbacks=[kmp.callbacks.GradientHealth()])


def test_averaged_weights_that_are_nan():
    model = model_of(use_ema=True)
    model.optimizer.build(model.trainable_variables)
    (average,) = [v for v in model.optimizer.inner_optimizer.variables if "dense_bias_av" in v.name]
    average.assign(ops.full(average.shape, np.nan))
    with ruined("dense_bias_average"):
        verdict = fit(model, steps=4).verdict
    assert verdict.blame == average.path
    assert "a new optimizer" in verdict.advice


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mask", "other scale", "tiny", "float32 norm"])
def test_what_is_sound_is_called_so(case):
    """A mask; data that change their scale; variances that begin at nearly nothing."""
    norm = keras.layers.BatchNormalization
    if case == "float32 norm":
        watch = fit(model_of(kmp.layers.Float32BatchNormalization()), times=1e20, of=160)
    elif case == "mask":
        watch = fit(model_of(Masked()), steps=4)
    elif case == "other scale":
        watch = fit(model_of(norm()), times=30.0, of=slice(160, None))
    else:
        watch = fit(model_of(keras.layers.Rescaling(1e-6), norm(momentum=0.5)), times=1e3, of=-1)
    assert watch.verdict.state == "HEALTHY"


def test_terminate_on_nan_stops_for_it():
    model = model_of(keras.layers.BatchNormalization(name="norm"))
    mean = model.get_layer("norm").moving_mean
    mean.assign(ops.full(mean.shape, np.nan))
    stop = kmp.callbacks.TerminateOnNaN()
    with pytest.warns(kmp.PrecisionWarning, match=r"norm/moving_mean holds inf or NaN"):
        fit(model, steps=8, watch=stop, epochs=3)
    assert model.stop_training and "Go back to a checkpoint" in stop.stopped_because
    assert int(model.optimizer.iterations) == 8
    model = model_of(Masked())
    stop = kmp.callbacks.TerminateOnNaN()
    fit(model, steps=4, watch=stop)
    assert stop.stopped_because is None


def module_model():
    """A module of PyTorch's, with buffers of its own, in a Keras model."""
    import torch

    class Wrapped(keras.Model):
        def __init__(self):
            super().__init__()
            body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
            body.register_buffer("mask", torch.full((4,), -torch.inf))  # which may hold inf
            self.body = body
            self.head = keras.layers.Dense(1)

        def call(self, x, training=None):
            return self.head(self.body(x))

    model = Wrapped()
    model(np.zeros((2, 3)))
    model.compile(kmp.scaled("adam"), "mse")
    return model


@pytest.mark.only("torch")
def test_a_skipped_step_leaves_the_buffers_of_modules_alone():
    model, sound = module_model(), module_model()
    fit(sound, steps=20)
    with pytest.warns(kmp.PrecisionWarning, match="FORWARD-NAN"):
        fit(model, steps=20, times=np.nan, of=10)
    norm = model.body.module[1]
    assert int(model.optimizer.skipped_steps) == 1
    assert int(sound.body.module[1].num_batches_tracked - norm.num_batches_tracked) == 1
    assert bool(ops.all(ops.isfinite(norm.running_var)))


@pytest.mark.only("torch")
def test_buffers_of_modules_that_one_huge_batch_has_ruined():
    model = module_model()
    with ruined("running_var"):
        watch = fit(model, times=1e9, of=160)
    assert int(model.optimizer.skipped_steps) == 0
    assert "running_var has grown from" in watch.verdict.reason


@pytest.mark.only("torch")
def test_a_rollback_and_the_tools_put_buffers_of_modules_back():
    model = module_model()
    fit(model, steps=4)
    norm, x = model.body.module[1], np.ones((8, 3), "float32")
    before = [buffer.clone() for buffer in norm.buffers()]
    kmp.debug.locate_nonfinite(model, x, np.ones((8, 1)))
    snapshot = take_snapshot(model, 4)
    assert snapshot is not None
    fit(model, steps=2)
    assert not bool(ops.all(norm.running_var == before[1]))
    restore_snapshot(model, snapshot, 1.0)
    for buffer, value in zip(norm.buffers(), before, strict=True):
        np.testing.assert_array_equal(buffer.numpy(), value.numpy())


def odd_buffers():
    """Buffers that cannot be written, or not with what they were."""
    import torch

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 1)
            for name, x in {
                "cache": torch.zeros(1),
                "expanded": torch.ones(3).expand(4, 3),
                "learned": torch.ones(2, requires_grad=True),
                "sparse": torch.eye(2).to_sparse(),
                "float8": torch.zeros(2, dtype=torch.float8_e8m0fnu),
            }.items():
                self.register_buffer(name, x)
            with torch.inference_mode():
                self.register_buffer("inference", torch.ones(2))

        def forward(self, x):
            self.cache = torch.zeros(len(self.cache) + 1)
            return self.linear(x)

    return Odd()


@pytest.mark.only("torch")
def test_buffers_of_every_kind_train_on():
    model = keras.Sequential([keras.layers.TorchModuleWrapper(odd_buffers())])
    model.compile(kmp.scaled("sgd", learning_rate=0.1), "mse")
    with pytest.warns(kmp.PrecisionWarning, match="FORWARD-NAN"):
        watch = fit(model, steps=8, times=np.nan, of=3)
    assert watch.report.skipped_steps == 1
    assert take_snapshot(model, 8) is not None
    kmp.debug.locate_nonfinite(model, np.ones((8, 3), "float32"), np.ones((8, 1)))


@pytest.mark.only("torch")
def test_no_snapshot_is_taken_of_ruined_buffers():
    model = module_model()
    model.body.module[1].running_var.fill_(np.inf)
    assert take_snapshot(model, 0) is None
