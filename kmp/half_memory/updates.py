"""Updates computed in float32, whatever the dtype of the variables and of the optimizer's slots.

Keras's optimizers compute in the dtype of the variable. In bfloat16 Adam's 0.999 is 1, its bias
correction divides by 0, and no weight moves. Here they are given `Float32View`s in the place of the
half-precision variables: their code is Keras's own, and each variable is rounded once a step.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from kmp._backend import backend
from kmp._backend.types import Gradient, Tensor, Variable
from kmp._common import checked_choice, warn
from kmp._keras import updates
from kmp._keras.optimizer import accumulators_by_row, steps_of, trainable_variables_of
from kmp.half_memory.views import ROUNDING, Float32View, MasterView, Rounding, one_update
from kmp.precision.trees import HALF_DTYPES

SLOT_DTYPES = ("bfloat16", "float32")
# What adds up over many steps, and loses in half precision what it is for.
_SUMS = ("gradient_accumulator", "average")
_MASTER = "_master"


@dataclasses.dataclass(frozen=True)
class HalfMemory:
    """How variables in half precision are updated.

    Attributes:
        rounding: "stochastic" or "nearest".
        slot_dtype: of the optimizer's slots; None: the dtype of the variable they belong to, but
            float32 for float16, in which squares of gradients underflow.
        master_weights: whether each half-precision variable has a float32 copy among the slots.
    """

    rounding: str = "stochastic"
    slot_dtype: str | None = None
    master_weights: bool = False

    def __post_init__(self):
        checked_choice("rounding", self.rounding, ROUNDING)
        if self.slot_dtype is not None:
            checked_choice("slot_dtype", self.slot_dtype, SLOT_DTYPES)

    def slot_of(self, dtype: str) -> str:
        """The dtype of the slots of a variable of this dtype."""
        if self.slot_dtype and dtype != "float64":
            return self.slot_dtype
        return "float32" if dtype == "float16" else dtype

    def moves_rarely(self, dtype: str) -> bool:
        """Whether a small update moves few numbers of a variable, by a unit in the last place each.

        So they arrive on average; they are lost where each number is rounded to nearest.
        """
        at_random = dtype == "bfloat16" and self.rounding == "stochastic"
        return dtype in HALF_DTYPES and (at_random or self.master_weights)

    def concerns(self, variables: Sequence[Variable]) -> bool:
        """Whether any variable or slot will be in half precision."""
        dtypes = {v.dtype for v in variables}
        return not dtypes.union(map(self.slot_of, dtypes)).isdisjoint(HALF_DTYPES)


class _ViewMaker:
    """Makes a view of each variable in half precision, and numbers them."""

    def __init__(self, rounding: Rounding):
        self._rounding = rounding
        self._places = itertools.count()

    def __call__(self, variable: Variable) -> Any:
        if variable.dtype not in HALF_DTYPES:
            return variable
        return Float32View(variable, self._rounding, next(self._places))


def build_inner(
    inner: Any,
    variables: Sequence[Variable],
    memory: HalfMemory,
    add_counter: Callable[..., Variable],
) -> Variable | None:
    """Build a Keras optimizer that updates in float32 what is in half precision.

    Args:
        inner: the optimizer.
        variables: what it updates.
        memory: how.
        add_counter: creates a variable of the loss-scaling optimizer.

    Returns:
        int32[], the seed of the stochastic rounding; None if nothing is in half precision.
    """
    if not memory.concerns(variables):
        inner.build(variables)
        return None
    if inner.built:
        warn(
            f"{type(inner).__name__} was built before it was wrapped: its slots stay as they are, "
            "and it computes the updates of half-precision weights in half precision. Wrap an "
            f"optimizer that is not built: kmp.scaled(keras.optimizers.{type(inner).__name__})."
        )
        return None
    if not memory.master_weights and any(v.dtype == "float16" for v in variables):
        warn(
            "Weights in float16 are rounded to nearest, which loses small updates, and are inf "
            "beyond 65504. Keep them in float32 with the policy mixed_float16, or in bfloat16; or "
            "write kmp.scaled(..., master_weights=True)."
        )
    seed = add_counter("rounding_seed", dtype="int32")
    make_view = _ViewMaker(Rounding(memory.rounding, seed, steps_of(inner)))
    _build(inner, memory, make_view, variables)
    return seed


def _build(
    inner: Any, memory: HalfMemory, make_view: _ViewMaker, variables: Sequence[Variable]
) -> None:
    parts = getattr(inner, "optimizers", ())
    if parts:  # `keras.optimizers.MultiOptimizer` builds each of its own, for its variables
        for part in parts:
            updates.build_by(part, functools.partial(_build, part, memory, make_view))
        inner.build(variables)
        return
    views = [make_view(v) for v in variables]
    if memory.master_weights:
        views = [_with_master(inner, v) for v in views]
    make_slot = functools.partial(_make_slot, inner, memory, make_view)
    updates.build_on_views(inner, variables, views, make_slot)
    updates.update_by(inner, views, functools.partial(_update, inner, views))


def _with_master(inner: Any, view: Any) -> Any:
    if not isinstance(view, Float32View):
        return view
    # It begins at zero: a master that does not round to its variable is not read.
    master = updates.add_slot(inner, view.variable, _MASTER[1:], "zeros", "float32")
    return MasterView(view.variable, master)


def _make_slot(
    inner: Any,
    memory: HalfMemory,
    make_view: _ViewMaker,
    reference_variable: Any,
    name: str | None = None,
    initializer: Any = "zeros",
) -> Any:
    """`add_variable_from_reference` of an optimizer, with the dtype that was chosen for slots."""
    variable = getattr(reference_variable, "variable", reference_variable)  # of a view
    dtype = memory.slot_of(variable.dtype)
    if name in _SUMS and dtype in HALF_DTYPES:
        dtype = "float32"
    return make_view(updates.add_slot(inner, variable, name or "var", initializer, dtype))


def _update(
    inner: Any, views: Sequence[Any], gradient: Gradient, variable: Variable, learning_rate: Tensor
) -> None:
    """`update_step` of an optimizer, and its weight decay, in float32."""
    view = views[updates.row_of(inner, variable)]
    if not isinstance(view, Float32View):
        view = variable  # on a replica of TensorFlow's this is its own copy
    with one_update():
        updates.decay_weights(inner, view)
        updates.update_one(inner, backend.dense(gradient), view, learning_rate)


def is_master(variable: Variable) -> bool:
    """Whether a variable of an optimizer is the float32 copy of a weight."""
    return variable.name.endswith(_MASTER)


def masters_of(inner: Any) -> list[tuple[Variable, Variable]]:
    """The weights of a built optimizer that have masters, each with its master."""
    masters = {v.name: v for v in inner.variables if is_master(v)}
    names = [(v, v.path.replace("/", "_") + _MASTER) for v in trainable_variables_of(inner)]
    return [(v, masters[name]) for v, name in names if name in masters]


def exact_weights(inner: Any) -> dict[int, Tensor]:
    """float32 values of the weights that have masters, by the ids of the weights."""
    return {id(v): MasterView(v, master).read() for v, master in masters_of(inner)}


def gradient_dtypes(inner: Any, variables: Sequence[Variable]) -> list[str | None]:
    """The dtype that each gradient is cast to before the update; None: it stays.

    Args:
        inner: the built optimizer. Its accumulators take gradients of their own dtype.
        variables: what it updates. Gradients of half precision are clipped in float32.
    """
    if not inner.gradient_accumulation_steps:
        return ["float32" if v.dtype in HALF_DTYPES else None for v in variables]
    sums = accumulators_by_row(inner)
    return [(v if x is None else x).dtype for v, x in zip(variables, sums, strict=True)]
