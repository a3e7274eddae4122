"""What a skipped step must not leave behind in Keras's own training loop.

Keras's trainers update the layers' statistics and the averages of loss and metrics before the
optimizer has its say. One overflow then makes the epoch's loss NaN, on which other callbacks stop a
healthy run, and stays in BatchNorm's moving statistics for ever.
"""

from collections.abc import Callable
from typing import Any

import keras

from kmp import _backend
from kmp._backend.types import Variable
from kmp._keras import has_weights
from kmp.callbacks.loss_tracker import track_losses
from kmp.scaling.optimizer import LossScaleOptimizer


def guard_train_step(model: Any) -> None:
    """Let a skipped step of `model` leave its layers' statistics and the epoch's averages alone.

    Call it before the train function is made; the present one is dropped. It works on the train
    step that the model has, Keras's or an override, once for each model, whichever callbacks ask.
    """
    if track_losses(model):
        model.train_function = None
    if getattr(model.train_step, "is_guarded", False):
        return
    tracking = _tracking_losses(model, model.train_step)
    restoring = _backend.restore_after_skip(model, tracking, _undone_by_a_skip)

    make_train_function = model.make_train_function

    def renew_and_make(force: bool = False) -> None:
        if isinstance(model.optimizer, LossScaleOptimizer):
            build_optimizer(model)  # the first step may be skipped already
        # JAX finds what it has traced by the function: the same one would bring back the loss, the
        # optimizer and the dtypes of before.
        if model.train_function is None or force:
            model.train_step = _guarded(model, tracking, restoring)
        make_train_function(force)

    model.make_train_function = renew_and_make
    model.train_step = _guarded(model, tracking, restoring)
    model.train_function = None


def build_optimizer(model: Any) -> None:
    """Create the optimizer's state if all weights are there; Keras may leave that to a step."""
    if has_weights(model) and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _guarded(model: Any, tracking: Callable, restoring: Callable) -> Callable:
    def train_step(*args: Any) -> Any:
        # The model may have been compiled anew since, with another optimizer.
        skips = isinstance(model.optimizer, LossScaleOptimizer)
        return restoring(*args) if skips else tracking(*args)

    train_step.is_guarded = True  # type: ignore[attr-defined]
    return train_step


def _tracking_losses(model: Any, train_step: Callable) -> Callable:
    def step(*args: Any) -> Any:
        tracker = model._loss_tracker
        tracker.training = True
        try:
            return train_step(*args)
        finally:
            tracker.training = False

    return step


def _undone_by_a_skip(model: Any) -> list[Variable]:
    """Statistics, and all averages of the epoch: a metric of NaN predictions is NaN as well."""
    happened = {id(v) for v in getattr(model._loss_tracker, "happened", [])}
    averages = [v for v in model.metrics_variables if id(v) not in happened]
    return [*statistics_of(model), *averages]


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
