"""Where the looks and the epochs of a run go: the logs, TensorBoard, a function of the user's."""

import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
from keras.callbacks import TensorBoard

from kmp._backend import backend
from kmp.callbacks.curves.charts import DESCRIPTIONS
from kmp.callbacks.curves.dashboard import Dashboard, settings_of
from kmp.callbacks.curves.heat_map import History
from kmp.callbacks.verdict.states import Grade, Verdict
from kmp.health.report import GradientReport
from kmp.scaling.inner import learning_rates
from kmp.summaries import SummaryWriter

ALWAYS = ("loss_scale", "skipped_steps", "grad_norm", "verdict")
MORE = ("headroom_bits", "degraded_share", "lost_share", "update_ratio")
OF_SPIKES = ("skipped_spikes", "spike_score")  # only if the optimizer leaves out spikes


class Outlets:
    """The outlets of one `fit`; none in a process that is not the first of several.

    Args:
        model: `keras.Model` that is trained.
        optimizer: the one that is watched.
        log_dir: for TensorBoard, or None.
        on_report: called with a dict at each look, or None.
        report: the one at the beginning; None if the optimizer is new.
        others: all callbacks of this `fit`.

    Attributes:
        history: the looks so far.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        log_dir: str | os.PathLike[str] | None,
        on_report: Callable[[dict[str, Any]], object] | None,
        report: GradientReport | None,
        others: Iterable[keras.callbacks.Callback],
    ):
        self._dashboard: Dashboard | None = None
        self._curves: EpochCurves | None = None
        self.history = History(report)
        writes = backend.writes_logs(model)
        self._optimizer = optimizer
        self._on_report = on_report if writes else None
        if log_dir is not None and writes:
            self._dashboard = Dashboard(log_dir, self.history, settings_of(model, optimizer))
            if not any(_writes_epochs(callback, log_dir) for callback in others):
                self._curves = EpochCurves(log_dir)

    def look(self, report: GradientReport, verdict: Verdict, update_ratio: float) -> None:
        """Take one look, with its verdict and its median log10 update ratio."""
        self.history.add(report)
        if self._dashboard is not None:
            self._dashboard.write(report, verdict, update_ratio)
        if self._on_report is not None:
            self._on_report(flat(report, verdict, update_ratio))

    def end_epoch(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Take the logs of an epoch, into which other callbacks may put more."""
        if self._curves is not None:
            self._curves.hold(epoch, logs, learning_rates(self._optimizer))

    def begin_epoch(self) -> None:
        """Write what the callbacks have made of the logs of the epoch before."""
        if self._curves is not None:
            self._curves.flush()

    def close(self) -> None:
        """Close all event files."""
        for each in (self._curves, self._dashboard):
            if each is not None:
                each.close()
        self._curves = self._dashboard = None  # their files cannot be copied or pickled


def _writes_epochs(callback: keras.callbacks.Callback, log_dir: str | os.PathLike[str]) -> bool:
    """Whether a callback is Keras's own for TensorBoard, with the same directory."""
    if not isinstance(callback, TensorBoard):
        return False
    return os.path.abspath(callback.log_dir) == os.path.abspath(log_dir)


