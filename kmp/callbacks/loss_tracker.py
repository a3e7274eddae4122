"""The loss of each training step, kept inside the compiled step and read in one transfer."""

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from kmp import _backend
from kmp._backend.types import Variable
from kmp.health.report import transfer
from kmp.scaling.optimizer import LossScaleOptimizer

RECENT = 128  # losses that stay readable: far more than between two looks at the usual cadence


class LossTracker(keras.metrics.Mean):
    """Keras's average of the epoch's loss, over the steps that counted; and each recent loss.

    With an optimizer that skips steps, a loss that is not finite is left out of the average.
    Until a step has counted the average is the last finite loss, or NaN: a first step that
    overflows while the loss scale is being found must not look like a dead run.

    Attributes:
        recent: float32[RECENT], the loss of the i-th step that counted at index i % RECENT.
        counted_steps: int32[], steps that counted since training began.
        seen_steps: int32[], all training steps since then.
        nonfinite_losses: int32[], losses in a row up to now that were not finite.
        latest: float32[], the last finite loss of this epoch; inf before there is one.
    """

    training = False  # whether a training step is being traced: evaluation hides nothing
    skips = False  # whether the optimizer skips a step that is not finite

    def add_step_variables(self) -> None:
        """Create what `keras.metrics.Mean` does not have; this class is put on existing ones."""

        def add(name, dtype="int32", shape=(), aggregation="only_first_replica"):
            return self.add_variable(shape, "zeros", dtype, aggregation=aggregation, name=name)

        self.recent = add("recent", "float32", (RECENT,), "mean")
        self.latest = add("latest", "float32", aggregation="mean")
        self.counted_steps, self.seen_steps = add("counted_steps"), add("seen_steps")
        self.nonfinite_losses = add("nonfinite_losses")

    def update_state(self, values, sample_weight=None):
        if self.training:
            loss = ops.mean(ops.cast(values, "float32"))
            finite = ops.isfinite(loss)
            self._count(loss, finite)
            if self.skips:
                weight = 1.0 if sample_weight is None else sample_weight
                sample_weight = ops.where(finite, ops.cast(weight, "float32"), 0.0)
                values = ops.where(finite, values, ops.zeros_like(values))
        return super().update_state(values, sample_weight=sample_weight)

    def _count(self, loss: Any, finite: Any) -> None:
        counts = ops.logical_or(finite, not self.skips)
        counted, nonfinite, recent, latest = (
            ops.convert_to_tensor(v)
            for v in (self.counted_steps, self.nonfinite_losses, self.recent, self.latest)
        )
        here = ops.equal(ops.arange(RECENT, dtype="int32"), counted % RECENT)
        self.recent.assign(ops.where(ops.logical_and(here, counts), loss, recent))
        self.latest.assign(ops.where(finite, loss, latest))
        self.counted_steps.assign(counted + ops.cast(counts, "int32"))
        self.nonfinite_losses.assign(ops.where(finite, ops.zeros_like(nonfinite), nonfinite + 1))
        one = ops.where(finite, 1, 1)  # once there is a loss: see ScaledStep.record
        self.seen_steps.assign(ops.convert_to_tensor(self.seen_steps) + one)

    def reset_state(self):
        super().reset_state()
        # Not NaN: JAX compares what the processes assign, and NaN differs from itself.
        self.latest.assign(float("inf"))

    def result(self):
        mean = super().result()
        latest = ops.cast(ops.convert_to_tensor(self.latest), mean.dtype)
        latest = ops.where(ops.isfinite(latest), latest, float("nan"))
        return ops.where(ops.equal(self.count, 0), latest, mean)

    @property
    def happened(self) -> list[Variable]:
        """What stays although the step is skipped once its gradients are known."""
        return [self.seen_steps, self.nonfinite_losses, self.latest]


def track_losses(model: Any) -> bool:
    """Let the loss tracker of a compiled model keep each step's loss; tell whether it is new."""
    tracker = model._loss_tracker
    skips = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    if type(tracker) is keras.metrics.Mean:
        # Replacing the class keeps the variables that the model and its strategy already know.
        tracker.__class__ = LossTracker
        strategy = getattr(model, "distribute_strategy", None)
        with strategy.scope() if strategy else contextlib.nullcontext():
            tracker.add_step_variables()
        tracker.skips = skips
        tracker.reset_state()
        return True
    return False


def warn_of_unseen_loss(callback: Any) -> None:
    """Warn that `callback` sees no loss, since the tracker of its model is not updated."""
    warnings.warn(
        f"{type(callback).__name__} sees no loss: the model's own `train_step` does not update "
        "Keras's average of it, or its own `metrics` leaves it out. Write "
        "self._loss_tracker.update_state(loss) in the one, and self._loss_tracker in the other.",
        stacklevel=3,
    )


class Progress(NamedTuple):
    """What the compiled steps have counted up to a look.

    Attributes:
        step: training steps of the optimizer, skipped ones included where it is kmp's.
        applied_steps: those that were not skipped, micro-steps of an accumulation included.
        seen_steps, counted_steps, nonfinite_losses, recent: see `LossTracker`.
        skipped_steps: steps skipped since training began; None if the optimizer does not say.
        consecutive_skips: skipped steps in a row up to now; 0 if the optimizer does not say.
        nonfinite: indices of the weights asked for that are not finite.
    """

    step: int
    applied_steps: int
    seen_steps: int
    counted_steps: int
    nonfinite_losses: int
    recent: np.ndarray
    skipped_steps: int | None
    consecutive_skips: int
    nonfinite: np.ndarray

    def mean_loss_since(self, counted_steps: int) -> float | None:
        """The mean over the steps that counted since then, or the latest RECENT of them."""
        new = min(self.counted_steps - counted_steps, RECENT)
        if new <= 0:
            return None
        return float(np.mean(self.recent[np.arange(-new, 0) + self.counted_steps % RECENT]))


def read_progress(model: Any, weights: Sequence[Variable] = ()) -> Progress:
    """Read what the training steps of `model` have counted so far, in one transfer.

    Which of `weights` are not finite comes with it.
    """
    tracker, optimizer = model._loss_tracker, model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # Not `iterations`: under accumulation that is computed, from what JAX has in its loop.
    counters = [tracker.seen_steps, tracker.counted_steps, tracker.nonfinite_losses]
    counters.append(inner._iterations)
    counts_skips = isinstance(optimizer, LossScaleOptimizer)
    if counts_skips and optimizer.built:
        counters += [optimizer.steps, optimizer.skipped_steps, optimizer.consecutive_skips]
    counters.append(tracker.recent)
    live = _backend.read(model, [*counters, *weights])
    counts, values = live[: len(counters)], live[len(counters) :]
    finite = ops.stack([True, *(ops.all(ops.isfinite(x)) for x in values)])
    *numbers, recent, flags = transfer([*counts, finite])
    seen, counted, nonfinite, applied, *rest = (int(x) for x in numbers)
    step, skipped, in_a_row = rest or (applied, 0, 0)
    return Progress(
        step=step,
        applied_steps=applied,
        seen_steps=seen,
        counted_steps=counted,
        nonfinite_losses=nonfinite,
        recent=recent,
        skipped_steps=skipped if counts_skips else None,
        consecutive_skips=in_a_row,
        nonfinite=np.flatnonzero(flags[1:] == 0),
    )
