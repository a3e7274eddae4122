"""Sums of numbers in half precision, rounded once, at their end.

JAX leaves it to XLA how a gradient is added up over a batch, and asks for a sum in the dtype of the
numbers. On CPUs XLA rounds that sum after each number: in bfloat16 a sum of ones stays at 256. The
gradient of a convolution's bias is such a sum, and so is the gradient of a table that is looked up.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from kmp._backend.jax.programs import CALLS

_HALF = ("bfloat16", "float16")
_SUMS = ("reduce_sum", "reduce_window_sum", "scatter-add", "scatter_add")


def sums_in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make of a function one that adds up in float32, with the same arguments and results.

    Args:
        function: takes and returns structures of arrays; called while JAX traces.
    """

    @functools.wraps(function)
    def run(*args):
        program, outputs = jax.make_jaxpr(function, return_shape=True)(*args)
        rewritten = ClosedJaxpr(_rewritten(program.jaxpr, {}), program.consts)
        found = jaxpr_as_fun(rewritten)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(outputs), found)

    return run


def _rewritten(program: Jaxpr, known: dict[int, tuple[Jaxpr, Jaxpr]]) -> Jaxpr:
    """The same program with its sums in float32; itself if it has none, so that JAX knows it.

    Args:
        program: of equations.
        known: those that were rewritten, by their `id`, with what became of them.
    """
    if id(program) in known:
        return known[id(program)][1]
    equations, has_changed = [], False
    for each in program.eqns:
        if each.primitive.name in _SUMS and _dtype_of(each.outvars[0]) in _HALF:
            made = _in_float32(each)
        elif each.primitive.name in CALLS:
            params = {k: _with_sums(x, known) for k, x in each.params.items()}
            is_same = all(params[k] is x for k, x in each.params.items())
            made = [each if is_same else each.replace(params=params)]
        else:
            made = [each]
        has_changed |= made[0] is not each
        equations += made
    new = program.replace(eqns=equations) if has_changed else program
    known[id(program)] = program, new
    return new


def _dtype_of(variable: Any) -> str:
    return str(variable.aval.dtype)


def _with_sums(param: Any, known: dict[int, tuple[Jaxpr, Jaxpr]]) -> Any:
    if isinstance(param, ClosedJaxpr):
        program = _rewritten(param.jaxpr, known)
        return param if program is param.jaxpr else param.replace(jaxpr=program)
    if isinstance(param, Jaxpr):
        return _rewritten(param, known)
    if type(param) is tuple:
        new = tuple(_with_sums(x, known) for x in param)
        return param if all(x is y for x, y in zip(new, param, strict=True)) else new
    return param


def _in_float32(sum_: Any) -> list[Any]:
    """The equations of a sum in float32, which is rounded to what it was."""
    is_scatter = sum_.primitive.name.startswith("scatter")

    def run(*given):
        if is_scatter:
            x, indices, updates = given
            params = sum_.params
            made = lax.scatter_add(
                x.astype("float32"),
                indices,
                updates.astype("float32"),
                params["dimension_numbers"],
                indices_are_sorted=params["indices_are_sorted"],
                unique_indices=params["unique_indices"],
                mode=params["mode"],
            )
        else:
            made = sum_.primitive.bind(given[0].astype("float32"), **sum_.params)
        return made.astype(sum_.outvars[0].aval.dtype)

    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in sum_.invars]
    program = jax.make_jaxpr(run)(*avals).jaxpr
    names = dict(zip(program.invars, sum_.invars, strict=True))
    names |= dict(zip(program.outvars, sum_.outvars, strict=True))

    def named(x):
        return x if hasattr(x, "val") else names.get(x, x)

    return [
        each.replace(
            invars=[named(x) for x in each.invars],
            outvars=[named(x) for x in each.outvars],
            source_info=sum_.source_info,
        )
        for each in program.eqns
    ]
