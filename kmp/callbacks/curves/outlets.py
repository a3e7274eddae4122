"""Where the looks and the epochs of a run go: TensorBoard, and a function of the user's."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
from keras.callbacks import TensorBoard

from kmp._backend import backend
from kmp.callbacks.curves.dashboard import Dashboard, settings_of
from kmp.callbacks.curves.epoch_curves import EpochCurves
from kmp.callbacks.curves.history import History
from kmp.callbacks.curves.readings import flat
from kmp.callbacks.learning_rates import learning_rates
from kmp.callbacks.verdict.states import Verdict
from kmp.health.report import GradientReport


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
