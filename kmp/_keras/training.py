"""What Keras's training loop keeps to itself: the average of the loss, counters, a layer's state.

Each function names the private attributes that it reads or sets.
"""

import contextlib
import inspect
from typing import Any

import keras
from keras import Model
from keras.layers import RNN

from kmp._keras import own_state
from kmp._keras.buffers import buffers_of


def state_of(layer: keras.Layer) -> list[Any]:
    """The variables that a layer itself updates in training: moving statistics, counters.

    Neither weights, frozen or not, nor the seeds of random generators. A stateful RNN keeps the
    states that it goes on from apart from all its variables. On PyTorch a layer may have buffers,
    and modules with some in it.
    """
    states = layer.states if isinstance(layer, RNN) and layer.stateful else None
    found = [*own_state(layer), *(keras.tree.flatten(states) if states is not None else ())]
    return [*found, *buffers_of(layer)]


def loss_tracker(model: Any) -> Any:
    """The metric in which the trainer averages the loss of an epoch. Private: `_loss_tracker`."""
    return model._loss_tracker


def set_loss_tracker(model: Any, tracker: Any) -> None:
    """Let the trainer average the loss of an epoch in another metric. Private: `_loss_tracker`."""
    vars(model)["_loss_tracker"] = tracker  # `setattr` would list it among the metrics twice


def metrics_of(model: Any) -> list[Any]:
    """The metrics of a model, each on its own.

    Those given to `compile` are in one, which may be built later. Private: `_compile_metrics`.
    """
    compiled = model._compile_metrics
    found = [metric.metrics if metric is compiled else [metric] for metric in model.metrics]
    return [metric for group in found for metric in group]


def build_for_training(model: Any, x: Any, y: Any) -> None:
    """Make the variables of the optimizer and of the metrics, as `fit` does before it traces.

    Private: `_symbolic_build`.

    Args:
        model: built and compiled.
        x: one batch, of which only shapes and dtypes count.
        y: its targets, or None.
    """
    model._symbolic_build(data_batch=(x, y))


def note_placements(model: Any) -> None:
    """Let the loop of `fit` know that the model has other variables than when it began.

    Before Keras 3.12 the loop notes on JAX where each of them lies, and every step goes by that.
    Private: `_record_training_state_sharding_spec`.
    """
    if notes_placements(model):
        model._record_training_state_sharding_spec()


def notes_placements(model: Any) -> bool:
    """Whether a model's steps say where each variable lies. Private: as above."""
    return hasattr(model, "_record_training_state_sharding_spec")


def called_by_train_on_batch() -> bool:
    """Whether Keras's `train_on_batch` has called the function that asks this."""
    frame = inspect.currentframe()
    caller = frame and frame.f_back and frame.f_back.f_back
    return caller is not None and caller.f_code.co_name == "train_on_batch"


def strategy_scope(model: Any) -> contextlib.AbstractContextManager[Any]:
    """The scope in which the variables of a model are made, where TensorFlow distributes it."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy.scope() if strategy else contextlib.nullcontext()


def check_compiled(model: Any, owner: str) -> None:
    """Check that `owner` was given a compiled model.

    Raises:
        TypeError: if `model` is no Keras model.
        ValueError: if it is not compiled.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"`model` of {owner} must be a keras.Model. Received: {model!r} (of type "
            f"{type(model).__name__}). Write keras.Sequential([layer]) for one layer."
        )
    if not model.compiled:
        raise ValueError(
            f"`model` of {owner} must be compiled. Received: {model.name!r}, which is not. Write "
            'model.compile(kmp.scaled("adam"), ...) first.'
        )
