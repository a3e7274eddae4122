"""What calling a model changes in Keras's objects besides the values of variables.

Each function names the private attributes that it reads or sets. Checked with Keras 3.15.1.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp import _backend
from kmp._backend.types import Tensor, Variable


class KeptVariables:
    """The values of variables, to go back to.

    A value is copied on its device, for each replica that has its own, or to the host. Private:
    `keras.Variable._value`, because `value` would initialize a variable that is not yet, and
    `keras.Variable._direct_assign`, through which every assignment passes.

    Args:
        variables: an iterable of `keras.Variable`; each is kept once.
        on_host: bool, whether to copy to the host.

    Example:

    >>> variable = keras.Variable([1.0, 2.0])
    >>> kept = KeptVariables([variable])
    >>> _ = variable.assign([0.0, 0.0])
    >>> kept.restore()
    >>> variable.numpy().tolist()
    [1.0, 2.0]
    """

    def __init__(self, variables: Iterable[Variable], on_host: bool = False):
        self._on_host = on_host
        self._kept: dict[int, tuple[Variable, Callable[[], None]]] = {}
        self._assign = keras.Variable._direct_assign
        self._keep(variables)

    def restore(self) -> None:
        """Put all values back."""
        noted, keras.Variable._direct_assign = keras.Variable._direct_assign, self._assign
        try:
            for _, put_back in self._kept.values():
                put_back()
        finally:
            keras.Variable._direct_assign = noted

    @contextlib.contextmanager
    def with_assigned(self) -> Iterator[None]:
        """Within, also keep each other variable that this thread assigns to, before it does."""
        assign, thread = self._assign, threading.get_ident()

        def noted_assign(variable: Variable, value: Tensor) -> Any:
            if threading.get_ident() == thread:
                self._keep([variable])
            return assign(variable, value)

        keras.Variable._direct_assign = noted_assign
        try:
            yield
        finally:
            keras.Variable._direct_assign = assign

    def _keep(self, variables: Iterable[Variable]) -> None:
        copy = _copied_to_host if self._on_host else _backend.preserved
        new = {id(v): v for v in variables if getattr(v, "_value", None) is not None}
        for key in new.keys() - self._kept.keys():
            self._kept[key] = (new[key], copy(new[key]))


def _copied_to_host(variable: Variable) -> Callable[[], None]:
    # A copy: the next step may write into the buffer that NumPy looks at.
    return functools.partial(variable.assign, np.array(ops.convert_to_numpy(variable)))


def kept_losses(layers: list[keras.Layer]) -> Callable[[], None]:
    """Keep the losses that `add_loss` has collected; call the result to put them back.

    Private: `_losses` and `_loss_ids`; `layer.losses` is a new list with the regularizers' losses.
    """
    kept = [(list(layer._losses), set(layer._loss_ids)) for layer in layers]

    def restore() -> None:
        for layer, (losses, ids) in zip(layers, kept, strict=True):
            layer._losses[:] = losses
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)

    return restore


def kept_called(layers: list[keras.Layer]) -> Callable[[], None]:
    """Keep whether each layer was ever called; call the result to put that back.

    Private: `_called`.
    """
    kept = [layer._called for layer in layers]

    def restore() -> None:
        for layer, called in zip(layers, kept, strict=True):
            layer._called = called

    return restore


def fresh_loss(model: Any) -> Callable[[], None]:
    """Let a copy be built in place of a compiled loss that was never called.

    A compiled loss builds its metrics at its first call. Call the result to put it back. Private:
    `_compile_loss`, and `_user_loss` and `_user_loss_weights` of it. They are set through
    `__dict__`, because a layer tracks what is assigned to its attributes.
    """
    loss = model.__dict__.get("_compile_loss")
    if loss is None or loss.built:
        return lambda: None
    model.__dict__["_compile_loss"] = type(loss)(
        loss._user_loss,
        loss._user_loss_weights,
        reduction=loss.reduction,
        output_names=loss.output_names,
    )

    def restore() -> None:
        model.__dict__["_compile_loss"] = loss

    return restore


def copy_masks(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Give each of `targets` the Keras mask of its source, if that has one.

    Private: `keras.src.backend.get_keras_mask` and `set_keras_mask`.
    """
    for source, target in zip(sources, targets, strict=True):
        mask = keras.src.backend.get_keras_mask(source)
        if mask is not None:
            keras.src.backend.set_keras_mask(target, mask)
