import contextlib
import doctest
import importlib.util
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.compat.tensorflow_stub import errors
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar_metadata
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.scalar import metadata as scalar_metadata
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.util import tensor_util

import kmp.summaries
from kmp.summaries import SummaryWriter

pytestmark = pytest.mark.any_backend

LAYOUT = {
    "Mixed precision": {"loss scale": ["loss_scale$", "suggested_scale"], "steps": [r"skipped.*"]},
    "Gradient health": {"norms": ["norm/.*"]},
}


def read_events(path):
    """TensorBoard's own reader for machines without TensorFlow; it verifies every checksum."""
    reader = PyRecordReader_New(str(path))
    while True:
        try:
            reader.GetNext()
        except errors.OutOfRangeError:
            return
        yield event_pb2.Event.FromString(reader.record())


def read_values(directory):
    """`[(step, tag, metadata, array)]`, in the order of writing."""
    return [
        (event.step, value.tag, value.metadata, tensor_util.make_ndarray(value.tensor))
        for path in sorted(directory.iterdir())
        for event in read_events(path)
        for value in event.summary.value
    ]


def read_one(directory):
    ((step, tag, metadata, array),) = read_values(directory)
    return step, tag, metadata, array


def test_file_starts_with_its_version_and_author(tmp_path):
    SummaryWriter(tmp_path).close()
    (path,) = tmp_path.iterdir()
    (first,) = read_events(path)
    assert re.fullmatch(r"events\.out\.tfevents\.\d{10}\..+\.\d+\.\d+\.kmp", path.name)
    assert first.file_version == "brain.Event:2"
    assert first.source_metadata.writer == "kmp.summaries"
    for seconds in (first.wall_time, int(path.name.split(".")[3])):
        assert abs(seconds - time.time()) < 60


@pytest.mark.parametrize(
    "value",
    [
        0.1,
        -0.0,
        7,
        2.0**24 + 1,
        1e-45,
        1e39,
        -math.inf,
        math.nan,
        np.float16(0.1),
        np.float32(1 / 3),
        np.float64(1 / 3),
        np.int32(-5),
        np.uint8(200),
    ],
    ids=repr,
)
def test_scalar_is_the_nearest_float32(tmp_path, value):
    with SummaryWriter(tmp_path) as writer:
        writer.scalar("group/value", value, np.int64(12))
    step, tag, _, array = read_one(tmp_path)
    with np.errstate(over="ignore"):
        expected = np.float64(value).astype("float32")
    assert (step, tag, array.dtype, array.shape) == (12, "group/value", "float32", ())
    assert array.tobytes() == expected.tobytes()  # bits: NaN, the sign of zero


@pytest.mark.parametrize("step", [0, 2**40, 2**63 - 1, np.int32(3)])
def test_step_is_kept(tmp_path, step):
    with SummaryWriter(tmp_path) as writer:
        writer.scalar("loss", 1.0, step)
    assert read_one(tmp_path)[0] == step


