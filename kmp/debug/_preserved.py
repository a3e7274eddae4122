"""What a replay may touch, kept aside and put back."""

from typing import Any

import keras
from keras import ops

from kmp._model import layers_of
from kmp._random_states import RandomStates
from kmp._types import Variable


class Preserved:
    """A context that leaves a model, its training state and the random state as they were.

    Variables (weights, BatchNorm statistics, layers' seeds, metrics), the layers' collected losses,
    the loss object that the first training step builds, and the random states of Python, NumPy,
    Keras and the backend. Dtype policies are put back by who swaps them; nothing steps the
    optimizer or calls a cached function. `restore` puts it all back in between, so that the next
    replay draws the same dropout masks.

    Args:
        model: a built `keras.Model`.
    """

    def __init__(self, model: keras.Model):
        self.model: Any = model
        self.layers = layers_of(model)

    def __enter__(self) -> "Preserved":
        self.values = [(v, ops.copy(v.value)) for v in _variables(self.model)]
        self.losses = [(list(layer._losses), set(layer._loss_ids)) for layer in self.layers]
        self.called = [layer._called for layer in self.layers]
        self.compile_loss = self.model.__dict__.get("_compile_loss")
        self.random_states = RandomStates()
        self._use_a_fresh_loss()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.restore()
        if self.compile_loss is not None:
            self.model.__dict__["_compile_loss"] = self.compile_loss
        for layer, called in zip(self.layers, self.called, strict=True):
            layer._called = called

    def restore(self) -> None:
        """Put everything but the loss object back."""
        for variable, value in self.values:
            variable.assign(value)
        for layer, (losses, ids) in zip(self.layers, self.losses, strict=True):
            layer._losses[:] = losses
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)
        self.random_states.restore()

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
    """What a forward pass and a loss may write to. The optimizer is not asked to step."""
    variables = [*model.variables, *getattr(model, "metrics_variables", [])]
    return list({id(v): v for v in variables}.values())
