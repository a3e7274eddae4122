"""GradientHealth: reads exactly what happened, at true steps, and changes nothing."""

import copy
import csv
import pickle
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import ops
from oracle import few
from tensorboard.backend.event_processing import event_file_loader

import kmp
from kmp.callbacks.verdict import observation
from kmp.health.report import read_report

SPE = [1] if BACKEND == "torch" else [1, 4]


def linear_model(optimizer=None, **compile_arguments):
    """y = x w + b from zeros: gradients of the mse are whole numbers for whole inputs."""
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros", name="dense")]
    )
    optimizer = optimizer or kmp.scaled("sgd", learning_rate=2.0**-6)
    model.compile(optimizer, loss="mse", **compile_arguments)
    return model


def data(steps=12, batch=4, poisoned=()):
    random = np.random.default_rng(1)
    x = random.integers(-3, 4, (steps * batch, 2)).astype("float32")
    y = (x @ np.float32([[1.0], [-2.0]])).astype("float32")
    for step in poisoned:
        x[step * batch] = np.inf
    return x, y


def fit(model, callbacks, poisoned=(), epochs=1, steps=12, **arguments):
    x, y = data(steps=steps, poisoned=poisoned)
    arguments = {"verbose": 0, "shuffle": False, "batch_size": 4, **arguments}
    return model.fit(x, y, epochs=epochs, callbacks=callbacks, **arguments).history


def scalars(directory):
    """{tag: [(step, value), ...]} of all event files, read with tensorboard's own loader."""
    found = {}
    for path in sorted(directory.glob("events*")):
        for event in event_file_loader.EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    number = value.tensor.float_val[0]
                    found.setdefault(value.tag, []).append((event.step, number))
    return found


def test_the_report_is_what_numpy_computes():
    model = linear_model()
    watch = kmp.callbacks.GradientHealth()
    x, y = data(steps=1)
    x[:, 1] = 0
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[watch])
    # d mse / dw = 2/n x^T (x w - y) at w = 0
    gradient = 2 / 4 * x.T @ -y
    bias = 2 / 4 * -y.sum()
    report = watch.report
    kernel, offset = report.paths
    assert report.step == 1 and report.skipped_steps == 0 and report.loss_scale == 2.0**15
    assert report.column("l2_norm") == {kernel: abs(gradient[0, 0]), offset: abs(bias)}
    assert report.column("max_abs") == {kernel: abs(gradient[0, 0]), offset: abs(bias)}
    assert report.column("zero_share") == {kernel: 0.5, offset: float(bias == 0)}
    assert report.column("nonfinite") == {kernel: 0, offset: 0}


@pytest.mark.filterwarnings("ignore:Step")
@pytest.mark.parametrize("spe", few(SPE, SPE[-1]))
def test_logs_reach_history_and_csv(tmp_path, spe):
    logger = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    model = linear_model(steps_per_execution=spe)
    watch = kmp.callbacks.GradientHealth(logs=["headroom_bits"])
    history = fit(model, [watch, logger], poisoned=[1, 2, 7], epochs=2)
    assert history["skipped_steps"] == [3, 6]
    assert history["loss_scale"] == [2.0**15, 2.0**15]  # the loss was not finite: not its fault
    assert history["grad_norm"][-1] < history["grad_norm"][0]
    assert np.isfinite(history["headroom_bits"]).all()
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["skipped_steps"]) for row in rows] == [3, 6]


@pytest.mark.filterwarnings("ignore:Step")
@pytest.mark.parametrize("spe", few(SPE, SPE[-1]))
@pytest.mark.parametrize(
    "update_freq, expected", [(4, [4, 8, 12, 16, 20, 24]), (8, [8, 12, 16, 24])]
)
def test_steps_in_tensorboard_are_true_training_steps(tmp_path, spe, update_freq, expected):
    watch = kmp.callbacks.GradientHealth(log_dir=tmp_path, update_freq=update_freq)
    model = linear_model(steps_per_execution=spe)
    fit(model, [watch], poisoned=[5], epochs=2)
    found = scalars(tmp_path)
    assert [step for step, _ in found["mixed_precision/skipped_steps"]] == expected
    by_step = dict(found["mixed_precision/skipped_steps"])
    assert by_step[8] == 1 and by_step[24] == 2
    assert dict(found["mixed_precision/loss_scale"])[24] == 2.0**15
    assert dict(found["mixed_precision/loss_scale_log2"])[24] == 15
    for path in watch.report.paths:
        assert dict(found[f"variable_overflow_steps/{path}"])[24] == 2
        norm = watch.report.column("l2_norm")[path]
        assert dict(found[f"variable_grad_norm/{path}"])[24] == np.float32(norm)


