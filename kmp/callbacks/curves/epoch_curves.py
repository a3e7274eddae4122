"""What an epoch's logs hold, as TensorBoard curves of training and of validation."""

import numbers
import os
from collections.abc import Mapping
from typing import Any

from kmp.callbacks.curves.charts import DESCRIPTIONS
from kmp.summaries import SummaryWriter


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
            more: numbers that are in no logs.
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
