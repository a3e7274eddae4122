"""The dashboard of a real run, in a real TensorBoard and in a real browser."""

import builtins
import io
import math
import shutil
import subprocess
import urllib.parse

import keras
import numpy as np
import pytest
from PIL import Image
from test_summaries import read_values, tensorboard_server

import kmp
from kmp.callbacks.curves import dashboard
from kmp.callbacks.curves.charts import LAYOUT
from kmp.callbacks.curves.heat_map import Column, History, heat_map
from kmp.callbacks.verdict.states import Verdict

pytestmark = [pytest.mark.filterwarnings("ignore:Step"), pytest.mark.any_backend]
RED, LINE = (220, 20, 20), (255, 112, 67)  # of the heat map; of TensorBoard's first run


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Two runs side by side, 12 looks each; the second loses a step."""
    directory = tmp_path_factory.mktemp("logs")
    for run in ("clean", "skips"):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
        )
        model.compile(kmp.scaled("adam", learning_rate=0.01), loss="mse", metrics=["mae"])
        x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
        y = x[:, :1]
        if run == "skips":
            y = y.copy()
            y[20] = np.inf
        watch = kmp.callbacks.GradientHealth(log_dir=directory / run, update_freq=2)
        arguments = {"batch_size": 4, "shuffle": False, "verbose": 0, "callbacks": [watch]}
        model.fit(x, y, validation_data=(x, x[:, :1]), **arguments)
    return directory


@pytest.fixture(scope="module")
def tensorboard(logs):
    with tensorboard_server(logs, "false") as get:
        yield get


@pytest.mark.parametrize("run", ["clean", "skips"])
def test_tensorboard_has_points_for_every_chart(tensorboard, run):
    """What the browser asks for, asked directly."""
    layout = tensorboard("custom_scalars/layout")
    assert [category["title"] for category in layout["category"]] == list(LAYOUT)
    charts = [chart for category in layout["category"] for chart in category["chart"]]
    assert sorted(c["title"] for c in charts) == sorted(t for c in LAYOUT.values() for t in c)
    for chart in charts:
        tags = chart["multiline"]["tag"] if "multiline" in chart else []
        for series in chart.get("margin", {}).get("series", []):
            tags += [series["value"], series["lower"], series["upper"]]
        for tag in tags:
            is_epoch = tag == "epoch_loss$"
            query = urllib.parse.urlencode({"run": f"{run}/train" if is_epoch else run, "tag": tag})
            answer = tensorboard(f"custom_scalars/scalars?{query}")
            series = list(answer["tag_to_events"].values())
            assert series, f"{chart['title']}: nothing matches {tag}"
            for points in series:
                steps = {0} if is_epoch else set(range(2, 25, 2))
                if "update_ratio" in tag and run == "skips":
                    steps -= {6}  # the skipped one: nothing moved
                assert [step for _, step, _ in points] == sorted(steps), chart["title"]


def test_tensorboard_has_histograms_pictures_and_texts(tensorboard):
    tags = tensorboard("timeseries/tags")
    paths = [tag.partition("/")[2] for tag in tags["histograms"]["runTagInfo"]["skips"]]
    assert len(paths) == 4
    histogram = tensorboard(
        f"histograms/histograms?run=skips&tag=variable_grad_exponent/{paths[0]}"
    )
    assert [step for _, step, _ in histogram] == [*range(2, 21, 2), 24]  # ten looks, and the last
    for _, step, bins in histogram:
        assert (bins[0][0], bins[-1][1]) == (-28, 17)  # a fixed axis
        assert step == 6 or sum(count for _, _, count in bins) > 0  # there all is NaN
    images = tensorboard("images/tags")
    assert set(images) == {"clean", "skips"} and set(images["skips"]) == {"heatmap/log10_grad_norm"}
    pictures = tensorboard("images/images?run=skips&tag=heatmap/log10_grad_norm&sample=0")
    assert [picture["step"] for picture in pictures] == [2, 20, 24]
    table = tensorboard("text/text?run=skips&tag=mixed_precision/variables")[-1]["text"]
    assert "<table>" in table and all(path in table for path in paths)
    report = tensorboard("text/text?run=skips&tag=mixed_precision/report")
    assert any("FORWARD-NAN" in look["text"] for look in report)


def bands(mask, gap):
    """How many groups of True there are, `gap` or more apart."""
    places = np.flatnonzero(mask)
    return 0 if not len(places) else 1 + int((np.diff(places) >= gap).sum())


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="no Chromium here: install it to see the page drawn"
)
def test_the_charts_are_drawn(tensorboard, tmp_path):
    """The first run's colour appears in all three columns and all four rows of charts."""
    picture = tmp_path / "page.png"
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-proxy-server"]
    flags += ["--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}"]
    flags += ["--hide-scrollbars", "--window-size=1500,1600", "--virtual-time-budget=20000"]
    page = f"{tensorboard.address}#custom_scalars&_smoothingWeight=0"
    subprocess.run(
        ["chromium", *flags, f"--screenshot={picture}", page],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        timeout=60,
        check=True,
    )
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)[70:, 380:]
    drawn = (np.abs(pixels - LINE).max(axis=-1) < 12).astype(bool)
    assert drawn.sum() > 1000
    assert bands(drawn.any(axis=1), 60) >= 4
    assert bands(drawn.any(axis=0), 25) >= 3


