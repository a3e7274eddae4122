"""The buffers of PyTorch modules in a Keras model, which Keras has in no list of variables."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from kmp._keras import path_of


class Buffer:
    """A buffer, such as the running variance of PyTorch's BatchNorm, as a variable.

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
        self.value.copy_(ops.convert_to_tensor(value))


def buffers_of(layer: Any) -> list[Buffer]:
    """The buffers of a layer, and of the modules in it that are no layers. None but on PyTorch."""
    found: list[Buffer] = []
    modules = [(path_of(layer), layer)] if keras.backend.backend() == "torch" else []
    for path, module in modules:
        found += [Buffer(module, name, path) for name, _ in module.named_buffers(recurse=False)]
        children = ((f"{path}/{name}", x) for name, x in module.named_children())
        modules += [(name, x) for name, x in children if not isinstance(x, keras.Layer)]
    return found


def kept_buffers(layers: Sequence[keras.Layer]) -> Callable[[], None]:
    """Keep the buffers of layers; call the result to put them back."""
    kept = [(x, x.value.clone()) for layer in layers for x in buffers_of(layer)]

    def restore() -> None:
        for buffer, value in kept:
            buffer.assign(value)

    return restore
