"""TensorBoard event files without TensorFlow: the tensorboard package's protos and record format.

tensorboard is imported when the first writer is made, as most programs never make one, it need not
be installed, and its protobuf costs 20 ms to import next to jax and 220 ms next to torch.
"""

import importlib
import itertools
import numbers
import os
import re
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_DATA_CLASSES = {"scalars": "DATA_CLASS_SCALAR", "images": "DATA_CLASS_BLOB_SEQUENCE"}
_file_number = itertools.count()  # tells the writers of one process apart


def check_installed(modules: Sequence[str], what: str) -> None:
    """Raise ModuleNotFoundError unless these modules of the extra `tensorboard` can be imported.

    Args:
        modules: their names.
        what: what needs them, as the subject of a sentence.

    Example:

    >>> check_installed(["PIL"], "The heat map")
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{what} needs the package {module.partition('.')[0]}, which is not installed. "
                "Write pip install 'kmp[tensorboard]'."
            ) from error


def check_can_write() -> None:
    """Raise ModuleNotFoundError unless what a writer needs is installed."""
    modules = ["tensorboard.compat.proto.event_pb2", "google_crc32c", "PIL"]
    check_installed(modules, "Writing for TensorBoard")


class SummaryWriter:
    """Writes scalars, texts, histograms and a dashboard to a directory that TensorBoard shows.

    Each writer appends to an event file of its own, in the order of the calls. What it has written
    is on disk after `flush()` or `close()`. Scalars are float32, as TensorBoard keeps them: NaN
    and the infinities are written as such, and numbers beyond float32 become infinite.

    TensorBoard shows a directory as one run. To resume a run, make a new writer on the same
    directory and go on counting steps: in TensorBoard's default loader the new values replace what
    was written for later steps; with `--load_fast=false` both stay side by side. Give writers that
    are open at the same time different directories: the default loader follows one file per run.

    Example:

    >>> import kmp.summaries
    >>> with kmp.summaries.SummaryWriter("logs/run_1") as writer:
    ...     writer.custom_scalars_layout({"Mixed precision": {"loss scale": ["loss_scale$"]}})
    ...     writer.scalar("loss_scale", 2.0**15, step=100)
    ...     writer.scalars({"skipped_steps": 3, "global_norm": float("inf")}, step=100)
    ...     writer.text("report", "**3** steps skipped", step=100)
    ...     writer.histogram("exponents", counts=[4, 2], edges=[-24, -14, 16], step=100)

    Then `tensorboard --logdir logs`.

    Args:
        log_dir: Path of a local directory, created where it is missing.
        descriptions: Texts in Markdown that say what charts show; TensorBoard puts them beside the
            charts. The key is a tag, or the beginning of several tags, up to a "/" or "_".

    Raises:
        ModuleNotFoundError: without what the extra installs: `pip install 'kmp[tensorboard]'`.
        TypeError: if `log_dir` is not a path.
        ValueError: if `log_dir` is not a local directory.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        descriptions: Mapping[str, str] | None = None,
    ):
        path = os.fspath(log_dir) if isinstance(log_dir, str | os.PathLike) else log_dir
        if not isinstance(path, str):
            raise TypeError(_message("`log_dir` must be a path", log_dir, 'log_dir="logs/run_1"'))
        # `makedirs` would take gs://bucket for a local directory "gs:".
        if not path or "://" in path or os.path.isfile(path):
            expected = "`log_dir` must be a directory of the local file system"
            raise ValueError(_message(expected, log_dir, 'log_dir="logs/run_1" and copy it later'))
        check_can_write()
        os.makedirs(path, exist_ok=True)
        name = (
            f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
            f".{next(_file_number):06d}.kmp"  # readers sort by name
        )
        # A record is one `write` of a buffered file: records of two threads do not mix.
        self._records = open(os.path.join(path, name), "xb")  # noqa: SIM115
        self._has_layout = False
        self._descriptions = descriptions or {}
        self._described: set[str] = set()  # TensorBoard reads the first description of a tag
        self._write(file_version="brain.Event:2", source_metadata={"writer": "kmp.summaries"})
        self.flush()

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Writes one number, for the tabs Time Series and Scalars.

        Args:
            tag: Name of the chart; charts are grouped by what is before the first `/`.
            value: A Python or numpy float or int, not a tensor.
            step: The training step, an int from 0.
        """
        self.scalars({tag: value}, step)

    def scalars(self, mapping: Mapping[str, float], step: int) -> None:
        """Writes the numbers of one step, `{tag: value}`, in one record: all of them or none."""
        if not isinstance(mapping, Mapping):
            expected = "`mapping` must be a dict of tags and numbers"
            raise TypeError(_message(expected, mapping, '{"loss_scale": 32768.0}'))
        for tag, value in mapping.items():
            if not isinstance(value, numbers.Real):
                expected = f"The value of {tag!r} must be one Python or numpy number"
                raise TypeError(_message(expected, value, "float(value)"))
        tensors = {
            tag: {"dtype": "DT_FLOAT", "tensor_shape": {}, "float_val": [float(value)]}
            for tag, value in mapping.items()
        }
        self._write_summary("scalars", tensors, step)

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Writes a text for the tab Text, which renders it as Markdown."""
        if not isinstance(markdown, str):
            raise TypeError(_message("`markdown` must be a str", markdown, "str(report)"))
        _check_unicode("`markdown`", markdown)
        self._write_summary("text", {tag: _string(markdown.encode())}, step)

    def histogram(
        self, tag: str, counts: Sequence[float], edges: Sequence[float], step: int
    ) -> None:
        """Writes ready-made bins, for the tabs Histograms and Distributions.

        Args:
            tag: Name of the chart.
            counts: `[bins]`, how many values lie in each bin.
            edges: `[bins + 1]`, finite and increasing: bin `i` reaches from `edges[i]` to
                `edges[i + 1]`.
            step: The training step, an int from 0.
        """
        heights, borders = np.asarray(counts, "float64"), np.asarray(edges, "float64")
        example = "counts=[4, 2], edges=[-24, -14, 16] for two bins"
        if heights.ndim != 1 or not heights.size or borders.shape != (heights.size + 1,):
            expected = "`edges` must have one entry more than `counts`, which must not be empty"
            raise ValueError(_message(expected, (counts, edges), example))
        if not (np.isfinite(borders).all() and (np.diff(borders) > 0).all()):
            expected = "`edges` must be finite and increase"
            raise ValueError(_message(expected, edges, example))
        if not (np.isfinite(heights).all() and (heights >= 0).all()):
            expected = "`counts` must be finite and not negative"
            raise ValueError(_message(expected, counts, example))
        rows = np.stack([borders[:-1], borders[1:], heights], axis=1)  # f64[bins, 3]
        tensor = {
            "dtype": "DT_DOUBLE",
            "tensor_shape": {"dim": [{"size": size} for size in rows.shape]},
            "double_val": rows.ravel().tolist(),
        }
        self._write_summary("histograms", {tag: tensor}, step)

    def image(self, tag: str, png: bytes, width: int, height: int, step: int) -> None:
        """Writes a picture for the tab Images.

        Args:
            tag: Name of the picture.
            png: The content of a PNG file, or of another format that browsers show.
            width: int, in pixels.
            height: int, in pixels.
            step: The training step, an int from 0.
        """
        if not isinstance(png, bytes):
            raise TypeError(_message("`png` must be bytes, an encoded picture", png, "file.read()"))
        content = [str(int(width)).encode(), str(int(height)).encode(), png]
        shape = {"dim": [{"size": len(content)}]}
        tensor = {"dtype": "DT_STRING", "tensor_shape": shape, "string_val": content}
        self._write_summary("images", {tag: tensor}, step)

    def hparams(self, mapping: Mapping[str, bool | float | str]) -> None:
        """Writes what sets this run apart, for the tab HParams; its columns are the run's scalars.

        Runs with the same entries share a row there.

        Args:
            mapping: Names and values, such as `{"policy": "mixed_float16", "batch_size": 64}`.
        """
        for name, value in mapping.items():
            if not isinstance(value, str | numbers.Real):
                expected = f"The value of {name!r} must be a str, a bool or one number"
                raise TypeError(_message(expected, value, "str(value)"))
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        self._write(step=0, summary=hparams_pb(dict(mapping)))

    def custom_scalars_layout(self, layout: Mapping[str, Mapping[str, Any]]) -> None:
        """Arranges scalars as a dashboard, in the tab Custom Scalars.

        A regular expression need only match the beginning of a tag: `loss` takes in `loss_scale`
        too, `loss$` does not. A writer has one layout; TensorBoard merges those of several runs.

        Args:
            layout: `{category: {chart title: [regular expressions of tags]}}`. A chart may also be
                a curve with its band, `{"value": tag, "lower": tag, "upper": tag}`.
        """
        if self._has_layout:
            expected = "`layout` must be written once, as TensorBoard shows one layout of a run"
            raise ValueError(_message(expected, layout, "all categories in one dict"))
        _check_layout(layout)
        from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

        proto = Layout(
            category=[
                {
                    "title": category,
                    "chart": [
                        {"title": title, "margin": {"series": [dict(tags)]}}
                        if isinstance(tags, Mapping)
                        else {"title": title, "multiline": {"tag": list(tags)}}
                        for title, tags in charts.items()
                    ],
                }
                for category, charts in layout.items()
            ]
        )
        tensors = {"custom_scalars__config__": _string(proto.SerializeToString())}
        self._write_summary("custom_scalars", tensors, step=0)
        self._has_layout = True

    def flush(self) -> None:
        """Puts on disk what has been written, so that TensorBoard sees it."""
        self._check_open()
        self._records.flush()

    def close(self) -> None:
        """Flushes and closes the file; closing again does nothing."""
        self._records.close()

    def __enter__(self) -> "SummaryWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write_summary(self, plugin: str, tensors: Mapping[str, Any], step: int) -> None:
        """Writes `{tag: tensor}` for one of TensorBoard's plugins."""
        if isinstance(step, bool) or not isinstance(step, numbers.Integral):
            expected = "`step` must be an int, the training step"
            raise TypeError(_message(expected, step, "step=int(optimizer.iterations)"))
        if not 0 <= step < 2**63:
            expected = "`step` must be a training step, counted from 0, and below 2**63"
            raise ValueError(_message(expected, step, "step=0 for what precedes training"))
        new = {tag: self._describe(tag) for tag in tensors if tag not in self._described}
        metadata = {
            "plugin_data": {"plugin_name": plugin},
            "data_class": _DATA_CLASSES.get(plugin, "DATA_CLASS_TENSOR"),
        }
        values = [
            {"tag": t, "metadata": {**metadata, "summary_description": new.get(t)}, "tensor": x}
            for t, x in tensors.items()
        ]
        self._write(step=int(step), summary={"value": values})
        self._described.update(new)  # in place, which `|=` with a dict's keys is not

    def _describe(self, tag: str) -> str:
        """What the chart of a new tag shows, after a check of the tag; empty if nobody said."""
        if not isinstance(tag, str) or not tag:
            raise TypeError(_message("`tag` must be a str and not empty", tag, '"loss_scale"'))
        _check_unicode("`tag`", tag)
        beginnings = [tag[: i + 1] for i, letter in enumerate(tag) if letter in "/_"]
        fitting = [tag, *reversed(beginnings)]
        return next((self._descriptions[k] for k in fitting if k in self._descriptions), "")

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._check_open()
        self._records.write(_record(Event(wall_time=time.time(), **fields).SerializeToString()))

    def _check_open(self) -> None:
        if self._records.closed:
            raise ValueError(
                "The SummaryWriter must be open. Received: a call after close(). Make a new "
                "SummaryWriter on the same `log_dir`: it adds to the run."
            )