@pytest.mark.parametrize("epochs, sampled", [(1, 1), (2, 24)])
def test_details_are_known_where_the_length_of_an_epoch_is_not(epochs, sampled):
    class Watch(kmp.callbacks.GradientHealth):
        def set_params(self, params):
            super().set_params({**params, "steps": None})  # as with a generator

    model = linear_model()
    history = fit(model, [Watch(logs="all")], epochs=epochs)
    assert np.isfinite(history["lost_share"]).all()
    assert ops.convert_to_numpy(model.optimizer.telemetry.sampling)[3] == sampled


def test_a_second_fit_goes_on_counting(tmp_path):
    watch = kmp.callbacks.GradientHealth(log_dir=tmp_path, update_freq=5)
    model = linear_model()
    fit(model, [watch])
    fit(model, [watch])
    steps = [step for step, _ in scalars(tmp_path)["grad/global_norm"]]
    assert steps == [5, 10, 12, 15, 20, 24]


@pytest.mark.filterwarnings("ignore:Step")
def test_another_model_is_judged_by_itself():
    watch = kmp.callbacks.GradientHealth(update_freq=5)
    fit(linear_model(), [watch])
    assert watch.verdict.state == "HEALTHY"
    for steps in (12, 7):
        with pytest.warns(UserWarning, match="FORWARD-NAN"):
            fit(linear_model(), [watch], poisoned=range(steps), steps=steps)
        assert (watch.report.step, watch.report.skipped_steps) == (steps, steps)


@pytest.mark.filterwarnings("ignore:Step")
def test_a_fit_that_was_not_watched_is_not_judged():
    watch, model = kmp.callbacks.GradientHealth(), linear_model()
    fit(model, [watch])
    fit(model, [], poisoned=[3])
    fit(model, [watch])
    assert watch.verdict.state == "HEALTHY"


@pytest.mark.filterwarnings("ignore:Step")
def test_a_run_that_was_put_back_to_its_start_is_judged_anew(tmp_path):
    """As in cross-validation: the second fit ends at the step that the first did."""
    watch, model = kmp.callbacks.GradientHealth(update_freq=5), linear_model()
    model.optimizer.build(model.trainable_variables)
    model.save_weights(tmp_path / "start.weights.h5")
    fit(model, [watch])
    assert watch.verdict.state == "HEALTHY"
    model.load_weights(tmp_path / "start.weights.h5")
    with pytest.warns(UserWarning, match="FORWARD-NAN"):
        fit(model, [watch], poisoned=[1, 11])
    assert watch.verdict.state == "FORWARD-NAN" and watch.report.skipped_steps == 2


@pytest.mark.filterwarnings("ignore:Step .*(FORWARD-NAN|UNSTABLE)")
def test_overflow_is_warned_of_once_by_name_with_its_count():
    rule = kmp.DynamicLossScale(2.0**120, max_scale=2.0**126)
    model = linear_model(kmp.scaled("sgd", rule, learning_rate=2.0**-6))
    x, y = data()
    y[[4, 8, 36]] = 1e7  # the loss stays finite, 2**120 times its gradient does not
    with pytest.warns(
        kmp.PrecisionWarning, match=r"Step 4: gradient overflow.*dense/kernel \(2 of 4 st"
    ) as w:
        watch = kmp.callbacks.GradientHealth(update_freq=4)
        model.fit(x, y, epochs=2, batch_size=4, shuffle=False, verbose=0, callbacks=[watch])
    assert len([x for x in w if "gradient overflow" in str(x.message)]) == 1


