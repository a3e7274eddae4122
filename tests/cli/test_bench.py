"""What `python -m kmp bench` measures, and the forms in which it says so."""

import dataclasses
import json
import math
import os
import urllib.parse

import keras
import numpy as np
import pytest
from command_line import command
from oracle import BACKEND
from test_summaries import tensorboard_server

import kmp
from kmp._backend import backend
from kmp.cli.bench import bench, bench_table, write_hparams
from kmp.cli.building import build_under

pytestmark = pytest.mark.slow

POLICIES = ["float32", "mixed_float16", "mixed_bfloat16"]


def build():
    """A regression; five samples, fewer than a batch."""
    hidden = keras.layers.Dense(8, activation="relu")
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(2)])
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    return model, x, x[:, :2]


@pytest.fixture(scope="module")
def said():
    return []


@pytest.fixture(scope="module")
def results(said):
    def progress(*what):
        said.append(what)

    return bench(build, POLICIES, batch_size=8, steps=2, rounds=2, progress=progress)


def test_each_policy_is_measured(results, said):
    assert [each.policy for each in results] == POLICIES
    assert {each.steps for each in results} == {1 + 3 * 2}  # the first, one warm round, two rounds
    for each in results:
        assert each.step_ms.low <= each.step_ms.median <= each.step_ms.high
        assert each.step_ms.low > 0 and each.first_step_s > 0
        assert each.skipped_steps == 0
    assert results[0].speedup == (1.0, 1.0, 1.0)
    texts, done, totals = zip(*said, strict=True)
    assert texts == (
        *(f"{name}: first step" for name in POLICIES),
        *("warming up", "round 1 of 2", "round 2 of 2"),
    )
    assert done == tuple(range(6)) and set(totals) == {6}


def test_the_outputs_are_compared_with_float32(results):
    """One rounding keeps 74 dB in float16 and 56 dB in bfloat16; here are a few of them."""
    full, half, brain = (each.output_sqnr for each in results)
    assert full == math.inf
    assert 50 < half < 80 and 30 < brain < 60 and brain < half


def test_all_take_the_same_steps(results):
    """From the same weights, over the same batches: the losses differ by rounding alone."""
    losses = [each.final_loss for each in results]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=0.05)
    model, x, y = build_under(build, "float32", seed=0)
    order = np.arange(16) % 5
    for steps in (1, 2, 2, 2):
        rows = order[: 8 * steps]
        history = model.fit(x[rows], y[rows], batch_size=8, shuffle=False, verbose=0)
    assert losses[0] == pytest.approx(history.history["loss"][-1], rel=1e-6)


@pytest.mark.only("jax")
def test_xla_counts_the_memory_of_the_step(results):
    """Weights and Adam's two slots, updated in place, and room for a gradient or two."""
    assert {each.memory.source for each in results} == {"XLA's analysis of the compiled step"}
    model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512)])
    model.compile("adam", "mse")
    x = np.zeros((1, 512), "float32")
    model.fit(x, x, verbose=0)
    weights = 4 * (512 * 512 + 512)
    assert 3 * weights < backend.planned_step(model, x, x).bytes < 5 * weights


@pytest.mark.only("tensorflow", "torch")
def test_memory_that_nobody_knows_is_not_made_up(results):
    if backend.platform() == "cpu":
        assert {each.memory for each in results} == {
            (None, "not available on this backend and device")
        }


def test_skipped_steps_are_counted():
    def overflowing():
        model, x, y = build()
        model.optimizer = kmp.scaled("adam", loss_scale=kmp.DynamicLossScale(2.0**24))
        return model, 1e4 * x, y

    full, half = bench(overflowing, POLICIES[:2], batch_size=4, steps=1, rounds=2)
    assert full.skipped_steps == 0 < half.skipped_steps <= half.steps


def test_the_table_has_the_numbers(results):
    header, *rows, memory = bench_table(results).splitlines()
    assert header.split()[:3] == ["policy", "step", "ms"]
    assert [row.split()[0] for row in rows] == POLICIES
    assert all("0 of 7" in row for row in rows)
    assert rows[0].count("-") == 1 + (results[0].memory.bytes is None)
    assert memory.startswith("Memory: ")