def test_scalars_share_one_record(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        writer.scalars({"b": 1.0, "a": 2}, step=3)
    (path,) = tmp_path.iterdir()
    _, event = read_events(path)
    assert [v.tag for v in event.summary.value] == ["b", "a"]
    assert [(s, t, float(x)) for s, t, _, x in read_values(tmp_path)] == [(3, "b", 1), (3, "a", 2)]


def test_scalars_write_all_or_nothing(tmp_path):
    with SummaryWriter(tmp_path) as writer, pytest.raises(TypeError):
        writer.scalars({"good": 1.0, "bad": "1.0"}, step=3)
    assert read_values(tmp_path) == []


def test_text_is_kept(tmp_path):
    markdown = "| variable | max_abs |\n|---|---|\n| größe | `6.5e4` |"
    with SummaryWriter(tmp_path) as writer:
        writer.text("report", markdown, step=5)
    step, tag, _, array = read_one(tmp_path)
    assert (step, tag, array.item().decode()) == (5, "report", markdown)


def test_histogram_is_rows_of_left_edge_right_edge_count(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        writer.histogram("exponents", np.array([4, 0, 1 / 3]), [-24, -14, 0.1, 16], step=6)
    step, tag, _, array = read_one(tmp_path)
    assert (step, tag, array.dtype) == (6, "exponents", "float64")
    np.testing.assert_array_equal(array, [[-24, -14, 4], [-14, 0.1, 0], [0.1, 16, 1 / 3]])


def test_layout_is_kept_at_step_0(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        writer.custom_scalars_layout(LAYOUT)
    step, tag, _, array = read_one(tmp_path)
    layout = layout_pb2.Layout.FromString(array.item())
    assert (step, tag) == (0, custom_scalar_metadata.CONFIG_SUMMARY_TAG)
    assert {
        category.title: {chart.title: list(chart.multiline.tag) for chart in category.chart}
        for category in layout.category
    } == LAYOUT


@pytest.mark.parametrize(
    "write, plugin, data_class",
    [
        (lambda w: w.scalar("t", 1.0, 0), scalar_metadata, summary_pb2.DATA_CLASS_SCALAR),
        (lambda w: w.text("t", "x", 0), text_metadata, summary_pb2.DATA_CLASS_TENSOR),
        (
            lambda w: w.histogram("t", [1], [0, 1], 0),
            histogram_metadata,
            summary_pb2.DATA_CLASS_TENSOR,
        ),
        (
            lambda w: w.custom_scalars_layout(LAYOUT),
            custom_scalar_metadata,
            summary_pb2.DATA_CLASS_TENSOR,
        ),
    ],
    ids=["scalar", "text", "histogram", "layout"],
)
def test_metadata_is_what_the_plugin_makes(tmp_path, write, plugin, data_class):
    with SummaryWriter(tmp_path) as writer:
        write(writer)
    if plugin is custom_scalar_metadata:
        expected = plugin.create_summary_metadata()
    else:
        expected = plugin.create_summary_metadata(display_name="", description="")
    expected.data_class = data_class
    assert read_one(tmp_path)[2] == expected


def test_missing_directories_are_made(tmp_path):
    SummaryWriter(str(tmp_path / "logs" / "run")).close()
    assert len(list((tmp_path / "logs" / "run").iterdir())) == 1


def test_two_writers_in_one_directory_have_a_file_each(tmp_path):
    with SummaryWriter(tmp_path) as one, SummaryWriter(tmp_path) as two:
        one.scalar("one", 1.0, 0)
        two.scalar("two", 2.0, 0)
        one.scalar("one", 3.0, 1)
    files = [
        [(e.step, v.tag) for e in read_events(path) for v in e.summary.value]
        for path in tmp_path.iterdir()
    ]
    assert sorted(files) == [[(0, "one"), (1, "one")], [(0, "two")]]


def test_an_existing_file_is_never_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1.5e9)
    monkeypatch.setattr(kmp.summaries, "_file_number", iter([0, 0]))
    SummaryWriter(tmp_path).close()
    with pytest.raises(FileExistsError):
        SummaryWriter(tmp_path)


def test_resumed_run_adds_to_the_steps(tmp_path):
    for start in (0, 3):
        with SummaryWriter(tmp_path) as writer:
            for step in range(start, start + 3):
                writer.scalar("loss", float(step), step)
    assert [(s, float(x)) for s, _, _, x in read_values(tmp_path)] == [(s, s) for s in range(6)]


def test_flush_puts_on_disk(tmp_path):
    writer = SummaryWriter(tmp_path)
    (path,) = tmp_path.iterdir()
    assert len(list(read_events(path))) == 1  # TensorBoard sees the run at once
    writer.scalar("loss", 1.0, 0)
    writer.flush()
    assert len(list(read_events(path))) == 2
    writer.scalar("loss", 1.0, 1)
    writer.close()
    assert len(list(read_events(path))) == 3


def test_an_error_in_the_block_loses_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="diverged"), SummaryWriter(tmp_path) as writer:
        writer.scalar("loss", math.inf, 7)
        raise RuntimeError("diverged")
    assert read_one(tmp_path)[0] == 7


def test_threads_do_not_mix_records(tmp_path):
    def write(tag):
        for step in range(500):
            writer.scalar(tag, step, step)

    with SummaryWriter(tmp_path) as writer:
        threads = [threading.Thread(target=write, args=(f"tag_{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    values = read_values(tmp_path)
    for i in range(4):
        assert [s for s, tag, _, _ in values if tag == f"tag_{i}"] == list(range(500))


def test_close_twice_is_fine(tmp_path):
    writer = SummaryWriter(tmp_path)
    writer.close()
    writer.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda w: w.scalar("t", 1.0, 0),
        lambda w: w.scalars({}, 0),
        lambda w: w.text("t", "x", 0),
        lambda w: w.histogram("t", [1], [0, 1], 0),
        lambda w: w.custom_scalars_layout(LAYOUT),
        lambda w: w.hparams({"policy": "float32"}),
        lambda w: w.flush(),
    ],
    ids=["scalar", "scalars", "text", "histogram", "layout", "hparams", "flush"],
)
def test_closed_writer_says_so(tmp_path, call):
    writer = SummaryWriter(tmp_path)
    writer.close()
    with pytest.raises(ValueError, match=r"must be open.*after close\(\).*new SummaryWriter"):
        call(writer)


@pytest.mark.parametrize(
    "log_dir, error, message",
    [
        (None, TypeError, "`log_dir` must be a path. Received: None (of type NoneType). Write"),
        (b"logs", TypeError, "`log_dir` must be a path. Received: b'logs' (of type bytes). Write"),
        (3, TypeError, "`log_dir` must be a path. Received: 3 (of type int). Write"),
        ("", ValueError, "local file system. Received: '' (of type str). Write log_dir="),
        ("gs://bucket/run", ValueError, "local file system. Received: 'gs://bucket/run'"),
    ],
    ids=repr,
)
def test_wrong_log_dir(tmp_path, monkeypatch, log_dir, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=re.escape(message)):
        SummaryWriter(log_dir)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_log_dir(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(ValueError, match=r"must be a directory.*Received: .*taken"):
        SummaryWriter(tmp_path / "taken")


WRONG_CALLS = {
    "value-str": (
        lambda w: w.scalar("loss", "0.5", 0),
        TypeError,
        "value of 'loss' must be one Python or numpy number. Received: '0.5' (of type str). "
        "Write float(value).",
    ),
    "value-list": (lambda w: w.scalar("loss", [0.5], 0), TypeError, "Received: [0.5] (of type"),
    "value-array": (lambda w: w.scalar("loss", np.ones(2), 0), TypeError, "(of type ndarray)"),
    "value-complex": (lambda w: w.scalar("loss", 1j, 0), TypeError, "(of type complex)"),
    "value-none": (lambda w: w.scalar("loss", None, 0), TypeError, "(of type NoneType)"),
    "mapping": (lambda w: w.scalars([1.0], 0), TypeError, "`mapping` must be a dict"),
    "tag-surrogate": (
        lambda w: w.scalar("\udcff", 1.0, 0),
        ValueError,
        "`tag` must be Unicode ('utf-8' codec can't encode character",
    ),
    "text-surrogate": (
        lambda w: w.text("report", "\udcff", 0),
        ValueError,
        "`markdown` must be Unicode ('utf-8' codec can't encode character",
    ),
    "step-large": (
        lambda w: w.scalar("loss", 1.0, 2**63),
        ValueError,
        "counted from 0, and below 2**63. Received: 9223372036854775808",
    ),
    "tag-type": (lambda w: w.scalar(3, 1.0, 0), TypeError, "`tag` must be a str and not empty"),
    "tag-empty": (lambda w: w.text("", "x", 0), TypeError, "Received: '' (of type str). Write"),
    "step-negative": (
        lambda w: w.scalar("loss", 1.0, -1),
        ValueError,
        "`step` must be a training step, counted from 0, and below 2**63. "
        "Received: -1 (of type int). Write step=0",
    ),
    "step-float": (
        lambda w: w.text("t", "x", 1.0),
        TypeError,
        "`step` must be an int, the training step. Received: 1.0 (of type float). Write step=int(",
    ),
    "step-bool": (lambda w: w.scalar("loss", 1.0, True), TypeError, "(of type bool)"),
    "step-none": (lambda w: w.scalar("loss", 1.0, None), TypeError, "(of type NoneType)"),
    "text": (lambda w: w.text("t", b"x", 0), TypeError, "`markdown` must be a str. Received: b'x'"),
    "bins": (
        lambda w: w.histogram("h", [1, 2], [0, 1], 0),
        ValueError,
        "`edges` must have one entry more than `counts`, which must not be empty. "
        "Received: ([1, 2], [0, 1])",
    ),
    "bins-empty": (lambda w: w.histogram("h", [], [0], 0), ValueError, "must not be empty"),
    "bins-2d": (lambda w: w.histogram("h", [[1, 2]], [0, 1, 2], 0), ValueError, "one entry more"),
    "edges-fall": (lambda w: w.histogram("h", [1], [1, 0], 0), ValueError, "finite and increase"),
    "edges-equal": (lambda w: w.histogram("h", [1], [1, 1], 0), ValueError, "finite and increase"),
    "edges-inf": (
        lambda w: w.histogram("h", [1], [0, math.inf], 0),
        ValueError,
        "`edges` must be finite and increase. Received: [0, inf] (of type list). Write counts=",
    ),
    "counts-negative": (lambda w: w.histogram("h", [-1], [0, 1], 0), ValueError, "not negative"),
    "counts-inf": (lambda w: w.histogram("h", [math.inf], [0, 1], 0), ValueError, "`counts` must"),
    "counts-nan": (lambda w: w.histogram("h", [math.nan], [0, 1], 0), ValueError, "`counts` must"),
    "hparams": (
        lambda w: w.hparams({"policy": None}),
        TypeError,
        "value of 'policy' must be a str, a bool or one number. Received: None (of type NoneType).",
    ),
    "layout": (
        lambda w: w.custom_scalars_layout(["loss"]),
        TypeError,
        "`layout` must be {category: {chart title: [regular expressions]}}. Received: ['loss'] "
        "(of type list). Write {",
    ),
    "layout-flat": (
        lambda w: w.custom_scalars_layout({"norms": ["norm"]}),
        TypeError,
        "Received: ['norm'] (of type list). Write {",
    ),
    "layout-str": (
        lambda w: w.custom_scalars_layout({"Health": {"norms": "norm"}}),
        TypeError,
        "Received: 'norm' (of type str). Write {",
    ),
    "layout-regex": (
        lambda w: w.custom_scalars_layout({"Health": {"norms": ["norm("]}}),
        ValueError,
        "`layout` must hold regular expressions (missing ), unterminated subpattern at position "
        "4). Received: 'norm(' (of type str). Write re.escape(tag) for a literal tag.",
    ),
}


@pytest.mark.parametrize("call, error, message", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_wrong_call_says_what_to_write(tmp_path, call, error, message):
    with SummaryWriter(tmp_path) as writer, pytest.raises(error, match=re.escape(message)):
        call(writer)
    assert read_values(tmp_path) == []


def test_second_layout_is_refused(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        writer.custom_scalars_layout(LAYOUT)
        with pytest.raises(ValueError, match=r"`layout` must be written once.*one dict"):
            writer.custom_scalars_layout(LAYOUT)
    assert len(read_values(tmp_path)) == 1


def test_docstring_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(kmp.summaries)
    assert (results.failed, results.attempted > 0) == (0, True)
    tags = {tag for _, tag, _, _ in read_values(tmp_path / "logs" / "run_1")}
    assert {"loss_scale", "skipped_steps", "global_norm", "report", "exponents"} < tags


# Without TensorFlow: other processes, in which every look for it is noted and, if `block`, fails.

WATCH = """
import sys

asked = []

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tensorflow":
            asked.append(name)
            if {block}:
                raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Watch())
"""
IMPORT_KMP = """
import kmp.summaries
early = sorted(name for name in sys.modules if name.split(".")[0] == "tensorboard")
asked.clear()  # Keras may look for it
"""
WRITE = """
with kmp.summaries.SummaryWriter(sys.argv[1]) as writer:
    writer.scalar("loss_scale", 2.0**15, 3)
    writer.scalars({"loss_scale": 0.1, "norm": float("inf")}, 4)
    writer.text("report", "fine", 4)
    writer.histogram("exponents", [4, 2], [-24, -14, 16], 4)
    writer.custom_scalars_layout({"Mixed precision": {"loss scale": ["loss_scale$"]}})
    writer.hparams({"policy": "float32"})
"""
WRITE_WITH_TENSORFLOW = """
from tensorboard.summary.writer.event_file_writer import EventFileWriter
EventFileWriter(sys.argv[1]).close()
"""
REPORT = """
import json
print(json.dumps({"early": early, "asked": asked, "imported": "tensorflow" in sys.modules}))
"""
ACCUMULATE = """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
events = EventAccumulator(sys.argv[1]).Reload()
print(json.dumps({
    tag: [(e.step, make_ndarray(e.tensor_proto).astype(str).tolist()) for e in events.Tensors(tag)]
    for tag in events.Tags()["tensors"] if not tag.startswith(("custom_scalars", "_hparams_"))
}))
"""

needs_jax = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="a process on JAX alone")
needs_tensorflow = pytest.mark.skipif(
    not importlib.util.find_spec("tensorflow"), reason="about a TensorFlow that is there"
)


def run_on_jax(log_dir, *parts, block):
    code = "".join([WATCH.format(block=block), IMPORT_KMP, *parts])
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    process = subprocess.run(
        [sys.executable, "-c", code, str(log_dir)],
        env=environment,
        cwd=pathlib.Path(kmp.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


@needs_jax
@pytest.mark.slow
def test_works_where_only_jax_is_installed(tmp_path):
    report, tensors = run_on_jax(tmp_path, WRITE, REPORT, ACCUMULATE, block=True)
    assert report == {"early": [], "asked": [], "imported": False}
    assert tensors == {
        "loss_scale": [[3, "32768.0"], [4, "0.1"]],
        "norm": [[4, "inf"]],
        "report": [[4, "fine"]],
        "exponents": [[4, [["-24.0", "-14.0", "4.0"], ["-14.0", "16.0", "2.0"]]]],
    }


@needs_jax
@needs_tensorflow
@pytest.mark.slow
def test_does_not_import_the_tensorflow_that_is_there(tmp_path):
    (report,) = run_on_jax(tmp_path, WRITE, REPORT, block=False)
    assert report == {"early": [], "asked": [], "imported": False}


@needs_jax
@pytest.mark.slow
def test_the_watch_sees_a_writer_that_imports_tensorflow(tmp_path):
    (report,) = run_on_jax(tmp_path, WRITE_WITH_TENSORFLOW, REPORT, block=True)
    assert report["asked"][0] == "tensorflow"


# The real TensorBoard, without TensorFlow, through its Rust loader (where installed) and the other.


@contextlib.contextmanager
def tensorboard_server(log_dir, load_fast):
    """Yields `get(route)`, the JSON answer of a plugin; the page is at `get.address`."""
    module = "import runpy\nrunpy.run_module('tensorboard.main', run_name='__main__')"
    flags = [f"--logdir={log_dir}", "--host=127.0.0.1", "--port=0", f"--load_fast={load_fast}"]
    process = subprocess.Popen(
        [sys.executable, "-c", WATCH.format(block=True) + module, *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # one group with the loader that it starts
    )
    # Ends the read below if TensorBoard neither starts nor stops.
    alarm = threading.Timer(25, os.killpg, (process.pid, signal.SIGKILL))
    alarm.start()
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        said = []
        while not (said and "http://" in said[-1]):
            said.append(process.stderr.readline())
            assert said[-1], "".join(said)
        address = re.search(r"http://127\.0\.0\.1:\d+/", said[-1])[0]

        def get(route):
            with direct.open(f"{address}data/plugin/{route}", timeout=10) as answer:
                return json.load(answer)

        get.address = address
        deadline = time.monotonic() + 10
        while not get("scalars/tags") and time.monotonic() < deadline:
            time.sleep(0.1)  # the first load runs beside the server
        yield get
    finally:
        alarm.cancel()
        with contextlib.suppress(ProcessLookupError):  # it ended, and its loader with it
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("load_fast", ["auto", "false"])
def test_tensorboard_shows_it(tmp_path, load_fast):
    for start in (0, 2):  # resumed
        with SummaryWriter(tmp_path / "run") as writer:
            writer.custom_scalars_layout(LAYOUT)
            for step in range(start, start + 2):
                writer.scalar("loss_scale", 2.0**step, step)
            writer.scalars({"norm/global": math.inf, "norm/median": math.nan}, start)
            writer.text("report", "**fine**", start)
            writer.histogram("exponents", [4, 2], [-24, -14, 16], start)
    with tensorboard_server(tmp_path, load_fast) as get:
        scalars = get("scalars/tags")
        time_series = get("timeseries/tags")
        points = {
            tag: [(step, value) for _, step, value in get(f"scalars/scalars?run=run&tag={tag}")]
            for tag in scalars["run"]
        }
        text = get("text/text?run=run&tag=report")
        histogram = get("histograms/histograms?run=run&tag=exponents")
        layout = get("custom_scalars/layout")
    assert sorted(scalars["run"]) == ["loss_scale", "norm/global", "norm/median"]
    assert sorted(time_series["scalars"]["runTagInfo"]["run"]) == sorted(scalars["run"])
    assert time_series["histograms"]["runTagInfo"] == {"run": ["exponents"]}
    assert points == {
        "loss_scale": [(0, 1), (1, 2), (2, 4), (3, 8)],
        "norm/global": [(0, "Infinity"), (2, "Infinity")],
        "norm/median": [(0, "NaN"), (2, "NaN")],
    }
    assert [(t["step"], t["text"]) for t in text] == [
        (0, "<p><strong>fine</strong></p>"),
        (2, "<p><strong>fine</strong></p>"),
    ]
    assert [(s, b) for _, s, b in histogram] == [
        (0, [[-24, -14, 4], [-14, 16, 2]]),
        (2, [[-24, -14, 4], [-14, 16, 2]]),
    ]
    assert {
        category["title"]: {
            chart["title"]: chart["multiline"]["tag"] for chart in category["chart"]
        }
        for category in layout["category"]
    } == LAYOUT
