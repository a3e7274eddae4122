"""The loss of each training step, kept inside the compiled step."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp._backend import backend
from kmp._backend.types import Variable
from kmp._keras.training import loss_tracker
from kmp.health.report import transfer

RECENT = 128  # losses that stay readable: more than there are between two looks by default


class LossTracker(keras.metrics.Metric):
    """Takes the place of Keras's average of the epoch's loss, and keeps the recent losses too.

    Keras's own metric goes on averaging inside, over the finite losses of skipped steps too; see
    `kmp.callbacks.skip_guard`. An epoch without a finite loss is NaN. If no loss comes at all, as
    from a `train_step` that tells the metric of none, the result is Keras's, 0.

    Args:
        mean: Keras's metric.
        over_processes: takes the loss of a step, float32[], and `ops.mean`; see
            `Backend.over_processes`. All processes then keep the same losses, and so come to the
            same decisions. `mean` is of this process: Keras sums it over all.

    Attributes:
        mean: the same.
        recent: float32[RECENT], the loss of the i-th step that was applied at index i % RECENT.
        counted_steps: int32[], steps that were applied since training began.
        seen_steps: int32[], all training steps since then.
        nonfinite_losses: int32[], losses in a row up to now that were not finite.
    """

    def __init__(self, mean: keras.metrics.Mean, over_processes: Callable[..., Any]):
        super().__init__(name=mean.name, dtype=mean.dtype)
        self.mean, self._over_processes = mean, over_processes
        self._steps_inside = 0  # training steps that are being traced; replicas trace side by side

        def add(name, dtype="int32", shape=(), aggregation="only_first_replica"):
            return self.add_variable(shape, "zeros", dtype, aggregation=aggregation, name=name)

        self.recent = add("recent", "float32", (RECENT,), "mean")
        self.counted_steps, self.seen_steps = add("counted_steps"), add("seen_steps")
        self.nonfinite_losses = add("nonfinite_losses")

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Within, updates are those of a training step. Otherwise they are an evaluation's."""
        self._steps_inside += 1
        try:
            yield
        finally:
            self._steps_inside -= 1

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        if self._steps_inside:
            loss = ops.mean(ops.cast(values, "float32"))
            self._count(self._over_processes(loss, ops.mean))
        self.mean.update_state(values, sample_weight=sample_weight)

    def _count(self, loss: Any) -> None:
        finite = ops.isfinite(loss)
        counted, nonfinite, recent = (
            ops.convert_to_tensor(v)
            for v in (self.counted_steps, self.nonfinite_losses, self.recent)
        )
        here = ops.equal(ops.arange(RECENT, dtype="int32"), counted % RECENT)
        self.recent.assign(ops.where(here, loss, recent))
        self.nonfinite_losses.assign(ops.where(finite, ops.zeros_like(nonfinite), nonfinite + 1))
        # At the end of data of unknown length TensorFlow's loop runs a step without data, in which
        # whatever does not wait for the loss would count.
        one = ops.where(finite, 1, 1)
        self.counted_steps.assign(counted + one)
        self.seen_steps.assign(ops.convert_to_tensor(self.seen_steps) + one)

    def reset_state(self) -> None:
        self.mean.reset_state()

    def result(self) -> Any:
        mean = self.mean.result()
        # NaN is computed where it is meant: `enable_check_numerics` takes none in a constant.
        counts = ops.cast(ops.equal(self.nonfinite_losses.value, 0), mean.dtype)
        return ops.where(ops.equal(self.mean.count, 0), mean + (counts / counts - 1), mean)

    @property
    def of_applied_steps(self) -> list[Variable]:
        """The variables that a skipped step undoes; the others, `mean` aside, count every step."""
        return [self.recent, self.counted_steps]


def read_losses(model: Any) -> tuple[int, np.ndarray]:
    """How many steps of a protected model counted, and its recent losses; none if it has none."""
    tracker = loss_tracker(model)
    if not isinstance(tracker, LossTracker):
        return 0, np.zeros(0, "float32")
    counted, recent = transfer(backend.read(model, [tracker.counted_steps, tracker.recent]))
    return counted.item(), recent
