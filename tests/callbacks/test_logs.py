"""What `GradientHealth` tells a user while `fit` runs: logs, reports, and lines on the screen."""

import csv
import json
import math
import pickle
import re

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.util.tensor_util import make_ndarray

import kmp
from kmp.callbacks import DivergenceGuard, GradientHealth, TerminateOnNaN
from kmp.callbacks.curves.outlets import ALWAYS, MORE, flat
from kmp.callbacks.verdict.states import STATES, Grade

pytestmark = pytest.mark.filterwarnings("ignore:Step")


def linear_model(optimizer=None):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")])
    model.compile(optimizer or kmp.scaled("sgd", learning_rate=2.0**-6), loss="mse")
    return model


def fit(callbacks, poisoned=(), epochs=1, steps=12, **arguments):
    x = np.random.default_rng(1).normal(size=(4 * steps, 2)).astype("float32")
    x[[4 * step for step in poisoned]] = np.inf
    y = np.ones((4 * steps, 1), "float32")
    arguments = {"verbose": 0, "shuffle": False, "batch_size": 4, **arguments}
    return linear_model().fit(x, y, epochs=epochs, callbacks=callbacks, **arguments).history


# Which keys


@pytest.mark.parametrize(
    "logs, more",
    [((), ()), (["lost_share"], ("lost_share",)), ({"verdict"}, ()), ("all", MORE)],
    ids=str,
)
def test_the_logs_have_four_keys_and_those_asked_for(logs, more):
    history = fit([GradientHealth(logs=logs)])
    assert set(history) == {"loss", *ALWAYS, *more}
    assert all(math.isfinite(numbers[-1]) for numbers in history.values())


@pytest.mark.quick
def test_the_norm_of_a_skipped_step_is_not_the_smallest():
    """What is finite of its gradients has norm 0."""
    history = fit([GradientHealth(logs=["headroom_bits"])], poisoned=[11], epochs=2)
    assert history["skipped_steps"] == [1, 2]
    assert history["grad_norm"] == [math.inf] * 2 and history["headroom_bits"] == [-math.inf] * 2


def test_two_watches_keep_their_keys_apart():
    history = fit([GradientHealth(prefix="a_"), GradientHealth(prefix="b_", logs=["lost_share"])])
    expected = {f"{prefix}_{name}" for prefix in "ab" for name in ALWAYS}
    assert set(history) == {"loss", *expected, "b_lost_share"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"logs": ["loss_scales"]}, r"`logs` .* must be \"all\" or a list .*'loss_scales'.*Write"),
        (
            {"logs": "lost_share"},
            r"`logs` .*Received: logs='lost_share'. Write .*\['headroom_bits'",
        ),
        ({"logs": 3}, "`logs` .* must"),
        ({"on_report": {}}, r"`on_report` .* must be a function .*\(of type dict\). Write"),
        ({"verbose": 2}, "`verbose` .* must be 0 or 1. Received: verbose=2. Write verbose=1"),
        ({"verbose": "yes"}, "`verbose` .* must be 0 or 1"),
        ({"update_freq": "batches"}, r"`update_freq` .*\"epoch\", \"batch\" or a whole number"),
    ],
    ids=str,
)
def test_bad_arguments_say_what_to_write(arguments, message):
    with pytest.raises(ValueError, match=message):
        GradientHealth(**arguments)


# The order of callbacks


class Keep(keras.callbacks.Callback):
    """Keeps the logs as they are when it is called."""

    def on_epoch_end(self, epoch, logs=None):
        self.seen = dict(logs)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("make", [GradientHealth, DivergenceGuard, TerminateOnNaN])
