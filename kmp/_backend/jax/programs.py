"""What a function computes, as a list of operations, on JAX."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from kmp._backend.types import BY_INDEX, ByIndex, Operation, Tree, Value, shared_axes

_NAMES = {
    "add": "add",
    "bound": "clamp max min",
    "cast": "convert_element_type",
    "decompose": "cholesky eig eigh fft geqp3 geqrf hessenberg householder_product lu ormqr qr "
    "schur svd triangular_solve tridiagonal tridiagonal_solve",
    "equal": "eq ne",
    "look up": "gather",
    "move": "broadcast_in_dim concatenate copy dynamic_slice pad reshape rev select_n slice split "
    "squeeze transpose",
    "note": "name",
    "order": "ge gt le le_to lt lt_to",
    "remainder": "rem",
    "sequence": "iota",
    "square": "square",
    "subtract": "sub",
    "sum": "reduce_sum",
    "sum by index": "scatter-add scatter_add",
    "wave": "cos sin",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
# A program in one of these operations takes the last of the operation's inputs, and returns what
# the operation returns.
CALLS = {
    *("checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_vjp_call"),
    *("custom_vjp_call_jaxpr", "jit", "pjit", "remat", "remat2", "scan", "while"),
}
_PREFIX = "kmp "


def operations(function: Callable[..., Any], inputs: Sequence[Tree]) -> list[Operation]:
    labels: list[Any] = []

    def note(x, label):
        if not isinstance(x, jax.Array):
            return x
        labels.append(label)
        return checkpoint_name(x, f"{_PREFIX}{len(labels) - 1}")

    def program(*inputs):
        function(note, *inputs)

    traced = jax.make_jaxpr(program)(*inputs)
    found: list[Operation] = []
    _read(traced.jaxpr, [_value(x) for x in traced.jaxpr.invars], labels, found)
    return found


def _read(program: Any, inputs: list, labels: list, found: list[Operation]) -> list[Value]:
    """Add the operations of a program, and of those in it; return what it returns."""
    values: dict[Any, Value] = {}

    def value(x):
        if isinstance(x, Literal):
            return _constant(x)
        return values.setdefault(x, _value(x))

    constants = map(value, program.constvars)
    found += [Operation("sequence", (), (x,)) for x in constants if not x.is_one_number]
    values.update(zip(reversed(program.invars), reversed(inputs), strict=False))
    for each in program.eqns:
        given, made = tuple(map(value, each.invars)), tuple(map(value, each.outvars))
        name = each.primitive.name
        found += [Operation("number", (), (x,)) for x in given if x.number is not None]
        inner = _programs(each.params) if name in CALLS else []
        for one in inner:
            returned = _read(one, list(given), labels, found)
            if len(returned) == len(made):
                pairs = zip(returned, made, strict=True)
                found += [Operation("move", (inside,), (outside,)) for inside, outside in pairs]
        if not inner:
            kind, label = _KINDS.get(name, ""), None
            if kind == "note":
                theirs = not each.params["name"].startswith(_PREFIX)
                label = None if theirs else labels[int(each.params["name"][len(_PREFIX) :])]
                kind = "" if theirs else kind
            if _squares(each, given):
                kind = "square"
            by_index = None
            if kind in BY_INDEX:
                by_index = ByIndex(_indices(each, given), made[0].dtype)
            found.append(Operation(kind, given, made, label, by_index))
    return [value(x) for x in program.outvars]


def _indices(equation: Any, given: tuple[Value, ...]) -> tuple[int | None, ...]:
    dimensions = equation.params["dimension_numbers"]
    names = "start_indices_batching_dims", "scatter_indices_batching_dims"
    own = [i for name in names for i in getattr(dimensions, name, ())]  # not in each JAX
    *axes, parts = given[1].shape or (1,)
    return shared_axes([n for i, n in enumerate(axes) if i not in own], parts)


def _squares(equation: Any, given: tuple[Value, ...]) -> bool:
    name = equation.primitive.name
    if name == "integer_pow":
        return bool(equation.params["y"] == 2)
    return (name == "mul" and given[0] is given[1]) or (name == "pow" and given[1].number == 2)


def _programs(params: dict[str, Any]) -> list[Any]:
    leaves = [x for each in params.values() for x in (each if type(each) is tuple else (each,))]
    return [getattr(x, "jaxpr", x) for x in leaves if hasattr(getattr(x, "jaxpr", x), "eqns")]


def _constant(x: Any) -> Value:
    found = _value(x)
    if found.dtype != "bool" and np.size(x.val) == 1:
        found.number = float(np.asarray(x.val).reshape(()))
    return found


def _value(x: Any) -> Value:
    # Keras traces with symbols in place of unknown sizes.
    shape = tuple(n if isinstance(n, int) else None for n in getattr(x.aval, "shape", ()))
    return Value(str(getattr(x.aval, "dtype", "")), shape)
