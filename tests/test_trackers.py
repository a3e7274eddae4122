"""docs/trackers.md: each of its blocks, run with the tracker itself, where that is installed."""

import csv
import json
import pathlib
import re
import struct
import types

import keras
import numpy as np
import pytest

import kmp

pytestmark = pytest.mark.usefixtures("quick_weights")

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "trackers.md").read_text()
PATH = "sequential/dense/kernel"
STEPS = [4, 8]  # the looks: two epochs of four steps


def code_of(section):
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


class Model:
    """A model that is named the same in each test, and whose `fit` takes callbacks of the test."""

    def __init__(self, *callbacks):
        layers = [keras.Input((2,)), keras.layers.Dense(1, name="dense")]
        self.model = keras.Sequential(layers, name="sequential")
        self.model.compile(kmp.scaled("sgd", learning_rate=0.1), "mse")
        self.callbacks = callbacks

    def fit(self, x, y, callbacks, **arguments):
        arguments |= {"batch_size": 4, "verbose": 0}
        return self.model.fit(x, y, callbacks=[*self.callbacks, *callbacks], **arguments)


def run(section, model, block=0, **names):
    """Run a block of the page beside what its reader has; all names that there are then."""
    x = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")
    namespace = {"keras": keras, "kmp": kmp, "model": model, "x": x, "y": x[:, :1], **names}
    exec(compile(code_of(section)[block], "trackers.md", "exec"), namespace)
    return types.SimpleNamespace(**namespace)


# Weights & Biases


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    module = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield module
    module.teardown()


def offline_records(folder):
    """What wandb would upload, from its file: a log of LevelDB's, of messages of protobuf's."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # which waits until the file is whole
    (path,) = folder.rglob("*.wandb")
    data, place, message = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:  # no room for a header in this block
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        message += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole message, or the last part of one
            yield Record.FromString(message)
            message = b""


def rows(folder):
    """The history that W&B draws."""
    items = [list(x.history.item) for x in offline_records(folder) if x.HasField("history")]
    return [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row}
        for row in items
    ]


def test_wandb_has_the_looks_the_table_and_the_map(wandb, tmp_path):
    found = run("Weights & Biases", Model())
    looks = [row for row in rows(tmp_path) if f"variable_grad_norm/{PATH}" in row]
    assert [row["step"] for row in looks] == STEPS
    expected = found.health.report.column("l2_norm")[PATH]
    assert looks[-1][f"variable_grad_norm/{PATH}"] == expected
    assert looks[-1]["verdict"] == 0
    (table,) = [row for row in rows(tmp_path) if "gradients._type" in row]
    assert table["gradients._type"] == "table-file" and table["gradients.nrows"] == 2
    (image,) = [row for row in rows(tmp_path) if "gradient_map._type" in row]
    assert image["gradient_map._type"] == "image-file" and table["step"] == STEPS[-1]
    # Other metrics, too, are drawn over the steps.
    (metric,) = [x.metric for x in offline_records(tmp_path) if x.HasField("metric")]
    assert (metric.glob_name, metric.step_metric) == ("*", "step")


def test_wandbs_own_callback_logs_beside_it(wandb, tmp_path):
    own = pytest.importorskip("wandb.integration.keras", exc_type=ImportError)  # needs TensorFlow
    wandb.init(project="digits")  # as its constructor asks for
    run("Weights & Biases", Model(own.WandbMetricsLogger()))
    found = rows(tmp_path)
    epochs = [row for row in found if "epoch/loss" in row]
    assert [row["epoch/verdict"] for row in epochs] == [0, 0]
    assert [row["step"] for row in found if "loss_scale" in row] == STEPS


def test_epochs_are_logged_without_wandbs_own_callback(wandb, tmp_path):
    own = wandb.init(project="digits")
    model = Model(run("Weights & Biases", None, block=1, run=own).epochs)
    run("Weights & Biases", model)
    epochs = [row for row in rows(tmp_path) if "epoch/loss" in row]
    assert [row["epoch/verdict"] for row in epochs] == [0, 0]
    assert [row["epoch/skipped_steps"] for row in epochs] == [0, 0]


# MLflow


@pytest.fixture(params=["folder", "database"])
def mlflow(request, tmp_path, monkeypatch):
    module = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    if request.param == "database":
        pytest.importorskip("sqlalchemy")
    where = {"folder": (tmp_path / "runs").as_uri(), "database": f"sqlite:///{tmp_path}/runs.db"}
    module.set_tracking_uri(where[request.param])
    return module


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_mlflow_has_the_looks_the_table_and_the_map(mlflow, tmp_path):
    own = pytest.importorskip("mlflow.keras")
    pytest.importorskip("pandas")
    found = run("MLflow", Model(own.MlflowCallback()))
    client = mlflow.MlflowClient()
    (last,) = client.search_runs(["0"])
    history = client.get_metric_history(last.info.run_id, f"variable_grad_norm/{PATH}")
    assert [x.step for x in history] == STEPS
    assert history[-1].value == found.health.report.column("l2_norm")[PATH]
    assert last.data.metrics["verdict"] == 0
    table = mlflow.load_table("gradients.json", [last.info.run_id])
    assert list(table["variable"]) == list(found.health.report.paths)
    assert "gradient_map.png" in [x.path for x in client.list_artifacts(last.info.run_id)]


# Aim


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_aim_has_the_looks_the_text_and_the_map(tmp_path, monkeypatch):
    aim = pytest.importorskip("aim")
    monkeypatch.chdir(tmp_path)
    found = run("Aim", Model())
    again, context = aim.Run(found.run.hash), aim.storage.context.Context({})
    norms = again.get_metric(f"variable_grad_norm/{PATH}", context).dataframe()
    assert sorted(norms["step"]) == STEPS
    assert found.health.report.column("l2_norm")[PATH] in list(norms["value"])
    assert again.get_metric("verdict", context).values.sparse_numpy()[1].tolist() == [0, 0]
    assert again.get_image_sequence("gradient_map", context).values.sparse_list()[0] == STEPS[-1:]
    texts = again.get_text_sequence("gradients", context).values.sparse_list()[1]
    assert PATH in texts[0].data
    again.close()


# CSV


def table(path):
    return list(csv.DictReader(pathlib.Path(path).read_text().splitlines()))


def test_csv_has_the_looks_and_the_epochs(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    found = run("CSV and pandas", Model())
    looks = table("looks.csv")
    assert [int(row["step"]) for row in looks] == STEPS
    assert [row["verdict"] for row in looks] == ["0.0", "0.0"]
    assert float(looks[-1][f"variable_grad_norm/{PATH}"]) == pytest.approx(
        found.health.report.column("l2_norm")[PATH], rel=1e-6
    )
    epochs = table("epochs.csv")
    assert [row["verdict"] for row in epochs] == ["HEALTHY", "HEALTHY"]
    gradients = table("gradients.csv")
    assert [row["variable"] for row in gradients] == list(found.health.report.paths)
