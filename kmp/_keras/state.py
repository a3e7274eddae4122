"""What calling a model changes in Keras's objects besides the values of variables.

Each function names the private attributes that it reads or sets.
"""

from collections.abc import Callable
from typing import Any

import keras


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


def added_losses(layer: Any) -> list[Any]:
    """What a layer itself has added by `add_loss`, its activity regularizer among it.

    Private: `_losses`; `layer.losses` has those of the layers in it too.
    """
    return list(layer._losses)


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
