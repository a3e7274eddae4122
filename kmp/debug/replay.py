"""One eager replay of a batch, in which each call of a layer is seen from outside.

Two methods of Keras are replaced for a while: `Layer.__call__`, which knows the arguments as they
were passed, and `Operation.__call__`, which layers reach with their inputs cast to the compute
dtype, and which the operations of a functional model reach alone. No other `__call__` exists in
Keras, and subclassed, nested and shared layers all pass through these two.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import ops

# Masks ride on tensors; Keras has no public way to read them.
from keras.src.backend.common import masking

from kmp import _backend
from kmp._backend.types import Gradient, Tensor, Tree
from kmp._keras import path_of
from kmp.precision.trees import is_float

Batch: TypeAlias = tuple[Tree, Tree, Tree]  # x, y and sample_weight


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a layer, or of an operation of a functional model.

    Attributes:
        layer: the layer or operation.
        parent: the call inside which it happened; None for the model.
        key: where it stands, the same in every replay of the same batch.
        passed: args and kwargs as they were passed.
        received: args and kwargs as `call` got them, cast to the compute dtype.
        outputs: what `call` returned.
        span: the times of its begin and its end.
        children: the calls that it made.
        dtype: what it computed in: of an operation, the dtype of its first output.
    """

    layer: Any
    parent: "Call | None"
    key: str
    passed: Tree
    received: Tree = None
    outputs: Tree = None
    span: list[int] = dataclasses.field(default_factory=list)
    children: list["Call"] = dataclasses.field(default_factory=list)
    dtype: str = ""

    @property
    def path(self) -> str:
        """The layer's path; with a number if its name was called before under its parent."""
        path = path_of(self.layer)
        _, _, repeat = self.key.rpartition("#")
        return path if repeat == "1" else f"{path} (call {repeat})"


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


class Recorder:
    """Follows the calls of one replay.

    Attributes:
        calls: those whose tensors held numbers, in the order in which they began.
        clock: counts the places at which tensors were seen.
    """

    def __init__(self, watch: Callable[["Recorder", Call, str, Tree], Tree] | None = None):
        self.calls: list[Call] = []
        self.clock = 0
        self._watch = watch
        self._stack: list[Call] = []
        self._counts: dict[tuple[int, str], int] = {}
        self._thread = threading.get_ident()

    def tick(self) -> int:
        """The time of what is seen now."""
        self.clock += 1
        return self.clock

    def seen(self, call: Call, role: str, tree: Tree) -> Tree:
        """Hand what a call receives or returns to whoever watches."""
        return tree if self._watch is None else self._watch(self, call, role, tree)

    def begin(self, layer: Any, passed: Tree) -> Call:
        """A call begins inside those that are under way."""
        parent = self._stack[-1] if self._stack else None
        place = (id(parent), layer.name)  # which layers of subclassed models may share
        self._counts[place] = self._counts.get(place, 0) + 1
        above = parent.key if parent else ""
        key = f"{above}/{layer.name}#{self._counts[place]}"
        call = Call(layer, parent, key, passed, span=[self.tick()])
        if parent is not None:
            parent.children.append(call)
        self._stack.append(call)
        self.calls.append(call)
        return call

    def end(self) -> None:
        """The innermost call ends."""
        self._stack.pop().span.append(self.tick())

    def is_on(self) -> bool:
        """Other threads call their own models."""
        return threading.get_ident() == self._thread

    def awaits(self, layer: Any) -> bool:
        """Tell whether `layer` is the one whose `__call__` began last, on its way to `call`."""
        return bool(self._stack) and self._stack[-1].layer is layer and not self._stack[-1].received

    def run(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Let the innermost call compute."""
        call = self._stack[-1]
        args, kwargs = call.received = self.seen(call, "input", (args, kwargs))
        call.outputs = self.seen(call, "output", function(call.layer, *args, **kwargs))
        first = floats(call.outputs)
        call.dtype = getattr(call.layer, "compute_dtype", None) or (
            keras.backend.standardize_dtype(first[0].dtype) if first else ""
        )
        return call.outputs


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Within, `recorder` sees every call of a layer in this thread."""
    layer_call, operation_call = keras.Layer.__call__, keras.Operation.__call__

    def call_layer(self, *args, **kwargs):
        if not recorder.is_on():
            return layer_call(self, *args, **kwargs)
        recorder.begin(self, (args, kwargs))
        try:
            return layer_call(self, *args, **kwargs)
        finally:
            recorder.end()

    def call_operation(self, *args, **kwargs):
        if not recorder.is_on():
            return operation_call(self, *args, **kwargs)
        if recorder.awaits(self):
            return recorder.run(operation_call, args, kwargs)
        if isinstance(self, keras.Layer):
            return operation_call(self, *args, **kwargs)
        recorder.begin(self, (args, kwargs))
        try:
            return recorder.run(operation_call, args, kwargs)
        finally:
            recorder.end()

    keras.Layer.__call__, keras.Operation.__call__ = call_layer, call_operation
    try:
        yield
    finally:
        keras.Layer.__call__, keras.Operation.__call__ = layer_call, operation_call


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
