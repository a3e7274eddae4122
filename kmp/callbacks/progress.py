"""What the compiled training steps have counted, read on the host in one transfer."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from kmp._backend import backend
from kmp._backend.types import Variable
from kmp._common import warn
from kmp._keras.optimizer import steps_of
from kmp._keras.training import loss_tracker
from kmp.callbacks.loss_tracker import RECENT
from kmp.health.report import transfer
from kmp.scaling.optimizer import LossScaleOptimizer


class Progress(NamedTuple):
    """What the compiled steps have counted up to a look.

    Attributes:
        step: training steps of the optimizer, skipped ones included where it is kmp's.
        applied_steps: those that were not skipped, micro-steps of an accumulation included.
        seen_steps, counted_steps, nonfinite_losses, recent: see `LossTracker`.
        skipped_steps: steps skipped since training began; None if the optimizer does not say.
        consecutive_skips: overflows in a row up to now; 0 if the optimizer does not say.
        hopeless_skips: the same if the loss scale cannot fall any further, else 0.
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
    hopeless_skips: int
    nonfinite: np.ndarray

    def mean_loss_since(self, counted_steps: int) -> float | None:
        """The mean over the steps that counted since then, or the latest RECENT of them."""
        new = min(self.counted_steps - counted_steps, RECENT)
        if new <= 0:
            return None
        return float(np.mean(self.recent[np.arange(-new, 0) + self.counted_steps % RECENT]))


def read_progress(model: Any, weights: Sequence[Variable] = ()) -> Progress:
    """Read what the training steps of a protected model have counted so far, in one transfer.

    Args:
        model: `keras.Model`, protected; see `kmp.callbacks.protection`.
        weights: variables of which to tell whether they are finite.
    """
    tracker, optimizer = loss_tracker(model), model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    counters = [tracker.seen_steps, tracker.counted_steps, tracker.nonfinite_losses]
    counters.append(steps_of(inner))
    counts_skips = isinstance(optimizer, LossScaleOptimizer)
    if counts_skips and optimizer.built:
        counters += [optimizer.steps, optimizer.skipped_steps, optimizer.consecutive_skips]
        counters.append(optimizer.scale_variable)
    counters.append(tracker.recent)
    live = backend.read(model, [*counters, *weights])
    counts, values = live[: len(counters)], live[len(counters) :]
    finite = ops.stack([True, *(ops.all(ops.isfinite(x)) for x in values)])
    *numbers, recent, flags = transfer([*counts, finite])
    seen, counted, nonfinite, applied, *rest = (x.item() for x in numbers)
    step, skipped, in_a_row, scale = rest or (applied, 0, 0, 0.0)
    # A rule without a floor does not search for a scale.
    floor = getattr(getattr(optimizer, "loss_scale", None), "min_scale", math.inf)
    return Progress(
        step=step,
        applied_steps=applied,
        seen_steps=seen,
        counted_steps=counted,
        nonfinite_losses=nonfinite,
        recent=recent,
        skipped_steps=skipped if counts_skips else None,
        consecutive_skips=in_a_row,
        hopeless_skips=in_a_row if scale <= floor else 0,
        nonfinite=np.flatnonzero(flags[1:] == 0),
    )


def warn_of_unseen_loss(callback: Any) -> None:
    """Warn that `callback` sees no loss, since nothing updates the average of its model."""
    warn(
        f"{type(callback).__name__} sees no loss: the model's own `train_step` does not update "
        "Keras's average of it, or its own `metrics` leaves it out. Write "
        "self._loss_tracker.update_state(loss) in the one, and self._loss_tracker in the other."
    )
