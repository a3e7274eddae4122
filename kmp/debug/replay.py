"""One eager replay of a batch, in which each call of a layer is seen from outside."""

from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import ops

# Masks ride on tensors; Keras has no public way to read them.
from keras.src.backend.common import masking

from kmp import _backend
from kmp._backend.types import Gradient, Tensor, Tree
from kmp._keras.calls import Call, Recorder, recording
from kmp.precision.trees import is_float

Batch: TypeAlias = tuple[Tree, Tree, Tree]  # x, y and sample_weight


def floats(tree: Tree) -> list[Tensor]:
    """The float tensors of a structure that hold numbers, which no tracer does."""
    return [x for x in keras.tree.flatten(tree) if _is_watched(x)]


def _is_watched(x: Any) -> bool:
    return (
        x is not None
        and not isinstance(x, (float, keras.KerasTensor))
        and is_float(x)
        and hasattr(x, "shape")
    )


def forward(model: keras.Model, x: Tree, training: bool) -> tuple[Recorder, Tree]:
    """Run the model once; return the calls whose tensors held numbers, and the outputs."""
    recorder = Recorder()
    with recording(recorder):
        outputs = call_model(model, x, training)
    recorder.calls = [call for call in recorder.calls if _holds_numbers(call)]
    for call in recorder.calls:
        call.children = [child for child in call.children if _holds_numbers(child)]
    return recorder, outputs


def _holds_numbers(call: Call) -> bool:
    tensors = [*floats(call.received), *floats(call.outputs)]
    return call.received is not None and all(_backend.is_concrete(x) for x in tensors)


def backward(
    model: keras.Model,
    batch: Batch,
    scale: float,
    keys: set[str],
    record: Callable[[int, Call, str, Tensor], None],
    training: bool = True,
) -> tuple[Tensor, list[Gradient]]:
    """Run the model forward and backward, with the compiled loss times `scale`.

    Args:
        model: a compiled model.
        batch: x, y and sample_weight.
        scale: the loss scale.
        keys: `Call.key` of the calls to watch.
        record: is called with the time, the call, "input" or "output", and the gradient there,
            for each watched tensor that the loss depends on.
        training: as in `model(x, training=...)`.

    Returns:
        The scaled loss, and its gradient with respect to each trainable variable, None where the
        loss does not depend on it.
    """
    x, y, sample_weight = batch

    def watch(recorder, call, role, tree):
        time = recorder.tick()
        if call.key not in keys:
            return tree

        def one(tensor):
            if not _is_watched(tensor):
                return tensor
            watched = _backend.watch_gradient(tensor, lambda g: record(time, call, role, g))
            if watched is not tensor and masking.get_keras_mask(tensor) is not None:
                masking.set_keras_mask(watched, masking.get_keras_mask(tensor))
            return watched

        return keras.tree.map_structure(one, tree)

    def loss():
        with recording(Recorder(watch)):
            y_pred = call_model(model, x, training)
        value = model.compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
        )
        return ops.multiply(ops.cast(value, "float32"), scale)

    return _backend.gradients(loss, model.trainable_variables)


def call_model(model: keras.Model, x: Tree, training: bool) -> Tree:
    """Call as the trainer does, which passes `training` only to a model that takes it."""
    if model._call_has_training_arg:
        return model(x, training=training)
    return model(x)


def as_batch(tree: Tree) -> Tree:
    """Arrays as tensors, floats in `keras.config.floatx()` as `fit` would pass them.

    Raises:
        ValueError: it holds what is no array, such as a whole data set.
    """

    def one(x):
        if x is None:
            return None
        if not (hasattr(x, "shape") or hasattr(x, "__array__") or np.isscalar(x)):
            raise ValueError(
                "The data must be one batch, of arrays in any structure. Received: "
                f"{type(x).__name__}. Pass the arrays of one of its batches."
            )
        dtype = keras.config.floatx() if is_float(x) else None
        return ops.convert_to_tensor(x, dtype)

    return keras.tree.map_structure(one, tree)