def test_a_callback_sees_the_keys_wherever_it_stands(tmp_path, make, place):
    keep, logger = Keep(), keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    lists = {
        "first": [make(), keep, logger],
        "last": [keep, logger, make()],
    }
    fit(lists[place], poisoned=[5])
    assert keep.seen["skipped_steps"] == 1
    with open(tmp_path / "log.csv") as file:
        (row,) = csv.DictReader(file)
    assert float(row["skipped_steps"]) == 1
    if make is GradientHealth:
        assert set(ALWAYS) <= set(keep.seen) and row["verdict"] == "FORWARD-NAN"


def test_callbacks_that_steer_can_stand_before_it():
    stop = keras.callbacks.EarlyStopping(monitor="skipped_steps", mode="min", patience=1)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss_scale", mode="min", patience=1)
    history = fit([stop, plateau, GradientHealth()], epochs=4)
    assert len(history["loss"]) == 2  # Keras warns, and goes on, where the key is missing


def test_each_callback_is_called_once():
    class Count(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.calls = []

        def on_train_begin(self, logs=None):
            self.calls.append("train")

        def on_epoch_end(self, epoch, logs=None):
            self.calls.append(epoch)

    counts = [Count() for _ in range(4)]
    callbacks = [counts[0], GradientHealth(), counts[1], TerminateOnNaN(), *counts[2:]]
    fit(callbacks, epochs=2)
    assert [count.calls for count in counts] == [["train", 0, 1]] * 4
    assert callbacks[0] is counts[0]  # the user's own list stays as it is


def test_it_can_be_called_by_somebody_else_than_keras():
    class Wrapper(keras.callbacks.Callback):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def set_model(self, model):
            self.inner.set_model(model)

        def on_train_begin(self, logs=None):
            self.inner.on_train_begin(logs)

        def on_epoch_begin(self, epoch, logs=None):
            self.inner.on_epoch_begin(epoch, logs)

        def on_epoch_end(self, epoch, logs=None):
            self.inner.on_epoch_end(epoch, logs)

        def on_train_end(self, logs=None):
            self.inner.on_train_end(logs)

    assert fit([Wrapper(GradientHealth())])["loss_scale"] == [2.0**15]


# The verdict as a word


def test_a_grade_is_a_number_that_prints_as_its_state():
    for code, state in enumerate(STATES):
        grade = Grade(code)
        assert str(grade) == repr(grade) == f"{grade / 1:.4e}" == state
        assert grade == code == float(grade) and grade == state and grade != "other"
        assert hash(grade) == hash(code) and json.dumps([grade]) == f"[{float(code)}]"
        copy = pickle.loads(pickle.dumps(grade))
        assert isinstance(copy, Grade) and copy == grade
    assert (grade / 2, abs(grade), np.asarray([grade]).dtype) == (3.0, 6.0, "float64")
    assert Grade(1) < Grade(2) and Grade(1) != Grade(2)


@pytest.mark.parametrize("verbose", [1, 2])
def test_history_and_the_progress_bar_show_the_word(capsys, verbose):
    history = fit([GradientHealth()], poisoned=range(12), verbose=verbose)
    assert str(history["verdict"]) == "[FORWARD-NAN]" and history["verdict"] == [6]
    line = capsys.readouterr().out.splitlines()[-1]
    old = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 12)  # takes a mean before
    assert f"verdict: {'6.0000' if old else 'FORWARD-NAN'}" in line
    assert "lost_share" not in line


# When it looks


@pytest.mark.parametrize(
    "update_freq, steps",
    [("epoch", [6, 12]), ("batch", [*range(1, 13)]), (4, [4, 6, 8, 12]), (100, [6, 12])],
)
def test_update_freq_takes_what_keras_takes(update_freq, steps):
    seen = []
    watch = GradientHealth(update_freq=update_freq, on_report=lambda x: seen.append(x["step"]))
    history = fit([watch], epochs=2, steps=6)
    assert seen == steps and watch.update_freq == update_freq
    assert len(history["verdict"]) == 2


# What it reports