def _string(content: bytes) -> dict[str, Any]:
    return {"dtype": "DT_STRING", "tensor_shape": {}, "string_val": [content]}


def _record(content: bytes) -> bytes:
    """TFRecord: the length, its checksum, the content, its checksum."""
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    import google_crc32c  # tensorboard's own is in Python: half the time of a look

    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _message(expected: str, received: object, example: str) -> str:
    """The text of an error: what was expected, what was received, what to write instead."""
    kind = type(received).__name__
    return f"{expected}. Received: {received!r} (of type {kind}). Write {example}."


def _check_unicode(name: str, text: str) -> None:
    """Raise ValueError for a text that files cannot hold: half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        example = "text.encode(errors='replace').decode()"
        raise ValueError(_message(f"{name} must be Unicode ({error})", text, example)) from error


def _check_layout(layout: object) -> None:
    """Raise TypeError or ValueError unless `layout` is one of `custom_scalars_layout`."""
    example = '{"Mixed precision": {"loss scale": ["loss_scale$"]}}'
    expected = "`layout` must be {category: {chart title: [regular expressions]}}"
    if not isinstance(layout, Mapping):
        raise TypeError(_message(expected, layout, example))
    for charts in layout.values():
        if not isinstance(charts, Mapping):
            raise TypeError(_message(expected, charts, example))
        for patterns in charts.values():
            if isinstance(patterns, Mapping):
                if set(patterns) != {"value", "lower", "upper"}:
                    tags = '{"value": "loss", "lower": "loss_min", "upper": "loss_max"}'
                    expected = "A band in `layout` must have the keys value, lower and upper"
                    raise ValueError(_message(expected, patterns, tags))
                continue
            if not isinstance(patterns, list | tuple):
                raise TypeError(_message(expected, patterns, example))
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except (TypeError, re.error) as error:
                    expected = f"`layout` must hold regular expressions ({error})"
                    raise ValueError(
                        _message(expected, pattern, "re.escape(tag) for a literal tag")
                    ) from error
