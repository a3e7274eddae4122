"""Sums of numbers in half precision, rounded once, at their end.

JAX leaves it to XLA how a gradient is added up over a batch, and asks for a sum in the dtype of the
numbers. On CPUs XLA rounds that sum after each number: in bfloat16 a sum of ones stays at 256. The
gradient of a convolution's bias is such a sum, and so is the gradient of a table that is looked up.

The gradient of what all steps of a scan use is added up from step to step, in the dtype of what
they use.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from kmp._backend.jax.programs import CALLS

_HALF = ("bfloat16", "float16")
_ADDITIONS = ("add", "add_any")
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
            call = each if is_same else each.replace(params=params)
            made = _summed_steps(call) if each.primitive.name == "scan" else [call]
        else:
            made = [each]
        has_changed |= made != [each]
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

    return _equations(run, sum_.invars, sum_.outvars, sum_.source_info).made


def _summed_steps(scan: Any) -> list[Any]:
    """A scan whose running sums are in float32, and rounded to what they were after the last step.

    A running sum is a carry to which each step adds something, and of which it makes no other use.
    """
    closed, constants = scan.params["jaxpr"], scan.params["num_consts"]
    body, source = closed.jaxpr, scan.source_info
    equations, invars, outvars = list(body.eqns), list(body.invars), list(body.outvars)
    given, results = list(scan.invars), list(scan.outvars)
    before: list[Any] = []
    after: list[Any] = []
    for i in range(scan.params["num_carry"]):
        at = constants + i
        carry, total, addition = body.invars[at], body.outvars[i], _only_use(body.invars[at], body)
        if addition not in equations or addition.outvars[0] is not total:
            continue
        if addition.primitive.name not in _ADDITIONS or _dtype_of(carry) not in _HALF:
            continue
        addend = addition.invars[addition.invars[0] is carry]
        wide = jax.ShapeDtypeStruct(carry.aval.shape, "float32")
        rounded = functools.partial(lax.convert_element_type, new_dtype=carry.aval.dtype)
        add = functools.partial(_add, rounded)
        step = _equations(add, [wide, addend], [None, total], addition.source_info)
        place = equations.index(addition)
        equations[place : place + 1] = step.made
        invars[at], outvars[i] = step.invars[0], step.outvars[0]
        start = _equations(_widened, [given[at]], [None], source)
        end = _equations(rounded, [wide], [results[i]], source)
        before, given[at] = before + start.made, start.outvars[0]
        after, results[i] = after + end.made, end.invars[0]
    if not before:
        return [scan]
    body = body.replace(eqns=equations, invars=invars, outvars=outvars)
    params = {**scan.params, "jaxpr": closed.replace(jaxpr=body)}
    return [*before, scan.replace(invars=given, outvars=results, params=params), *after]


def _only_use(variable: Any, program: Jaxpr) -> Any:
    """The equation of a program that uses a variable, if nothing else does."""
    uses = [each for each in program.eqns for x in each.invars if x is variable]
    returned = any(x is variable for x in program.outvars)
    return uses[0] if len(uses) == 1 and not returned else None


def _widened(x: Any) -> Any:
    return x.astype("float32")


def _add(rounded: Callable[..., Any], total: Any, x: Any) -> tuple[Any, Any]:
    """A running sum with one more number, in float32 and rounded."""
    total = total + _widened(x)
    return total, rounded(total)


class _Equations(NamedTuple):
    """What a function was traced to.

    Attributes:
        made: its equations.
        invars: its arguments.
        outvars: its results.
    """

    made: list[Any]
    invars: list[Any]
    outvars: list[Any]


def _equations(
    function: Callable[..., Any], given: Sequence[Any], results: Sequence[Any], source: Any
) -> _Equations:
    """The equations of a function, to stand in another program.

    Args:
        function: of arrays.
        given: its arguments: variables of the other program, or a `jax.ShapeDtypeStruct` for a new
            one.
        results: its results: variables of the other program, or None for a new one.
        source: where the equations come from.
    """
    avals = [getattr(x, "aval", x) for x in given]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    program = jax.make_jaxpr(function)(*shapes).jaxpr
    pairs = [*zip(program.invars, given, strict=True), *zip(program.outvars, results, strict=True)]
    names = {new: old for new, old in pairs if hasattr(old, "aval")}

    def named(variables):
        return [x if hasattr(x, "val") else names.get(x, x) for x in variables]

    made = [
        each.replace(invars=named(each.invars), outvars=named(each.outvars), source_info=source)
        for each in program.eqns
    ]
    return _Equations(made, named(program.invars), named(program.outvars))
