"""What a function computes, as a list of operations, on PyTorch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kmp._backend.types import Operation, Tree, Value

_NAMES = {
    "add": "add",
    "cast": "_to_copy copy",
    "equal": "eq ne",
    "move": "_unsafe_view alias cat clamp clone constant_pad_nd detach empty_like expand flip "
    "gather index index_select permute repeat scatter select slice split squeeze stack t transpose "
    "unbind unsqueeze view where",
    "sequence": "arange",
    "wave": "cos sin",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_OF_A_SHAPE = ("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like")


def operations(function: Callable[..., Any], inputs: Sequence[Tree]) -> list[Operation]:
    tape = _Tape()

    def note(x, label):
        if not isinstance(x, torch.Tensor):
            return x
        y = x.view_as(x)
        tape.add("note", [x], [y], label)
        return y

    with tape:
        function(note, *inputs)
    return tape.found


class _Tape(TorchDispatchMode):
    """Writes down what torch does, whether it computes with numbers or only with shapes."""

    def __init__(self):
        super().__init__()
        self.found: list[Operation] = []
        self._values: dict[int, tuple[Any, Value]] = {}  # with the tensor, whose id stays its own

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        given = [] if name in _OF_A_SHAPE else _tensors((args, kwargs))
        kind = _KINDS.get(name.removesuffix("_"), "")  # of what writes in place, too
        self.add(kind, given, _tensors(outputs))
        for written in _tensors(outputs) if name.endswith("_") else ():
            if written._base is not None:  # a part of another tensor was written
                self.add("move", [written], [written._base])
        return outputs

    def add(self, kind, given, made, label=None):
        for tensor in given:
            if id(tensor) not in self._values and tensor.numel() > 1:
                self.found.append(Operation("sequence", (), (self._value(tensor),)))
        values = tuple(map(self._value, given))
        self.found.append(Operation(kind, values, tuple(map(self._value, made)), label))

    def _value(self, tensor):
        if id(tensor) not in self._values:
            value = Value(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            self._values[id(tensor)] = tensor, value
        return self._values[id(tensor)][1]


def _tensors(tree: Any) -> list[Any]:
    # torch's and Keras's own ways to flatten take most of the time of a trace.
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [x for part in tree for x in _tensors(part)] if isinstance(tree, (list, tuple)) else []
