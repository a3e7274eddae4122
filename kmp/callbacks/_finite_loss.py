"""An epoch loss that one skipped step does not ruin.

Keras's trainers average the loss of all steps before the optimizer has its say: one overflow in the
forward pass makes the epoch's loss NaN, and callbacks that watch it stop a healthy run.
"""

from typing import Any

import keras
from keras import ops


class _FiniteMean(keras.metrics.Mean):
    """The mean over the finite values of the training steps; NaN if there was none."""

    training = False  # whether a training step is being traced: evaluation hides nothing

    def update_state(self, values, sample_weight=None):
        if self.training:
            finite = ops.isfinite(values)
            weight = 1.0 if sample_weight is None else sample_weight
            sample_weight = ops.where(finite, ops.cast(weight, "float32"), 0.0)
            values = ops.where(finite, values, 0.0)
        return super().update_state(values, sample_weight=sample_weight)

    def result(self):
        mean = super().result()
        return ops.where(ops.equal(self.count, 0), ops.full_like(mean, float("nan")), mean)


def average_finite_losses(model: Any) -> None:
    """Let the loss that `fit` reports for `model` be the mean over the steps where it is finite.

    Call it before the train function is made; the present one is dropped.
    """
    if type(model._loss_tracker) is not keras.metrics.Mean:
        return
    # Replacing the class keeps the variables that the model and its strategy already know.
    model._loss_tracker.__class__ = _FiniteMean
    model.train_function = None
    if getattr(model.train_step, "averages_finite_losses", False):
        return
    keras_train_step = model.train_step

    def train_step(*args, **kwargs):
        tracker = model._loss_tracker
        tracker.training = True
        try:
            return keras_train_step(*args, **kwargs)
        finally:
            tracker.training = False

    train_step.averages_finite_losses = True  # type: ignore[attr-defined]
    model.train_step = train_step
