"""What a function computes, as a list of operations, on PyTorch."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kmp._backend.types import BY_INDEX, ByIndex, Operation, Tree, Value

_NAMES = {
    "add": "add",
    "bound": "clamp clamp_max clamp_min maximum minimum",
    "cast": "_to_copy copy",
    "decompose": "_fft_c2c _fft_c2r _fft_r2c _linalg_det _linalg_eigh _linalg_slogdet "
    "_linalg_solve_ex _linalg_svd cholesky cholesky_solve linalg_cholesky_ex linalg_eig "
    "linalg_inv_ex linalg_ldl_factor_ex linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_qr "
    "linalg_solve_triangular triangular_solve",
    "equal": "eq ne",
    "look up": "embedding index take",
    "move": "_unsafe_view alias cat clone constant_pad_nd detach empty_like expand flip "
    "gather index_select permute repeat scatter select slice split squeeze stack t transpose "
    "unbind unsqueeze view where",
    "order": "bucketize ge gt le lt searchsorted",
    "remainder": "fmod remainder",
    "sequence": "arange",
    "square": "square",
    "subtract": "rsub sub",
    "sum": "sum",
    "sum by index": "index_put",
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

    with tape, _Constants(tape):
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
        if (name == "mul" and args[0] is args[1]) or (name == "pow" and self._is_two(args[1])):
            kind = "square"
        elif kind == "sum by index" and True not in args[3:]:  # it puts them there
            kind = ""
        dtypes = [x.dtype for x in _tensors(outputs) if x.is_floating_point()]
        numbers = []
        for number in args:
            if dtypes and isinstance(number, float):
                numbers.append(self.add_number(number, dtypes[0]))
            elif kind in ("equal", "order") and type(number) in (float, int):
                numbers.append(Value("", (), float(number)))
        compared = numbers if kind in ("bound", "equal", "order") else ()
        by_index = None
        if kind in BY_INDEX:
            indices = max(_tensors([args[1]]), key=torch.Tensor.numel)  # there may be several axes
            by_index = ByIndex(tuple(indices.shape), self.value(outputs).dtype)
        self.add(kind, given, _tensors(outputs), by_index=by_index, numbers=compared)
        for written in _tensors(outputs) if name.endswith("_") else ():
            if written._base is not None:  # a part of another tensor was written
                self.add("move", [written], [written._base])
        return outputs

    def add(self, kind, given, made, label=None, by_index=None, numbers=()):
        for tensor in given:
            if id(tensor) not in self._values and tensor.numel() > 1:
                self.found.append(Operation("sequence", (), (self.value(tensor),)))
        values = (*map(self.value, given), *numbers)
        self.found.append(Operation(kind, values, tuple(map(self.value, made)), label, by_index))

    def add_number(self, number, dtype, value=None):
        """Write down a constant that is computed with in a dtype, or is a tensor of its own."""
        value = value or Value(str(dtype).removeprefix("torch."), ())
        value.number = _rounded(number, dtype)
        self.found.append(Operation("number", (), (value,)))
        return value

    def _is_two(self, exponent):
        is_tensor = isinstance(exponent, torch.Tensor)
        return bool((self.value(exponent).number if is_tensor else exponent) == 2)

    def value(self, tensor):
        """Return the place of a tensor in the list."""
        if id(tensor) not in self._values:
            value = Value(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            self._values[id(tensor)] = tensor, value
        return self._values[id(tensor)][1]


def _rounded(number: float, dtype: torch.dtype) -> float:
    if not dtype.is_floating_point:
        return float(number)
    if abs(number) > torch.finfo(dtype).max:
        return math.copysign(math.inf, number)
    return float(np.asarray(number).astype(str(dtype).removeprefix("torch.")))


class _Constants(TorchFunctionMode):
    """Writes down the numbers that are made tensors, of which a tape sees only the shape."""

    def __init__(self, tape: _Tape):
        super().__init__()
        self._tape = tape

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        if function in (torch.tensor, torch.as_tensor) and isinstance(args[0], (int, float)):
            self._tape.add_number(args[0], made.dtype, self._tape.value(made))
        return made


def _tensors(tree: Any) -> list[Any]:
    # torch's and Keras's own ways to flatten take most of the time of a trace.
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [x for part in tree for x in _tensors(part)] if isinstance(tree, (list, tuple)) else []