def test_tensorboard_compares_the_policies(results, tmp_path):
    """What the tab HParams asks a real TensorBoard for, without TensorFlow."""
    write_hparams(results, str(tmp_path), {"model": "mine", "batch_size": 8})
    statuses = [f"STATUS_{x}" for x in ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING")]
    request = json.dumps({"allowedStatuses": statuses, "sliceSize": 9})
    with tensorboard_server(tmp_path, "false") as get:
        groups = get(f"hparams/session_groups?request={urllib.parse.quote(request)}")
    found = {group["hparams"]["policy"]: group for group in groups["sessionGroups"]}
    assert sorted(found) == sorted(POLICIES)
    for each in results:
        group = found[each.policy]
        assert group["hparams"] == {"policy": each.policy, "model": "mine", "batch_size": 8}
        values = {x["name"]["tag"]: x.get("value", 0.0) for x in group["metricValues"]}
        assert values["bench/step_ms"] == pytest.approx(each.step_ms.median)
        assert values["bench/final_loss"] == pytest.approx(each.final_loss)
        assert values["bench/skipped_steps"] == 0
        assert ("bench/memory_mib" in values) == (each.memory.bytes is not None)
        assert ("bench/output_sqnr_db" in values) == (each.policy != "float32")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"policies": ["mixed_float16"]}, r"`policies` must be .* float32 among them"),
        ({"policies": ["float32", "float32"]}, "`policies` must be different"),
        ({"batch_size": 0}, r"`batch_size` must be .*at least 1\. Received: batch_size=0"),
        ({"steps": 1.5}, "`steps` must be a whole number"),
        ({"rounds": 1}, "`rounds` must be a whole number of at least 2"),
    ],
    ids=["no float32", "twice", "batch_size", "steps", "rounds"],
)
def test_a_wrong_argument_says_what_to_write(arguments, message):
    with pytest.raises(ValueError, match=message):
        bench(build, **{"policies": POLICIES, **arguments})


def uncompiled():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), None, None


def unbuilt():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model, np.ones((4, 4)), np.ones((4, 1))


def test_all_train_on_the_data_of_the_first_call():
    """A generator of the user's own draws other numbers in each call."""
    random = np.random.default_rng(0)

    def build_anew():
        x = random.normal(size=(5, 4)).astype("float32")
        return build()[0], x, x[:, :2]

    full, half = bench(build_anew, ["float32", "mixed_float16"], steps=1, rounds=2)
    assert half.output_sqnr > 50
    assert half.final_loss == pytest.approx(full.final_loss, rel=0.05)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: build()[0], "must return a tuple, a Keras model first.*Received: Sequential"),
        (lambda: (1, 2, 3), "must return a tuple, a Keras model first"),
        (lambda: build()[:2], r"must return \(model, x, y\)\. Received: a tuple of 2"),
        (uncompiled, r"must be compiled.*Call model\.compile"),
        (unbuilt, "must have weights.*Call it on a batch"),
        (lambda: (build()[0], np.ones((4, 4)), None), "`y` must hold arrays.*Received: NoneType"),
        (lambda: (build()[0], np.ones((0, 4)), np.ones((0, 2))), r"`x` must .* shape \(0, 4\)"),
        (lambda: (build()[0], iter([]), np.ones((4, 2))), "`x` must hold .* Received: list_it"),
    ],
    ids=[
        *("model alone", "no model", "no targets", "not compiled", "not built"),
        *("targets of None", "no samples", "no arrays"),
    ],
)
def test_a_function_that_returns_something_else_is_told(wrong, message):
    with pytest.raises(ValueError, match=message):
        bench(wrong, ["float32"])


@pytest.fixture
def measured(monkeypatch, results):
    """What the command asks for, in place of measuring once more."""
    calls = []

    def ask(*arguments, progress, **options):
        progress("round 2 of 2", 4, 5)
        calls.append((arguments, options))
        return results

    monkeypatch.setattr("kmp.cli.commands.bench", ask)
    return calls


def test_the_command_prints_where_it_measured(monkeypatch, capsys, measured):
    assert command(monkeypatch, "bench", "--model", "test_bench:build") == 0
    printed = capsys.readouterr()
    assert f"; {BACKEND}; XLA: " in printed.out and f"keras {keras.__version__}" in printed.out
    assert "test_bench:build, batches of 32, 10 interleaved rounds of 20 steps" in printed.out
    assert "mixed_bfloat16" in printed.out
    assert "bench test_bench:build: round 2 of 2 (4 of 5 done)" in printed.err
    (((function, policies), options),) = measured
    assert function is build and policies == POLICIES
    assert options == {"batch_size": 32, "steps": 20, "rounds": 10}


def test_the_command_writes_what_it_measured(monkeypatch, capsys, measured, tmp_path):
    options = ["--policies", "float32", "mixed_bfloat16", "--batch-size", "4", "--steps", "1"]
    options += ["--rounds", "2", "--json", "-", "--log-dir", str(tmp_path)]
    assert command(monkeypatch, "bench", "--model", "cnn", *options) == 0
    found = json.loads(capsys.readouterr().out)  # which holds nothing else
    counts = {"batch_size": 4, "steps": 1, "rounds": 2}
    assert found["settings"] == {"model": "cnn", **counts}
    assert found["environment"]["backend"] == BACKEND
    full, half, _ = found["results"]
    assert full["output_sqnr"] == "Infinity" and half["output_sqnr"] > 50
    assert set(half["step_ms"]) == set(half["speedup"]) == {"median", "low", "high"}
    assert set(half["memory"]) == {"bytes", "source"}
    (((_, policies), called),) = measured
    assert policies == ["float32", "mixed_bfloat16"] and called == counts
    assert sorted(os.listdir(tmp_path)) == sorted(POLICIES)


