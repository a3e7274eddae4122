"""What Keras's training loop keeps to itself: the average of the loss, counters, a layer's state.

Each function names the private attributes that it reads or sets.
"""

import contextlib
import inspect
from typing import Any

import keras

from kmp._keras import own_state, path_of


def state_of(layer: keras.Layer) -> list[Any]:
    """The variables that a layer itself updates in training: moving statistics, counters.

    Neither weights, frozen or not, nor the seeds of random generators. A stateful RNN keeps the
    states that it goes on from apart from all its variables. On PyTorch a layer may have buffers,
    and modules with some in it.
    """
    states = layer.states if isinstance(layer, keras.layers.RNN) and layer.stateful else None
    found = [*own_state(layer), *(keras.tree.flatten(states) if states is not None else ())]
    return found + _buffers_of(layer) if keras.backend.backend() == "torch" else found


class _Buffer:
    """A buffer of a PyTorch module, such as the running variance of its BatchNorm, as a variable.

    Args:
        module: `torch.nn.Module`.
        name: of the buffer in it.
        path: of the module in the model.
    """

    def __init__(self, module: Any, name: str, path: str):
        self._module, self._name, self.path = module, name, f"{path}/{name}"
        self.dtype = keras.backend.standardize_dtype(self.value.dtype)
        self.shape = tuple(self.value.shape)

    @property
    def value(self) -> Any:
        """The tensor; a module may put another one in its place."""
        return getattr(self._module, self._name)

    def assign(self, value: Any) -> None:
        """Write into the tensor."""
        self.value.copy_(value)


def _buffers_of(layer: Any) -> list[_Buffer]:
    """The buffers of a layer, and of the modules in it that are no layers."""
    found, modules = [], [(path_of(layer), layer)]
    for path, module in modules:
        found += [_Buffer(module, name, path) for name, _ in module.named_buffers(recurse=False)]
        children = ((f"{path}/{name}", x) for name, x in module.named_children())
        modules += [(name, x) for name, x in children if not isinstance(x, keras.Layer)]
    return found


def loss_tracker(model: Any) -> Any:
    """The metric in which the trainer averages the loss of an epoch. Private: `_loss_tracker`."""
    return model._loss_tracker


def set_loss_tracker(model: Any, tracker: Any) -> None:
    """Let the trainer average the loss of an epoch in another metric. Private: `_loss_tracker`."""
    vars(model)["_loss_tracker"] = tracker  # `setattr` would list it among the metrics twice


def note_placements(model: Any) -> None:
    """Let the loop of `fit` know that the model has other variables than when it began.

    Before Keras 3.12 the loop notes on JAX where each of them lies, and every step goes by that.
    Private: `_record_training_state_sharding_spec`.
    """
    if hasattr(model, "_record_training_state_sharding_spec"):
        model._record_training_state_sharding_spec()


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
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` of {owner} must be a keras.Model. Received: {model!r} (of type "
            f"{type(model).__name__}). Write keras.Sequential([layer]) for one layer."
        )
    if not model.compiled:
        raise ValueError(
            f"`model` of {owner} must be compiled. Received: {model.name!r}, which is not. Write "
            'model.compile(kmp.scaled("adam"), ...) first.'
        )