def test_of_a_loss_that_is_not_finite_the_verdict_alone_warns():
    with pytest.warns(kmp.PrecisionWarning) as w:
        fit(linear_model(), [kmp.callbacks.GradientHealth(update_freq=4)], poisoned=[1, 2, 9])
    said = [str(x.message) for x in w if x.category is kmp.PrecisionWarning]
    assert len(said) == 1 and "FORWARD-NAN" in said[0]


@pytest.mark.filterwarnings("ignore:Step .*(FORWARD-NAN|UNSTABLE)")
@pytest.mark.parametrize(
    "factor, message",
    [(1e-12, "gradient norm below 1e-07 in .*dense/kernel"), (1e9, "norm above 10000 in .*kernel")],
)
def test_vanishing_and_exploding_gradients_are_named(factor, message):
    model = linear_model(kmp.scaled("sgd", learning_rate=0.0, loss_scale=1.0))
    x, y = data()
    with pytest.warns(UserWarning, match=message):
        watch = kmp.callbacks.GradientHealth(update_freq=4)
        model.fit(x, y, sample_weight=np.full(len(x), factor), verbose=0, callbacks=[watch])


def test_a_batch_without_any_gradient_is_no_alarm(recwarn):
    """Weights of samples that are zero, or a hinge loss that is satisfied."""
    watch, (x, y) = kmp.callbacks.GradientHealth(update_freq=4), data()
    linear_model().fit(x, y, sample_weight=np.zeros(len(x)), verbose=0, callbacks=[watch])
    assert not [w for w in recwarn if "gradient norm" in str(w.message)]


# Keras's JAX trainer refuses any optimizer whose variables were frozen after its build.
@pytest.mark.parametrize("what", ["unused", "frozen"] if BACKEND != "jax" else ["unused"])
def test_a_variable_without_gradient_is_not_called_vanishing(what):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.other = keras.layers.Dense(1), keras.layers.Dense(1)

        def build(self, shape):
            self.used.build(shape)
            self.other.build(shape)

        def call(self, x):
            return self.used(x)

    model = Model()
    model.build((None, 2))
    model.compile(kmp.scaled("sgd"), loss="mse")
    model.optimizer.build(model.trainable_variables)
    if what == "frozen":
        model.other.trainable = False
        fit(model, [kmp.callbacks.GradientHealth()])
    elif BACKEND == "jax":  # an unused variable has a gradient there: zero
        with pytest.warns(UserWarning, match="below"):
            fit(model, [kmp.callbacks.GradientHealth()])
    else:
        with pytest.warns(UserWarning) as caught:
            fit(model, [kmp.callbacks.GradientHealth()])
        assert not any("gradient norm" in str(w.message) for w in caught)


def test_float16_layers_without_scaling_are_named():
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, dtype="mixed_float16", name="half")]
    )
    model.compile(kmp.scaled("sgd", loss_scale="none"), loss="mse")
    with pytest.warns(UserWarning, match=r"float16 without loss scaling in \S*half \(.*\): grad"):
        fit(model, [kmp.callbacks.GradientHealth()])


@pytest.mark.parametrize(
    "optimizer, message",
    [
        (keras.optimizers.SGD, r"Write model.compile\(optimizer=kmp.scaled\(SGD"),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            r"with LossScaleOptimizer. Write model.compile\(optimizer=kmp.scaled\(SGD",
        ),
        (
            lambda: keras.optimizers.LossScaleOptimizer(kmp.scaled("sgd")),
            "It wraps kmp's optimizer.*compile with its `inner_optimizer` alone",
        ),
        (
            lambda: kmp.LossScaleOptimizer(keras.optimizers.SGD(), measure_gradients=False),
            "measure_gradients=False",
        ),
    ],
    ids=["bare", "wrapped", "around", "silent"],
)
def test_an_optimizer_that_does_not_measure_is_refused_before_training(optimizer, message):
    model = linear_model(optimizer())
    with pytest.raises(ValueError, match=message):
        fit(model, [kmp.callbacks.GradientHealth()])
    np.testing.assert_array_equal(model.get_weights()[0], 0)


