"""The buffers of PyTorch modules in a Keras model, which Keras has in no list of variables."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
from keras import Layer, ops

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
        self.key = id(module), name  # the same in the next step, which has another `Buffer`
        self.dtype = keras.backend.standardize_dtype(self.value.dtype)
        self.shape = tuple(self.value.shape)

    @property
    def value(self) -> Any:
        """The tensor; a module may put another one in its place."""
        return getattr(self._module, self._name)

    @property
    def is_there(self) -> bool:
        """Whether the module has a tensor of this shape still: a cache may have grown."""
        return self.value is not None and tuple(self.value.shape) == self.shape

    def holds(self, value: Any) -> bool:
        """Whether it has these numbers; waits for the device. NaN differs from itself."""
        return bool((self.value == value).all())

    def assign(self, value: Any) -> None:
        """Write into the tensor."""
        self.value.copy_(ops.convert_to_tensor(value))


def _is_state(tensor: Any) -> bool:
    """Whether a buffer can be written, and is of a dtype that Keras knows.

    An expanded mask cannot, nor what was made in PyTorch's inference mode.
    """
    try:
        keras.backend.standardize_dtype(tensor.dtype)
    except ValueError:
        return False
    if str(tensor.layout) != "torch.strided" or tensor.requires_grad or tensor.is_inference():
        return False
    return all(
        stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def buffers_of(layer: Any) -> list[Buffer]:
    """The buffers of a layer, and of the modules in it that are no layers. None but on PyTorch."""
    found: list[Buffer] = []
    modules = [(path_of(layer), layer)] if keras.backend.backend() == "torch" else []
    for path, module in modules:
        named = [(name, x) for name, x in module.named_buffers(recurse=False) if _is_state(x)]
        found += [Buffer(module, name, path) for name, _ in named]
        children = ((f"{path}/{name}", x) for name, x in module.named_children())
        modules += [(name, x) for name, x in children if not isinstance(x, Layer)]
    return found


def still_there(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The pairs of a variable and a value that can be written back: all but a cache that grew."""
    return [(v, x) for v, x in pairs if not isinstance(v, Buffer) or v.is_there]


def kept_buffers(layers: Sequence[Layer]) -> Callable[[], None]:
    """Keep the buffers of layers; call the result to put them back."""
    kept = [(x, x.value.clone()) for layer in layers for x in buffers_of(layer)]

    def restore() -> None:
        for buffer, value in still_there(kept):
            buffer.assign(value)

    return restore