class EpochCurves:
    """Writes the logs of epochs, with the names and in the runs of keras.callbacks.TensorBoard.

    `loss` becomes `epoch_loss` in the run `train`, `val_loss` becomes `epoch_loss` in the run
    `validation`, and the step is the epoch.

    Args:
        log_dir: directory in which the two runs are made when they have a first number.

    Example:

    >>> curves = EpochCurves("logs/run_1")
    >>> curves.hold(0, {"loss": 0.5, "val_loss": 0.75}, {"learning_rate": 1e-3})
    >>> curves.close()
    >>> sorted(os.listdir("logs/run_1"))
    ['train', 'validation']
    """

    def __init__(self, log_dir: str | os.PathLike[str]):
        self._log_dir = os.fspath(log_dir)
        self._writers: dict[str, SummaryWriter] = {}
        self._held: tuple[int, Mapping[str, Any], Mapping[str, float]] | None = None

    def hold(self, epoch: int, logs: Mapping[str, Any], more: Mapping[str, float]) -> None:
        """Keep the logs of an epoch until all callbacks have put their numbers into them.

        Args:
            epoch: the x axis.
            logs: the dict that Keras hands from callback to callback.
            more: numbers that are not in the logs.
        """
        self.flush()
        self._held = (epoch, logs, more)

    def flush(self) -> None:
        """Write what is held."""
        if self._held is None:
            return
        (epoch, logs, more), self._held = self._held, None
        found: dict[str, dict[str, float]] = {"train": {}, "validation": {}}
        for name, value in {**logs, **more}.items():
            if isinstance(value, numbers.Real):  # a callback may have put in anything
                run = "validation" if name.startswith("val_") else "train"
                found[run][f"epoch_{name.removeprefix('val_')}"] = float(value)
        for run, scalars in found.items():
            if scalars:
                self._writer(run).scalars(scalars, epoch)
                self._writer(run).flush()

    def close(self) -> None:
        """Write what is held and close the event files."""
        self.flush()
        for writer in self._writers.values():
            writer.close()

    def _writer(self, run: str) -> SummaryWriter:
        if run not in self._writers:
            self._writers[run] = SummaryWriter(os.path.join(self._log_dir, run), DESCRIPTIONS)
        return self._writers[run]


def log_numbers(
    report: GradientReport, verdict: Verdict | None, update_ratio: float
) -> dict[str, float]:
    """All that can go into the logs, by its name there.

    The norm of gradients that are not all finite is inf, and their headroom is -inf: what is finite
    of them may have a norm of zero, which `EarlyStopping` would call the best.

    Example:

    >>> report = GradientReport(("a",), np.array([[1, 1, 0, 0, 0]], "float32"), 1024.0, 10, 0, 0)
    >>> log_numbers(report, Verdict("HEALTHY"), math.nan)["verdict"]
    HEALTHY
    """
    spikes = report.skipped_spikes
    of_spikes = () if spikes is None else (spikes, spikes / max(report.step, 1))
    return {
        "loss_scale": report.loss_scale,
        "skipped_steps": report.skipped_steps,
        "grad_norm": report.grad_norm if report.is_finite else math.inf,
        "verdict": Grade(verdict.code if verdict else 0),
        "headroom_bits": report.headroom_bits if report.is_finite else -math.inf,
        "degraded_share": _mean(report.degraded_share),
        "lost_share": _mean(report.lost_share),
        "update_ratio": update_ratio,
        **dict(zip(OF_SPIKES, of_spikes, strict=False)),
    }


def flat(report: GradientReport, verdict: Verdict, update_ratio: float) -> dict[str, Any]:
    """A look as a flat dict of Python's own numbers, without what was not measured.

    Example:

    >>> report = GradientReport(("a",), np.ones((1, 5), "float32"), 1024.0, 10, 0, 0)
    >>> list(flat(report, Verdict("HEALTHY"), math.nan))[:4]
    ['step', 'loss_scale', 'skipped_steps', 'grad_norm']
    """
    known = log_numbers(report, verdict, update_ratio)
    known = {name: x for name, x in known.items() if name in ALWAYS or not math.isnan(x)}
    found: dict[str, Any] = {"step": report.step, **known}
    found["consecutive_skips"] = report.consecutive_skips
    found["grad_max_abs"] = report.max_abs
    # As in TensorBoard. A tracker that keeps each name in a file cannot have both `grad_norm` and
    # a folder of that name.
    for column, name in (("l2_norm", "grad_norm"), ("overflow_steps", "overflow_steps")):
        found |= {f"variable_{name}/{path}": x for path, x in report.column(column).items()}
    found |= {f"variable_update_ratio/{path}": x for path, x in report.update_ratio.items()}
    return found


def _mean(shares: dict[str, float]) -> float:
    return float(np.mean(list(shares.values()))) if shares else math.nan
