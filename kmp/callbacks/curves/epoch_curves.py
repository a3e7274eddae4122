"""What an epoch's logs hold, as TensorBoard curves of training and of validation."""

import numbers
import os
from collections.abc import Collection, Mapping
from typing import Any

from keras import ops

from kmp._keras.optimizer import rate_of_last_step, trainable_variables_of
from kmp.callbacks.curves.charts import describe
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
            self._writers[run] = SummaryWriter(os.path.join(self._log_dir, run), describe)
        return self._writers[run]


def learning_rates(optimizer: Any) -> dict[str, float]:
    """The learning rate, or those of a `keras.optimizers.MultiOptimizer`, as Keras names them.

    Args:
        optimizer: `kmp.LossScaleOptimizer`.

    Example:

    >>> learning_rates(kmp.scaled("sgd", learning_rate=0.5))
    {'learning_rate': 0.5}
    """
    inner = optimizer.inner_optimizer
    parts = getattr(inner, "optimizers", None)
    named = {f"learning_rate_{part.name}": part for part in parts or ()} or {"learning_rate": inner}
    return {name: _rate(each) for name, each in named.items()}


def highest_rate(optimizer: Any, paths: Collection[str]) -> float:
    """The highest learning rate of any of the variables with these paths, in the last step.

    Args:
        optimizer: `kmp.LossScaleOptimizer`, built.
        paths: of at least one of its variables.
    """
    parts = [x for x in _parts(optimizer) if x.built]
    return max(
        float(ops.convert_to_numpy(rate_of_last_step(each)))
        for each in parts
        if any(v.path in paths for v in trainable_variables_of(each))
    )


def weight_decay(optimizer: Any) -> float:
    """The largest share of a weight that weight decay takes in a step; 0 without it."""
    return max(_rate(x) * x.weight_decay if x.weight_decay else 0.0 for x in _parts(optimizer))


def _parts(optimizer: Any) -> list[Any]:
    """The optimizer inside kmp's, or those inside a `keras.optimizers.MultiOptimizer`."""
    inner = optimizer.inner_optimizer
    return getattr(inner, "optimizers", None) or [inner]


def _rate(optimizer: Any) -> float:
    return float(ops.convert_to_numpy(ops.convert_to_tensor(optimizer.learning_rate)))