def test_on_report_gets_plain_numbers_that_add_up():
    seen = []
    history = fit([GradientHealth(on_report=seen.append, update_freq=5)], poisoned=[2])
    assert [x["step"] for x in seen] == [5, 10, 12]
    for found in seen:
        assert {type(value) for value in found.values()} <= {int, float, Grade}
        paths = [name for name in found if name.startswith("variable_grad_norm/")]
        assert len(paths) == 2 and any(path.endswith("dense/kernel") for path in paths)
        total = math.hypot(*(found[path] for path in paths))
        assert found["grad_norm"] == pytest.approx(total, rel=1e-6)
        assert found["verdict"] == "FORWARD-NAN"
        assert sum(name.startswith("variable_overflow_steps/") for name in found) == 2
    assert {name: seen[-1][name] for name in ALWAYS} == {k: history[k][-1] for k in ALWAYS}
    assert seen[-1]["skipped_steps"] == 1 and seen[-1]["update_ratio"] < 0
    json.dumps(seen)


def test_a_report_leaves_out_what_was_not_measured():
    def report(step):
        matrix = np.float32([[1, 1, 1, 0, 1]])
        return kmp.GradientReport(("a",), matrix, 1024.0, step, 0, 0)

    found = flat(report(3), kmp.callbacks.Verdict("HEALTHY"), math.nan)
    assert set(found) & {"update_ratio", "lost_share", "degraded_share"} == set()
    assert found["grad_norm"] == 1.0 and found["variable_overflow_steps/a"] == 1.0


def test_a_report_has_its_variables_as_a_table():
    watch = GradientHealth()
    fit([watch])
    table, report = watch.report.columns(), watch.report
    assert table["variable"] == list(report.paths)
    for name in ("l2_norm", "zero_share", "overflow_steps"):
        assert table[name] == list(report.column(name).values())
    assert table["update_ratio"] == list(report.update_ratio.values())
    bare = kmp.GradientReport(("a",), np.ones((1, 5), "float32"), 1024.0, 3, 0, 0)
    assert bare.columns()["lost_share"] == bare.columns()["update_ratio"] == [None]


def test_an_error_in_on_report_is_not_hidden():
    def fail(report):
        raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network"):
        fit([GradientHealth(on_report=fail)])


# What it prints


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [0, 1, True])
def test_verbose_prints_the_verdict_when_it_changes(capsys, verbose):
    x, y = np.ones((8, 2)), np.ones((8, 1))
    model, watch = linear_model(), GradientHealth(verbose=verbose)
    for target in (y, y, np.full_like(y, np.nan), y):
        model.fit(x, target, batch_size=4, verbose=0, callbacks=[watch])
    said = re.findall(r"^Epoch 1: ([\w-]+)", capsys.readouterr().out, re.MULTILINE)
    assert said == (["HEALTHY", "FORWARD-NAN", "HEALTHY"] if verbose else [])


# TensorBoard's runs