OUTPUTS = {"mlp": (10,), "cnn": (10,), "transformer": (64, 256)}


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_built_in_models(monkeypatch, capsys, measured, quick_weights, name):
    assert command(monkeypatch, "bench", "--model", name) == 0
    (((function, _), _),) = measured
    model, x, y = function()
    assert model.output_shape == (None, *OUTPUTS[name]) and len(x) == len(y)
    assert model.compiled


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "resnet"], "my_package.train:build"),
        (["--model", "no_such_module:build"], "No module named"),
        (["--policies", "mixed_float8"], "float8"),
        (["--steps", "0"], "a whole number of at least 1"),
        (["--rounds", "1"], "a whole number of at least 2"),
    ],
    ids=["model", "module", "policy", "steps", "rounds"],
)
def test_a_wrong_option_is_answered_at_once(monkeypatch, capsys, arguments, message):
    assert command(monkeypatch, "bench", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--json", "nowhere/numbers.json"], "expected a file that can be written"),
        (["--json", "."], "expected a file that can be written"),
        (["--log-dir", "taken"], "expected a directory that can be written to"),
    ],
    ids=["no folder", "a folder", "a file"],
)
def test_where_to_write_is_tried_before_measuring(
    monkeypatch, capsys, tmp_path, measured, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    assert command(monkeypatch, "bench", *arguments) == 2
    assert message in capsys.readouterr().err
    assert measured == []


def test_a_file_that_is_there_stays_until_there_are_numbers(monkeypatch, tmp_path, measured):
    (tmp_path / "old.json").write_text("old")
    for name in ("old.json", "new.json"):
        assert command(monkeypatch, "bench", "--json", str(tmp_path / name), "--steps", "0") == 2
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    "x, y, message",
    [
        ([0.0, math.nan], [1.0, 1.0], "x holds 1 numbers that are not finite: clean the data"),
        ([0.0, 1.0], [math.inf, math.nan], "y holds 2 numbers that are not finite: clean"),
        ([1e30, 1e30], [1.0, 1.0], "x and y are finite: look at the loss"),
    ],
)
def test_a_loss_of_float32_that_is_not_finite_ends_it(monkeypatch, capsys, x, y, message):
    def broken():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model, *(np.array(data, "float32")[:, None] for data in (x, y))

    monkeypatch.setattr("kmp.cli.commands.load", lambda name: broken)
    counts = ["--batch-size", "1", "--steps", "2", "--rounds", "2", "--model", "mine:broken"]
    assert command(monkeypatch, "bench", *counts) == 2
    said = capsys.readouterr()
    assert "bench: error: The loss in float32 must be finite. Received: " in said.err
    assert message in said.err and said.out == ""


@pytest.mark.parametrize(
    "change, what",
    [({"final_loss": math.nan}, "final loss"), ({"outputs_finite": False}, "outputs before")],
)
def test_a_half_precision_that_is_not_finite_is_said(
    monkeypatch, capsys, results, measured, change, what
):
    full, half, brain = results
    bad = [full, dataclasses.replace(half, **change), brain]
    monkeypatch.setattr("kmp.cli.commands.bench", lambda *arguments, **options: bad)
    assert command(monkeypatch, "bench") == 1
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"NOT FINITE: mixed_float16, {what}")
    assert "NOT FINITE" not in bench_table(results)
    assert command(monkeypatch, "bench", "--json", "-") == 1
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["finite"] for row in rows] == [True, False, True]


def test_outputs_that_overflow_are_noticed():
    def large():
        model, x, y = build()
        return model, 1e6 * x, y

    full, half = bench(large, POLICIES[:2], batch_size=4, steps=1, rounds=2)
    assert full.outputs_finite and not half.outputs_finite and not half.finite


def test_ctrl_c_is_no_traceback(monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("kmp.cli.commands.bench", interrupted)
    assert command(monkeypatch, "bench") == 130


def test_an_error_of_the_users_own_code_keeps_its_traceback(monkeypatch):
    def broken():
        raise ValueError("mine")

    monkeypatch.setattr("kmp.cli.commands.load", lambda name: broken)
    with pytest.raises(ValueError, match="mine"):
        command(monkeypatch, "bench", "--model", "mine:broken")
