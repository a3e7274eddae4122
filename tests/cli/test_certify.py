"""Which trainings are called equivalent, and by what evidence."""

import dataclasses
import json
import math
import sys

import keras
import numpy as np
import pytest
from command_line import command

from kmp.cli.certify import PolicyRuns, _difference, certify
from kmp.cli.equivalence import equivalence
from kmp.cli.options import CERTIFY_POLICIES
from kmp.cli.tasks import TASKS, Task

pytestmark = pytest.mark.slow


def line(seed):
    """Points near a line, in batches that are drawn, through a layer with dropout.

    The loss is small, which its learning rate makes up for: gradients of 6e-9 a sample, which
    float16 rounds to zero unless they are scaled.
    """
    random = np.random.default_rng(seed)
    x = random.normal(size=(200, 4)).astype("float32")
    y = (x[:, :1] + random.normal(0, 0.1, (200, 1))).astype("float32")
    hidden = [keras.layers.Dense(8, activation="relu")]
    model = keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(5e4, momentum=0.9)
    model.compile(optimizer, loss=lambda y, p: 1e-7 * keras.ops.square(y - p), metrics=["mae"])
    return model, (x[:100], y[:100]), (x[100:], y[100:])


LINE = Task("line", line, "mae", 0.02, relative=True, epochs=2, batch_size=32, seeds=2)


@pytest.fixture(scope="module")
def certificate():
    return certify(LINE, ["float32", "mixed_float16", "float16"])


def test_float32_equals_itself_bit_for_bit(certificate):
    """Same weights, same batches, same dropout: else the differences would not be the policy's."""
    full, again, half, _ = certificate.runs
    assert full.metrics == again.metrics
    assert (again.result.mean, again.result.p_value) == (0.0, 0.0) and again.result.equivalent
    assert len(set(full.metrics)) == 2  # the seeds differ
    assert half.metrics != full.metrics


def test_what_a_conversion_draws_changes_no_batch(monkeypatch):
    def convert(model, policy):
        next(draws)

    draws = (keras.utils.set_random_seed(i) for i in (17, 4, 99, 5))
    monkeypatch.setattr("kmp.cli.building.to_mixed_precision", convert)
    full, again = certify(LINE, ["float32"]).runs
    assert full.metrics == again.metrics


def test_the_differences_are_paired_by_seed_and_relative(certificate):
    full, _, half, _ = certificate.runs
    differences = [(a - b) / b for a, b in zip(half.metrics, full.metrics, strict=True)]
    assert half.result == equivalence(differences, 0.02)
    assert full.result is None


@pytest.mark.parametrize("own, expected", [(0.0, 0.0), (1e-3, math.inf)])
def test_a_metric_of_zero_has_relative_differences_too(own, expected):
    assert _difference(own, 0.0, relative=True) == expected


def test_the_costs_are_there(certificate):
    for each in certificate.runs:
        assert each.steps == 2 * 2 * 4  # seeds, epochs, and 100 samples in batches of 32
        assert each.step_ms.median > 0 and each.skipped_steps == 0
    assert certificate.runs[0].speedup == (1.0, 1.0, 1.0)


def test_the_metric_is_that_of_the_held_out_data(certificate):
    """By hand: the seeds and batches as a reader of the docstring would set them."""
    keras.utils.set_random_seed(0)
    model, (x, y), (x_test, y_test) = line(0)
    keras.utils.set_random_seed(0)
    model.fit(x, y, batch_size=32, epochs=2, verbose=0)
    error = np.abs(model.predict(x_test, verbose=0) - y_test).mean()
    assert certificate.runs[0].metrics[0] == pytest.approx(error, rel=1e-5)


def test_scaling_is_what_makes_the_difference(certificate):
    _, _, mixed, pure = certificate.runs
    assert mixed.counts and mixed.result.equivalent
    assert not pure.counts and not pure.result.equivalent
    assert certificate.equivalent


def test_a_counter_example_does_not_spoil_the_certificate(certificate):
    full, _, half, _ = certificate.runs
    bad = dataclasses.replace(
        half, result=equivalence([math.nan, 0.0], 0.02), metrics=(math.nan, 0.0)
    )
    pure = dataclasses.replace(bad, policy="float16", counts=False)
    assert dataclasses.replace(certificate, runs=(full, full, pure)).equivalent
    assert not dataclasses.replace(certificate, runs=(full, bad)).equivalent
    text = str(dataclasses.replace(certificate, runs=(full, bad, pure)))
    assert "no (counter-example)" in text and "not finite in 1 of 2" in text