def scalars(directory):
    events = EventAccumulator(str(directory), size_guidance={"tensors": 0}).Reload()
    return {
        tag: [(e.step, float(make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
        if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"
    }


class Late(keras.callbacks.Callback):
    """Puts a number of its own into the logs, and something that is none."""

    def on_epoch_end(self, epoch, logs=None):
        logs.update(f1=0.25 * epoch, note="fine")


def run_both(tmp_path, kmp_dir, keras_dir, **arguments):
    x = np.random.default_rng(1).normal(size=(16, 2)).astype("float32")
    callbacks = [GradientHealth(log_dir=tmp_path / kmp_dir)]
    callbacks.append(keras.callbacks.TensorBoard(tmp_path / keras_dir, write_graph=False))
    rate = keras.optimizers.schedules.ExponentialDecay(0.5, 4, 0.5)
    model = linear_model(kmp.scaled("sgd", learning_rate=rate))
    return model.fit(
        x, x[:, :1], epochs=3, batch_size=4, verbose=0, callbacks=callbacks, **arguments
    )


@pytest.mark.only("tensorflow")
def test_the_curves_are_those_of_keras(tmp_path):
    x = np.ones((4, 2), "float32")
    run_both(tmp_path, "ours", "theirs", validation_data=(x, x[:, :1]))
    for run in ("train", "validation"):
        theirs, ours = (scalars(tmp_path / who / run) for who in ("theirs", "ours"))
        assert ours == {k: v for k, v in theirs.items() if not k.startswith("evaluation_")}
        assert "epoch_loss" in ours and ("epoch_loss_scale" in ours) == (run == "train")


@pytest.mark.only("tensorflow")
def test_epochs_are_written_once_where_keras_writes_them_too(tmp_path):
    run_both(tmp_path, "logs", "logs")
    names = [path.name for path in (tmp_path / "logs" / "train").iterdir()]
    assert names and not any(name.endswith(".kmp") for name in names)
    assert [step for step, _ in scalars(tmp_path / "logs" / "train")["epoch_loss"]] == [0, 1, 2]
    assert scalars(tmp_path / "logs")["mixed_precision/loss_scale"]


def test_every_number_of_the_logs_has_a_curve(tmp_path):
    x = np.ones((8, 2), "float32")
    model = linear_model()
    late = Late()
    history = model.fit(
        x,
        x[:, :1],
        epochs=2,
        verbose=0,
        validation_split=0.5,
        initial_epoch=0,
        callbacks=[late, GradientHealth(log_dir=tmp_path, logs="all")],
    ).history
    train, validation = scalars(tmp_path / "train"), scalars(tmp_path / "validation")
    assert set(validation) == {"epoch_loss"}
    assert set(train) == {
        *(f"epoch_{name}" for name in ("loss", "f1", "learning_rate", *ALWAYS, *MORE))
    }
    for name in ("loss", "f1", "grad_norm"):
        expected = [(i, np.float32(value)) for i, value in enumerate(history[name])]
        assert train[f"epoch_{name}"] == expected
    assert train["epoch_learning_rate"] == [(0, 2.0**-6), (1, 2.0**-6)]
    assert history["note"] == ["fine", "fine"]


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="of newer Keras alone")
def test_each_part_of_an_optimizer_has_its_learning_rate(tmp_path):
    one, two = (keras.optimizers.SGD(rate, name=f"of_{rate}") for rate in (0.5, 0.25))
    parts = keras.optimizers.OptimizerMap(one, {"kernel": two})
    model = linear_model(kmp.scaled(keras.optimizers.MultiOptimizer(parts)))
    watch = GradientHealth(log_dir=tmp_path)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[watch])
    train = scalars(tmp_path / "train")
    assert train["epoch_learning_rate_of_0.5"] == [(0, 0.5)]
    assert train["epoch_learning_rate_of_0.25"] == [(0, 0.25)]
    assert "epoch_learning_rate" not in train


@pytest.mark.parametrize(
    "optimizer, expected",
    [
        (
            lambda: kmp.scaled("adam", learning_rate=1e-3),
            {"optimizer": "Adam", "learning_rate": 0.001, "loss_scale": "DynamicLossScale()"},
        ),
        (
            lambda: kmp.scaled(
                "sgd",
                kmp.StaticLossScale(128.0),
                learning_rate=keras.optimizers.schedules.CosineDecay(0.1, 10),
            ),
            {
                "optimizer": "SGD",
                "learning_rate": "CosineDecay",
                "loss_scale": "StaticLossScale(value=128.0)",
            },
        ),
    ],
)
def test_the_run_says_what_sets_it_apart(tmp_path, optimizer, expected):
    model = linear_model(optimizer())
    model.fit(
        np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[GradientHealth(log_dir=tmp_path)]
    )
    events = EventAccumulator(str(tmp_path)).Reload()
    content = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    found = metadata.parse_session_start_info_plugin_data(content).hparams
    assert {k: v.string_value or v.number_value for k, v in found.items()} == {
        "policy": "float32",
        **expected,
    }