def test_tensorboard_describes_every_chart(tensorboard):
    for plugin in ("scalars", "images"):
        runs = tensorboard(f"{plugin}/tags")
        told = {(run, tag): x["description"] for run in runs for tag, x in runs[run].items()}
        assert [where for where, text in told.items() if not text] == []
    found = {tag: x["description"] for tag, x in tensorboard("scalars/tags")["clean"].items()}
    assert "saw-tooth" in found["mixed_precision/loss_scale_log2"]
    norms = [text for tag, text in found.items() if tag.startswith("variable_grad_norm/")]
    assert len(norms) == 4 and all("divided by" in text for text in norms)
    tags = tensorboard("timeseries/tags")
    for plugin in ("scalars", "histograms"):
        told = tags[plugin]["tagDescriptions"]
        assert {tag for x in tags[plugin]["runTagInfo"].values() for tag in x} == set(told)


def test_loss_and_loss_scale_come_before_the_variables(tensorboard):
    assert list(next(iter(LAYOUT.values())))[:2] == ["loss scale, log2", "loss of each epoch"]
    tags = {tag for run in tensorboard("scalars/tags").values() for tag in run}
    groups = sorted({tag.partition("/")[0] for tag in tags})
    of_variables = {tag.partition("/")[0] for tag in tags if tag.count("/") > 1}
    assert len(of_variables) == 6 and set(groups[-6:]) == of_variables


@pytest.mark.parametrize("with_matplotlib", [True, False])
def test_the_heat_map_is_red_where_a_variable_overflowed(with_matplotlib, monkeypatch):
    if with_matplotlib:
        pytest.importorskip("matplotlib")
    else:
        real = builtins.__import__

        def refuse(name, *args, **kwargs):
            if name.startswith("matplotlib"):
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", refuse)
    clean = Column(10, np.float32([1.0, 1e-3]), np.array([False, False]))
    for overflowed in (False, True):
        look = Column(20, np.float32([1.0, 0.0]), np.array([False, overflowed]))
        png, size = heat_map(("a/kernel", "a/bias"), [clean, look])
        image = Image.open(io.BytesIO(png))
        assert image.size == size and image.format == "PNG"
        red = (np.asarray(image.convert("RGB")) == RED).all(axis=-1)
        # One cell of four, and its mark in the legend of the figure.
        assert (red.sum() > 1000) == overflowed if with_matplotlib else red.any() == overflowed
    if not with_matplotlib:
        pixels = np.asarray(image)[6:30:12, -18::12]  # the middle of each cell
        assert pixels[0, 0].sum() > pixels[1, 0].sum()  # larger is lighter
        assert tuple(pixels[0, 0]) == tuple(pixels[0, 1])


@pytest.mark.parametrize("rows", [1, 3, 1200])
def test_the_figure_has_room_for_all_variables(rows):
    pytest.importorskip("matplotlib")
    paths = [f"model/block/dense_{i}/kernel" for i in range(rows)]
    looks = [Column(i, np.ones(rows, "float32"), np.zeros(rows, bool)) for i in range(2)]
    image = Image.open(io.BytesIO(heat_map(paths, looks)[0]))
    assert image.size[0] == 900 and 160 < image.size[1] <= 10_200


def test_each_look_at_many_variables_has_a_short_report(tmp_path):
    paths = tuple(f"dense_{i}/kernel" for i in range(100))
    report = kmp.GradientReport(paths, np.ones((100, 5), "float32"), 1024.0, 10, 0, 0)
    history = History()
    history.add(report)
    board = dashboard.Dashboard(tmp_path, history)
    board.write(report, Verdict("HEALTHY"), math.nan)
    board.close()
    texts = {tag: str(array) for _, tag, _, array in read_values(tmp_path) if "mixed" in tag}
    assert "and 80 more" in texts["mixed_precision/report"]
    assert texts["mixed_precision/report"].count("/kernel") == 20 + 3  # the last three by name
    assert texts["mixed_precision/variables"].count("/kernel") == 100


def test_an_overflow_of_an_earlier_fit_is_not_red(tmp_path, monkeypatch):
    looks = []

    def draw(paths, seen):
        looks.append(seen[-1].overflowed)
        return heat_map(paths, seen)

    monkeypatch.setattr(dashboard, "heat_map", draw)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd"), loss="mse")
    watch = kmp.callbacks.GradientHealth(log_dir=tmp_path)
    for target in (np.inf, 1.0):
        model.fit(np.ones((4, 1)), np.full((4, 1), target), verbose=0, callbacks=[watch])
    np.testing.assert_array_equal(looks, [[True, True], [False, False]])


def test_the_callback_hands_the_heat_map_to_other_trackers():
    watch = kmp.callbacks.GradientHealth(update_freq=1)
    with pytest.raises(
        RuntimeError, match=r"heat_map\(\) draws the looks of a `fit`.*after model.fit"
    ):
        watch.heat_map()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(kmp.scaled("sgd"), loss="mse")
    x = np.ones((80, 1))
    x[30:32] = np.inf
    for _ in range(2):
        model.fit(x, x, batch_size=1, shuffle=False, verbose=0, callbacks=[watch])
    looks = watch._history.looks
    assert [look.step for look in looks] == list(range(101, 161))  # the last 60 of the second
    assert [look.step for look in looks if look.overflowed.any()] == [111, 112]
    assert np.asarray(watch.heat_map()).shape[1] > 200


def test_a_heat_map_of_zeros_can_be_drawn():
    png, size = heat_map(("a",), [Column(1, np.zeros(1, "float32"), np.zeros(1, bool))])
    assert Image.open(io.BytesIO(png)).size == size