def test_the_table_states_margin_and_seeds(certificate):
    title, header, *rows, memory = str(certificate).splitlines()
    assert title == "line: mae, 2 seeds, margin 2.00% of float32's, 2 epochs in batches of 32"
    assert "difference [90% interval]" in header
    assert [row.split()[0] for row in rows] == ["float32", "float32", "mixed_float16", "float16"]
    assert "+0.00% [+0.00%, +0.00%]" in rows[1] and "yes" in rows[1]
    assert memory.startswith("Memory: ")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"metric": "accuracy"}, r"`metric` must be one of .*\['loss', 'mae'\].*'accuracy'"),
        ({"build": lambda seed: line(seed)[:2]}, r"must return \(model, \(x, y\), \(x_test"),
        ({"build": lambda seed: (line(seed)[0], 1, 2)}, r"must return \(model, \(x, y\)"),
    ],
    ids=["metric", "two", "arrays"],
)
def test_a_wrong_task_says_what_to_write(changes, message):
    with pytest.raises(ValueError, match=message):
        certify(dataclasses.replace(LINE, epochs=1, **changes), [])


@pytest.fixture
def certified(monkeypatch, certificate):
    """What the command asks for, in place of training once more."""
    calls = []

    def ask(task, policies, progress, ledger):
        progress("seed 1 of 2", 0, 8)
        calls.append((task, policies))
        return dataclasses.replace(certificate, task=task)

    monkeypatch.setattr("kmp.cli.commands.certify", ask)
    return calls


OWN = ["--task", "test_certify:line", "--epochs", "3", "--batch-size", "16"]


def test_the_command_certifies_a_model_of_the_users(monkeypatch, capsys, certified):
    options = ["--metric", "mae", "--margin", "1%", "--seeds", "7"]
    command(monkeypatch, "certify", *OWN, *options)
    ((task, policies),) = certified
    assert task == Task("test_certify:line", line, "mae", 0.01, True, 3, 16, seeds=7)
    assert policies == list(CERTIFY_POLICIES)
    printed = capsys.readouterr()
    assert "test_certify:line: mae, 7 seeds, margin 1.00% of float32's" in printed.out
    assert "seed 1 of 2" in printed.err


@pytest.mark.parametrize("equivalent", [True, False])
def test_the_exit_status_and_the_json(monkeypatch, capsys, certificate, tmp_path, equivalent):
    result = equivalence([0.0, 0.0] if equivalent else [0.5, math.inf], 0.02)
    full, again, half, pure = certificate.runs
    runs = (full, again, dataclasses.replace(half, result=result), pure)
    answer = dataclasses.replace(certificate, runs=runs)
    monkeypatch.setattr("kmp.cli.commands.certify", lambda *arguments: answer)
    path = tmp_path / "certificate.json"
    arguments = [*OWN, "--margin", "0.01", "--json", str(path)]
    assert command(monkeypatch, "certify", *arguments) == (0 if equivalent else 1)
    found = json.loads(path.read_text())
    assert found["equivalent"] is equivalent
    assert set(found) == {"environment", "tasks", "equivalent"}
    (task,) = found["tasks"]
    names = {"name", "metric", "margin", "relative", "epochs", "batch_size", "seeds"}
    assert set(task) == names | {"runs", "equivalent"}
    full, _, half, _ = task["runs"]
    assert set(half) == {field.name for field in dataclasses.fields(PolicyRuns)}
    assert full["result"] is None and half["result"]["equivalent"] is equivalent
    assert "difference" in capsys.readouterr().out


