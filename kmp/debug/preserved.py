"""What a replay may touch, kept aside and put back."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from kmp import _backend
from kmp._backend.random_states import RandomStates
from kmp._backend.types import Variable
from kmp._keras import layers_of, path_of


class Preserved:
    """A context that leaves a model, its training state and the random state as they were.

    Variables (weights, BatchNorm statistics, layers' seeds, metrics, and whatever else is assigned
    to in this thread: the states of stateful RNNs and the seeds of closures are in no list), the
    layers' collected losses, the loss object that the first training step builds, and the random
    states of Python, NumPy, Keras and the backend. Dtype policies are put back by who swaps them;
    nothing steps the optimizer, calls a cached function or leaves a new one. `restore` puts it all
    back in between, so that the next replay draws the same dropout masks.

    Args:
        model: a built `keras.Model`.

    Raises:
        ValueError: within, by a layer that would make its weights only now.
    """

    def __init__(self, model: keras.Model):
        self.model: Any = model
        self.layers = layers_of(model)

    def __enter__(self) -> "Preserved":
        self.values: dict[int, tuple[Variable, Callable[[], None]]] = {}
        for variable in _variables(self.model):
            self._note(variable)
        self.losses = [(list(layer._losses), set(layer._loss_ids)) for layer in self.layers]
        self.called = [layer._called for layer in self.layers]
        self.compile_loss = self.model.__dict__.get("_compile_loss")
        self.random_states = RandomStates()
        self._use_a_fresh_loss()
        self.replaced = contextlib.ExitStack()
        self.replaced.enter_context(_noting(self._note))
        self.replaced.enter_context(_refusing_weights())
        self.replaced.enter_context(_backend.without_functions())
        return self

    def __exit__(self, *exception: Any) -> None:
        self.replaced.close()
        self.restore()
        if self.compile_loss is not None:
            self.model.__dict__["_compile_loss"] = self.compile_loss
        for layer, called in zip(self.layers, self.called, strict=True):
            layer._called = called

    def restore(self) -> None:
        """Put everything but the loss object back."""
        for _, put_back in self.values.values():
            put_back()
        for layer, (losses, ids) in zip(self.layers, self.losses, strict=True):
            layer._losses[:] = losses
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)
        self.random_states.restore()

    def _note(self, variable: Variable) -> None:
        """Keep the value that a variable had first, if any."""
        if id(variable) not in self.values and getattr(variable, "_value", None) is not None:
            self.values[id(variable)] = (variable, _backend.preserved(variable))

    def _use_a_fresh_loss(self) -> None:
        """A compiled loss builds its metrics when it is first called: let another one do that."""
        loss = self.compile_loss
        if loss is not None and not loss.built:
            # Through __dict__, for a layer tracks what is set on it.
            self.model.__dict__["_compile_loss"] = type(loss)(
                loss._user_loss,
                loss._user_loss_weights,
                reduction=loss.reduction,
                output_names=loss.output_names,
            )


def _variables(model: Any) -> list[Variable]:
    """What a forward pass and a loss are known to write to. The optimizer is not asked to step."""
    return [*model.variables, *getattr(model, "metrics_variables", [])]


@contextlib.contextmanager
def _noting(note: Callable[[Variable], None]) -> Iterator[None]:
    """Within, `note` is called with each variable that this thread is about to change."""
    assign, thread = keras.Variable._direct_assign, threading.get_ident()

    def noted_assign(self, value):
        if threading.get_ident() == thread:
            note(self)
        return assign(self, value)

    keras.Variable._direct_assign = noted_assign
    try:
        yield
    finally:
        keras.Variable._direct_assign = assign


@contextlib.contextmanager
def _refusing_weights() -> Iterator[None]:
    """Within, no layer that this thread calls makes weights."""
    add_weight, thread = keras.Layer.add_weight, threading.get_ident()

    def refused(self, *args, **kwargs):
        if threading.get_ident() != thread:
            return add_weight(self, *args, **kwargs)
        raise ValueError(
            "`model` must have all its weights, for the tools change nothing. Received: a model "
            f"whose layer {path_of(self)!r} would make them only now. Call "
            "model(x, training=True) once before."
        )

    keras.Layer.add_weight = refused
    try:
        yield
    finally:
        keras.Layer.add_weight = add_weight