def test_the_advice_on_an_optimizer_around_kmps():
    around = keras.optimizers.LossScaleOptimizer(kmp.scaled("sgd", learning_rate=0.1))
    model = linear_model(around)
    with pytest.warns(kmp.PrecisionWarning, match="wraps this one, compile with this one alone"):
        fit(model, [])
    model.compile(around.inner_optimizer, loss="mse")
    watch = kmp.callbacks.GradientHealth()
    fit(model, [watch])
    assert watch.verdict.state == "HEALTHY"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"update_freq": 0}, "update_freq"),
        ({"update_freq": 2.5}, "update_freq"),
        ({"update_freq": True}, "update_freq"),
        ({"limits": 1e4}, "limits"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=f"`{message}`.* must"):
        kmp.callbacks.GradientHealth(**arguments)


def test_each_look_is_one_transfer(monkeypatch):
    model = linear_model()
    fit(model, [])
    transfers = []

    def convert(x):
        transfers.append(x)
        return np.asarray(x)

    monkeypatch.setattr(ops, "convert_to_numpy", convert)
    assert read_report(model.optimizer, model).step == 12
    assert len(transfers) == 1


def test_a_look_walks_through_the_model_once(monkeypatch):
    walks, model = [], linear_model()
    watch = kmp.callbacks.GradientHealth()
    fit(model, [watch])
    monkeypatch.setattr(observation, "layers_of", lambda x: walks.append(1) or x.layers)
    watch.report = None
    watch.on_train_batch_begin(0)
    watch.on_epoch_end(0, {"loss": 1.0})
    assert walks == [1]


def test_counters_travel_exactly():
    """A step beyond float32's whole numbers, and a scale that is no whole number."""
    model = linear_model(kmp.scaled("sgd", kmp.DynamicLossScale(0.3, min_scale=0.1)))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.steps.assign(2**24 + 1)
    report = read_report(model.optimizer, model)
    assert report.step == 2**24 + 1 and report.loss_scale == np.float32(0.3)


def test_asynchronous_dispatch_stays_on():
    # Keras turns it off for every callback of `fit` when one of them overrides this method.
    overridden = kmp.callbacks.GradientHealth.on_train_batch_end
    assert overridden is keras.callbacks.Callback.on_train_batch_end


@pytest.mark.parametrize("jit", few([False, True] if BACKEND != "torch" else [False], False))
def test_watching_changes_no_weight(jit):
    weights = []
    for callbacks in ([], [kmp.callbacks.GradientHealth(update_freq=1)]):
        model = linear_model(jit_compile=jit)
        fit(model, callbacks, epochs=2)
        weights.append(model.get_weights())
    for plain, watched in zip(*weights, strict=True):
        np.testing.assert_array_equal(plain, watched)


@pytest.mark.filterwarnings("ignore:Step")
@pytest.mark.parametrize("spe", few(SPE, SPE[-1]))
def test_the_reported_loss_is_the_mean_of_the_finite_steps(spe):
    """Keras reports NaN for the epoch, and its TerminateOnNaN stops a run that lost nothing."""
    stop = keras.callbacks.TerminateOnNaN()
    model = linear_model(steps_per_execution=spe)
    watch = kmp.callbacks.GradientHealth()
    history = fit(model, [watch, stop], poisoned=[5], epochs=2)
    assert len(history["loss"]) == 2 and np.isfinite(history["loss"]).all()
    clean = linear_model(kmp.scaled("sgd", learning_rate=2.0**-6))
    x, y = data()
    keep = np.r_[0:20, 24:48]  # without the poisoned batch
    expected = clean.fit(x[keep], y[keep], batch_size=4, epochs=2, shuffle=False, verbose=0).history
    # Sums of the same 11 numbers in float32, in the same order.
    np.testing.assert_array_equal(history["loss"], expected["loss"])


@pytest.mark.filterwarnings("ignore:Step")
def test_keras_still_reports_nan_for_one_skipped_step():
    stop = keras.callbacks.TerminateOnNaN()
    history = fit(linear_model(), [stop], poisoned=[5], epochs=2)
    assert np.isnan(history["loss"]).all() and len(history["loss"]) == 1


@pytest.mark.filterwarnings("ignore:Step")
def test_a_dead_epoch_is_still_reported_as_nan():
    history = fit(linear_model(), [kmp.callbacks.GradientHealth()], poisoned=range(12))
    assert np.isnan(history["loss"]).all() and history["skipped_steps"] == [12]