def test_all_means_all(monkeypatch, capsys, certified):
    command(monkeypatch, "certify", "--all", "--policies", "mixed_bfloat16")
    assert [task for task, _ in certified] == list(TASKS.values())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "one of the arguments --task --all is required"),
        (["--task", "no_such_task"], "my_package.train:build"),
        (OWN, "needs --margin, --epochs and --batch-size"),
        ([*OWN, "--margin", "0"], "a positive number, or a percentage"),
        ([*OWN, "--margin", "wide"], "a positive number, or a percentage"),
        (["--task", "digits", "--seeds", "1"], "a whole number of at least 2"),
    ],
    ids=["nothing", "task", "no margin", "margin 0", "margin", "seeds"],
)
def test_a_wrong_option_is_answered_before_training(monkeypatch, capsys, arguments, message):
    assert command(monkeypatch, "certify", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_a_built_in_task_builds(task, quick_weights):
    """Real data in two parts that share no sample, and a model that takes them."""
    model, (x, y), (x_test, y_test) = task.build(0)
    assert len(x) == len(y) and len(x_test) == len(y_test)
    assert min(len(x), len(x_test)) >= 200
    rows = {each.tobytes() for each in x_test}
    shared = sum(each.tobytes() in rows for each in x)
    assert shared <= 0.02 * len(x)  # text repeats itself
    assert model.input_shape == (None, *x.shape[1:]) and model.compiled
    again = task.build(0)[1][0]
    np.testing.assert_array_equal(x, again)
    assert not np.array_equal(x, task.build(1)[1][0])
    steps = -(-len(x) // task.batch_size) * task.epochs
    assert model.optimizer._learning_rate.decay_steps == steps
    assert task.seeds >= 5


def test_the_text_needs_no_module_that_a_machine_may_lack(monkeypatch):
    monkeypatch.setitem(sys.modules, "tkinter", None)  # turtle cannot be imported without it
    monkeypatch.delitem(sys.modules, "turtle", raising=False)
    _, (x, y), _ = TASKS["text"].build(0)
    assert x.shape == y.shape == (1536, 32) and len(np.unique(x)) > 60


def test_a_missing_scikit_learn_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'kmp\[examples\]'"):
        TASKS["digits"].build(0)


class Interrupted:
    """A function that builds, whose user presses Ctrl-C at one of its calls."""

    def __init__(self, at):
        self.calls, self.at = 0, at

    def __call__(self, seed):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return line(seed)


SHORT = ["--task", "mine:line", "--metric", "mae", "--margin", "2%", "--epochs", "1"]
SHORT += ["--batch-size", "50", "--seeds", "2", "--policies", "mixed_bfloat16"]


def certified_json(monkeypatch, capsys, build, *options):
    """What `certify` finds out for `build`, and how it ends; times left out."""
    monkeypatch.setattr("kmp.cli.commands.load", lambda name: build)
    status = command(monkeypatch, "certify", *SHORT, "--json", "-", *options)
    said = capsys.readouterr()
    if status == 130:
        return said.err
    (task,) = json.loads(said.out)["tasks"]
    return [{k: run[k] for k in ("policy", "metrics", "steps", "result")} for run in task["runs"]]


def test_an_interrupted_certify_goes_on(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    whole = Interrupted(at=None)
    expected = certified_json(monkeypatch, capsys, whole)
    assert whole.calls == 4 and list(tmp_path.iterdir()) == []
    said = certified_json(monkeypatch, capsys, Interrupted(at=3))
    name = "certify-interrupted-1.jsonl"
    assert f"2 finished trainings are in {name}. The same command with --resume {name}" in said
    said = certified_json(monkeypatch, capsys, Interrupted(at=2), "--resume", name)
    assert f"2 finished trainings are in {name}. They are not repeated" in said  # one more is kept
    rest = Interrupted(at=None)
    assert certified_json(monkeypatch, capsys, rest, "--resume", name) == expected
    assert rest.calls == 1
    again = Interrupted(at=1)
    assert certified_json(monkeypatch, capsys, again, "--resume", name) == expected
    assert again.calls == 0


def test_an_interruption_overwrites_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "certify-interrupted-1.jsonl").write_text("of yesterday")
    said = certified_json(monkeypatch, capsys, Interrupted(at=2))
    assert "1 finished trainings are in certify-interrupted-2.jsonl" in said
    assert (tmp_path / "certify-interrupted-1.jsonl").read_text() == "of yesterday"


def test_nothing_is_kept_of_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "finished" not in certified_json(monkeypatch, capsys, Interrupted(at=1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--json", "--resume"])
def test_where_to_write_is_tried_before_training(monkeypatch, capsys, certified, option):
    arguments = [*OWN, "--margin", "0.01", option, "nowhere/file"]
    assert command(monkeypatch, "certify", *arguments) == 2
    assert "expected a file that can be written" in capsys.readouterr().err
    assert certified == []


def test_float32_that_is_not_finite_certifies_nothing(certificate):
    full, _, _, pure = certificate.runs
    lost = dataclasses.replace(full, metrics=(0.1, math.nan))
    answer = dataclasses.replace(certificate, runs=(lost, pure))  # a counter-example alone
    assert not answer.equivalent
    assert str(answer).splitlines()[-1].startswith("NOT FINITE: float32 itself.")
    assert "NOT FINITE" not in str(certificate)


def test_a_missing_scipy_is_found_before_training(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    build = Interrupted(at=None)
    with pytest.raises(ModuleNotFoundError, match="SciPy"):
        certify(dataclasses.replace(LINE, build=build), [])
    assert build.calls == 0
