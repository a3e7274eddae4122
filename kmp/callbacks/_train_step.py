"""What a skipped step must not leave behind in Keras's own training loop.

Keras's trainers update the layers' statistics and the average of the loss before the optimizer has
its say. One overflow then makes the epoch's loss NaN, on which other callbacks stop a healthy run,
and stays in BatchNorm's moving statistics for ever.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from kmp import _backend
from kmp._types import Variable


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


def guard_train_step(model: Any) -> None:
    """Let a skipped step of `model` leave its layers' statistics and its average loss alone.

    Call it before the train function is made; the present one is dropped. It works on the train
    step that the model has, Keras's or an override, once for each model.
    """
    if type(model._loss_tracker) is keras.metrics.Mean:
        # Replacing the class keeps the variables that the model and its strategy already know.
        model._loss_tracker.__class__ = _FiniteMean
        model.train_function = None
    if getattr(model.train_step, "is_guarded", False):
        return
    train_step = _averaging_finite_losses(model, model.train_step)
    train_step = _backend.restore_after_skip(model, train_step, statistics_of)
    train_step.is_guarded = True  # type: ignore[attr-defined]
    model.train_step = train_step
    model.train_function = None


def _averaging_finite_losses(model: Any, train_step: Callable) -> Callable:
    def step(*args: Any) -> Any:
        tracker = model._loss_tracker
        tracker.training = True
        try:
            return train_step(*args)
        finally:
            tracker.training = False

    return step


def statistics_of(model: Any) -> list[Variable]:
    """The float variables that layers update while they train: moving means, and the like.

    Neither the weights of frozen layers, which nobody updates, nor the states of random generators.
    """
    return [
        variable
        for layer in model._flatten_layers()
        if layer.trainable
        for variable in layer._non_trainable_variables
        if keras.backend.is_float_dtype(variable.dtype)
    ]