@pytest.mark.filterwarnings("ignore:Step")
def test_a_nan_in_validation_is_not_hidden():
    model = linear_model()
    history = fit(
        model, [kmp.callbacks.GradientHealth()], poisoned=[3], validation_data=data(poisoned=[2])
    )
    assert np.isfinite(history["loss"]).all() and np.isnan(history["val_loss"]).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Step")
def test_recompiling_saving_and_loading_go_on_working(tmp_path):
    model = linear_model()
    watch = kmp.callbacks.GradientHealth()
    fit(model, [watch], poisoned=[3])
    model.compile(model.optimizer, loss="mse")
    history = fit(model, [watch], poisoned=[3])
    assert np.isfinite(history["loss"]).all() and history["skipped_steps"] == [2]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    history = fit(loaded, [kmp.callbacks.GradientHealth()], poisoned=[3])
    assert np.isfinite(history["loss"]).all() and history["skipped_steps"] == [3]
    for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
        assert a.shape == b.shape


WITHOUT_TENSORFLOW = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tensorflow":
            raise ModuleNotFoundError(f"refused: {name}", name=name)

sys.meta_path.insert(0, Refuse())
import keras, numpy as np, kmp
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(kmp.scaled("sgd"), loss="mse")
watch = kmp.callbacks.GradientHealth(log_dir=sys.argv[1], update_freq=1)
model.fit(np.ones((8, 2)), np.zeros((8, 1)), batch_size=2, verbose=0, callbacks=[watch])
assert "tensorflow" not in sys.modules
print(watch.report.step)
"""


@pytest.mark.only("jax")
def test_tensorboard_events_are_written_without_tensorflow(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_TENSORFLOW), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip().endswith("4"), done.stderr
    assert [step for step, _ in scalars(tmp_path)["grad/global_norm"]] == [1, 2, 3, 4]


def test_custom_loops_read_the_same(backend):
    """Outside fit the variables themselves are read."""
    model = linear_model()
    model.optimizer.build(model.trainable_variables)
    assert read_report(model.optimizer, model).step == 0
    np.testing.assert_array_equal(ops.convert_to_numpy(model.optimizer.gradient_health), 0)


@pytest.mark.filterwarnings("ignore:Step")
@pytest.mark.parametrize("cause", ["forward", "backward"])
@pytest.mark.parametrize("jit", few([False, True] if BACKEND != "torch" else [False], False))
@pytest.mark.parametrize(
    "layer",
    few(
        [keras.layers.BatchNormalization, kmp.layers.Float32BatchNormalization],
        keras.layers.BatchNormalization,
    ),
)
def test_a_skipped_step_leaves_moving_statistics_alone(layer, jit, cause):
    """Also where the batch itself was finite and only the scaled gradients overflowed."""
    model = keras.Sequential([keras.Input((2,)), layer(), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd", learning_rate=2.0**-6), loss="mse", jit_compile=jit)
    watch = kmp.callbacks.GradientHealth()
    fit(model, [watch], steps=2)
    before = [ops.convert_to_numpy(v) for v in model.variables]
    x, y = data(steps=1)
    y = np.full_like(y, 1e36) if cause == "backward" else y  # times the scale: beyond float32
    x = x if cause == "backward" else x * np.nan
    model.fit(x, y, batch_size=4, callbacks=[watch], verbose=0)
    assert watch.report.skipped_steps == 1
    for old, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, ops.convert_to_numpy(variable), err_msg=variable.path)
    fit(model, [watch], steps=1)
    assert any(
        (a != ops.convert_to_numpy(v)).any() for a, v in zip(before, model.variables, strict=True)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The state of")  # of an optimizer that is copied unbuilt
@pytest.mark.parametrize("make", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_watch_as_the_original_does(make, tmp_path):
    """Tools copy callbacks: tuners deeply, and those that start processes by pickles."""
    x, y = data()
    health = kmp.callbacks.GradientHealth(log_dir=tmp_path)
    for _ in range(2):  # new, then used
        health, model = make(health), linear_model()
        model.fit(x, y, callbacks=[health], verbose=0)
        assert health.report.step == int(model.optimizer.iterations) and health.verdict
        assert health._run.optimizer is model.optimizer
