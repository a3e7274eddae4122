"""One eager replay of a batch, forward or backward, in which each call of a layer is recorded."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import Model, ops

from kmp._backend import backend
from kmp._backend.types import Gradient, Tensor, Tree
from kmp._keras import check_model, takes_training, with_mask_of
from kmp._keras.calls import Call, Recorder, recording
from kmp.debug.stats import floats, has_nonfinite, is_float_tensor, measure
from kmp.precision.trees import as_number
from kmp.scaling.optimizer import LossScaleOptimizer

Batch: TypeAlias = tuple[Tree, Tree, Tree]  # x, y and sample_weight


def check_replayable(model: Any, tool: str, with_loss: bool) -> None:
    """Check that a batch can be replayed without changing the model.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: it is not built, has no `call`, or is not compiled although a loss is needed.
    """
    check_model(model, tool)
    if type(model).call is Model.call:
        # On PyTorch a layer is a module, whose layers are not among its attributes.
        children = dict(getattr(model, "named_children", dict)())
        parts = {**vars(model), **children}.items()
        part = next((n for n, v in parts if isinstance(v, Model)), "part")
        raise ValueError(
            f"`model` of {tool} must have a `call`, which is what is replayed. Received: "
            f"{type(model).__name__} {model.name!r} without one: its train_step calls its parts. "
            f"Write kmp.debug.{tool}(model.{part}, ...) for one part at a time, or give the class "
            "a `call`."
        )
    if not model.built:
        raise ValueError(
            f"`model` of {tool} must be built, because the tools change nothing. Received: "
            f"{type(model).__name__} {model.name!r}, which was never called. Call model(x) once "
            "before."
        )
    if with_loss and not model.compiled:
        raise ValueError(
            f"`model` of {tool} must be compiled, because y was passed and needs its loss. "
            f"Received: {model.name!r}, not compiled. Call model.compile(...) first, or leave y "
            "out to look only at the forward pass."
        )


class Loss(keras.Operation):
    """`model.compute_loss` as an operation: a recorder sees it, and the layers that it calls."""

    def __init__(self, model: Any):
        super().__init__(name="compute_loss")
        self.model = model

    def call(
        self, x: Tree, y: Tree, y_pred: Tree, sample_weight: Tree = None, training: bool = True
    ) -> Tensor:
        """Compute the loss as the trainer does: `training` goes only to a method that takes it."""
        function = self.model.compute_loss
        if "training" in inspect.signature(function).parameters:
            return function(x, y, y_pred, sample_weight, training=training)
        return function(x, y, y_pred, sample_weight)


def call_model(model: Any, x: Tree, training: bool) -> Tree:
    """Call the model as the trainer does: `training` goes only to a model that takes it."""
    return model(x, training=training) if takes_training(model) else model(x)


def forward(
    model: Model, batch: Batch, training: bool, with_loss: bool = False
) -> tuple[Recorder, Tree, Tensor]:
    """Run the model once, and its loss if asked to.

    Returns:
        The recorder, with only those calls whose tensors hold numbers; the outputs; and the loss,
        None without one or if it raises for outputs that are not finite.
    """
    x, y, sample_weight = batch
    recorder, loss = Recorder(), None
    with recording(recorder):
        outputs = call_model(model, x, training)
        if with_loss:
            try:
                loss = Loss(model)(x, y, outputs, sample_weight, training=training)
            except Exception:  # binary cross-entropy on torch refuses NaN
                if not has_nonfinite(measure(outputs)):
                    raise
    recorder.calls = [call for call in recorder.calls if _holds_numbers(call)]
    recorded = {id(call) for call in recorder.calls}
    for call in recorder.calls:
        call.children = [child for child in call.children if id(child) in recorded]
    return recorder, outputs, loss


def raising_layer(model: Model, batch: Batch) -> Any:
    """The innermost layer that raises where the model and its loss run as in training, or None."""
    x, y, sample_weight = batch
    recorder = Recorder()
    try:
        with recording(recorder):
            Loss(model)(x, y, call_model(model, x, training=True), sample_weight)
    except Exception:  # whatever the user's code raises
        call = recorder.raised()
        return call.layer if call else None
    return None


def _holds_numbers(call: Call) -> bool:
    """Whether nothing that the call got or gave is a tracer of a compiled function."""
    tensors = floats((call.received, call.outputs))
    return call.received is not None and all(map(backend.is_concrete, tensors))


def backward(
    model: Model,
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

    def watch(time: int, call: Call, role: str, tree: Tree) -> Tree:
        if isinstance(call.layer, Loss) and role == "output":
            return tree
        tensors, note = floats(tree), functools.partial(record, time, call, role)
        copies = [backend.watch_gradient(x, note) for x in tensors]
        for source, copy in zip(tensors, copies, strict=True):
            with_mask_of(source, copy)
        copy_of = dict(zip(map(id, tensors), copies, strict=True))
        leaves = [copy_of.get(id(x), x) for x in keras.tree.flatten(tree)]
        return keras.tree.pack_sequence_as(tree, leaves)

    def loss() -> Tensor:
        with recording(Recorder(watch, keys)):
            y_pred = call_model(model, x, training)
            value = Loss(model)(x, y, y_pred, sample_weight, training=training)
        return ops.multiply(ops.cast(value, "float32"), scale)

    return backend.gradients(loss, model.trainable_variables)


def loss_scale_of(model: Any) -> float:
    """What the model's optimizer multiplies the loss with now; 1 without an optimizer."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return 1.0
    if not isinstance(optimizer, LossScaleOptimizer):
        scale = optimizer.scale_loss(ops.ones((), "float32"))
    elif optimizer.built:  # its `scale_loss` would note that the loss is scaled
        scale = optimizer.scale_variable
    else:
        scale = optimizer.loss_scale.init().scale
    return as_number(scale)


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
        is_float = isinstance(x, float) or is_float_tensor(x)
        return ops.convert_to_tensor(x, keras.config.floatx() if is_float else None)

    return keras.tree.map_structure(one, tree)
