"""A replay leaves no trace: what it may touch is kept, and put back."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
from keras import Layer

from kmp._backend import backend
from kmp._backend.kept_variables import KeptVariables
from kmp._backend.random_states import RandomStates
from kmp._keras import layers_of, path_of
from kmp._keras.state import fresh_loss, kept_called, kept_losses
from kmp._keras.training import kept_buffers


class Preserved:
    """A context that leaves a model, its training state and the random state as they were.

    It keeps the variables (weights, BatchNorm statistics, seeds of layers, metrics, and whatever
    else this thread assigns to: the states of stateful RNNs and the seeds in closures are in no
    list), the losses that layers have collected, the loss object that the first training step
    builds, and the random states of Python, NumPy, Keras and the backend. Whoever swaps dtype
    policies puts them back. Nothing steps the optimizer, calls a cached function or leaves a new
    one. `restore` puts everything back in between, so that the next replay draws the same dropout
    masks.

    Args:
        model: a built `keras.Model`.

    Raises:
        ValueError: within, if a layer would create its weights only now.
    """

    def __init__(self, model: keras.Model):
        self._model: Any = model

    def __enter__(self) -> "Preserved":
        model, layers = self._model, layers_of(self._model)
        self._variables = KeptVariables(
            [*model.variables, *getattr(model, "metrics_variables", [])]
        )
        self._losses, self._random_states = kept_losses(layers), RandomStates()
        self._buffers = kept_buffers(layers)
        self._at_the_end = [kept_called(layers), fresh_loss(model)]
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(self._variables.with_assigned())
        self._patches.enter_context(_refusing_weights())
        self._patches.enter_context(backend.without_functions())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._patches.close()
        self.restore()
        for put_back in self._at_the_end:
            put_back()

    def restore(self) -> None:
        """Put everything back but the loss object."""
        self._variables.restore()
        self._buffers()
        self._losses()
        self._random_states.restore()


@contextlib.contextmanager
def _refusing_weights() -> Iterator[None]:
    """Within, no layer that this thread calls creates weights."""
    add_weight, thread = Layer.add_weight, threading.get_ident()

    def refused(self, *args, **kwargs):
        if threading.get_ident() != thread:
            return add_weight(self, *args, **kwargs)
        raise ValueError(
            "`model` must have all its weights, because the tools change nothing. Received: a "
            f"model whose layer {path_of(self)!r} would create them only now. Call "
            "model(x, training=True) once before."
        )

    Layer.add_weight = refused
    try:
        yield
    finally:
        Layer.add_weight = add_weight
