"""Updates computed in float32, whatever the dtype of the variables and of the optimizer's slots.

Keras's optimizers compute in the dtype of the variable. In bfloat16 Adam's 0.999 is 1, its bias
correction divides by 0, and no weight moves. Here they are given `Float32View`s in the place of the
half-precision variables: their code is Keras's own, and each variable is rounded once a step.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras import StatelessScope, ops
from keras.initializers import Constant

from kmp._backend import backend
from kmp._backend.types import Gradient, Tensor, Variable
from kmp._common import checked_choice, warn
from kmp._keras import updates
from kmp._keras.optimizer import accumulators_by_row, is_several, steps_of
from kmp.half_memory.blocks import Block, Member, blocks_of
from kmp.half_memory.rounding import Draw
from kmp.half_memory.slots import SCALES, code_of, first_value, groups_for
from kmp.half_memory.views import (
    ROUNDING,
    CodedView,
    Float32View,
    MasterView,
    Rounding,
    SplitView,
    Standing,
    one_update,
)
from kmp.precision.trees import HALF_DTYPES

SLOT_DTYPES = ("bfloat16", "float32", "int8")
# What adds up over many steps, and loses in half precision what it is for.
_SUMS = ("gradient_accumulator", "average")
# What a weight in half precision leaves over of the float32 that its updates add up to.
REMAINDER, SHORT_REMAINDER, MASTER = "remainder", "short_remainder", "master"
MASTER_WEIGHTS = (False, True, 24)
_MOST_SETTINGS = 8  # that one optimizer's updates are compiled for, as in `torch.compile`
_MOST_SELECTIONS = 8  # of weights that one step updates together, whose blocks are kept


@dataclasses.dataclass(frozen=True)
class HalfMemory:
    """How variables in half precision are updated.

    Attributes:
        rounding: "stochastic" or "nearest".
        slot_dtype: of the optimizer's slots; None: the dtype of the variable they belong to, but
            float32 for float16, in which squares of gradients underflow. "int8": 8 bits a number
            for those that `slots.py` declares, and bfloat16 for the others; slots of float16
            variables are float32 then.
        master_weights: whether updates of half-precision variables add up in float32: a bfloat16
            variable has an int16 remainder among the slots, a float16 one a float32 copy. With 24,
            a bfloat16 variable has an int8 remainder, and its updates add up in 24 bits.
    """

    rounding: str = "stochastic"
    slot_dtype: str | None = None
    master_weights: bool | int = False

    def __post_init__(self):
        if not any(self.master_weights is each for each in MASTER_WEIGHTS):
            raise ValueError(
                "`master_weights` must be one of False, True and 24. Received: master_weights="
                f"{self.master_weights!r}. True keeps 32 bits of each weight, 24 so many."
            )
        checked_choice("rounding", self.rounding, ROUNDING)
        if self.slot_dtype is not None:
            checked_choice("slot_dtype", self.slot_dtype, SLOT_DTYPES)
        if self.slot_dtype == "int8" and self.rounding == "nearest":
            raise ValueError(
                "Slots in int8 must be rounded at random: to nearest, a second moment, which fades "
                "by 0.1% a step, would never move. Received: slot_dtype='int8' and "
                "rounding='nearest'. Leave rounding out."
            )

    def slot_of(self, dtype: str) -> str:
        """The dtype of the slots of a variable of this dtype, but for those in 8 bits."""
        if self.slot_dtype == "int8" and dtype in ("float32", "bfloat16"):
            return "bfloat16"
        if self.slot_dtype not in (None, "int8") and dtype != "float64":
            return str(self.slot_dtype)
        return "float32" if dtype == "float16" else dtype

    def moves_rarely(self, dtype: str) -> bool:
        """Whether a small update moves few numbers of a variable, by a unit in the last place each.

        So they arrive on average; they are lost where each number is rounded to nearest.
        """
        at_random = dtype == "bfloat16" and self.rounding == "stochastic"
        return dtype in HALF_DTYPES and (at_random or bool(self.master_weights))

    def concerns(self, variables: Sequence[Variable]) -> bool:
        """Whether any variable or slot will be in half precision, or a slot in 8 bits."""
        dtypes = {v.dtype for v in variables}
        return not dtypes.union(map(self.slot_of, dtypes)).isdisjoint(HALF_DTYPES)


@dataclasses.dataclass(frozen=True)
class Stored:
    """How the variables of an optimizer hold what it updates in float32.

    Attributes:
        seed: int32[], of the stochastic rounding.
        weights: the view of each weight that has a remainder or a master, by the id of that.
        slots: the view of each slot, by the id of the slot, or of its codes.
    """

    seed: Variable
    weights: dict[int, Any] = dataclasses.field(default_factory=dict)
    slots: dict[int, Any] = dataclasses.field(default_factory=dict)


class _ViewMaker:
    """Makes a view of each variable in half precision, and numbers them."""

    def __init__(self, memory: HalfMemory, rounding: Rounding):
        self.memory, self.stored = memory, Stored(rounding.seed)
        self.rounding, self._numbers = rounding, itertools.count()
        self._draws: dict[int, list[Draw]] = {}  # by the id of a weight: those that are left
        self.slots: dict[int, list[Any]] = {}  # by the id of a weight: what its update assigns

    def _draw(self, weight: Variable) -> Draw:
        """Random numbers of the shape of a weight, for it or one of its slots."""
        left = self._draws.setdefault(id(weight), [])
        if not left:
            number = next(self._numbers)
            left += [Draw(number, part) for part in range(3)]
        return left.pop(0)

    def of(self, inner: Any, variable: Variable, weight: Variable) -> Any:
        """The view of a weight or a slot of an optimizer; the variable itself if it needs none."""
        if variable.dtype == "float32" and _in_blocks(inner):  # a block may have a part of it
            return Float32View(variable, self.rounding, Draw(0, 0))
        if variable.dtype not in HALF_DTYPES:
            return variable
        return Float32View(variable, self.rounding, self._draw(weight))

    def of_weight(self, inner: Any, variable: Variable) -> Any:
        """The view of a weight that an optimizer updates."""
        if not self.memory.master_weights or variable.dtype not in HALF_DTYPES:
            return self.of(inner, variable, variable)
        if variable.dtype == "bfloat16":
            is_short = self.memory.master_weights == 24
            name, dtype = (SHORT_REMAINDER, "int8") if is_short else (REMAINDER, "int16")
            rest = updates.add_slot(inner, variable, name, "zeros", dtype)
            view: Any = SplitView(variable, rest, self.rounding, self._draw(variable))
        else:
            # It begins at zero: a master that does not round to its variable is not read.
            rest = updates.add_slot(inner, variable, MASTER, "zeros", "float32")
            view = MasterView(variable, rest)
        self.stored.weights[id(rest)] = view
        return view

    def of_slot(self, inner: Any, slot: Variable, weight: Variable) -> Any:
        """The view of a slot."""
        view = self.of(inner, slot, weight)
        if view is not slot:
            self.stored.slots[id(slot)] = view
        return view

    def of_coded_slot(self, inner: Any, weight: Variable, name: str, initializer: Any) -> Any:
        """The view of a new slot in 8 bits; None if it is not to be coded."""
        code, groups, first = code_of(inner, name), groups_for(weight), first_value(initializer)
        if code is None or groups is None or first is None or weight.dtype == "float64":
            return None
        codes = updates.add_slot(
            inner, weight, name, Constant(code.levels if first else 0), code.dtype
        )
        shape = groups.scales(tuple(weight.shape))
        scales = updates.add_slot(
            inner, weight, name + SCALES, Constant(first), "bfloat16", shape=shape
        )
        view = CodedView(codes, scales, code, groups, self.rounding, self._draw(weight))
        self.stored.slots[id(codes)] = view
        return view


def build_inner(
    inner: Any,
    variables: Sequence[Variable],
    memory: HalfMemory,
    add_counter: Callable[..., Variable],
) -> Stored | None:
    """Build a Keras optimizer that updates in float32 what is in half precision.

    Args:
        inner: the optimizer.
        variables: what it updates.
        memory: how.
        add_counter: creates a variable of the loss-scaling optimizer.

    Returns:
        How its variables hold that; None if nothing is in half precision.
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
    views = _ViewMaker(memory, Rounding(memory.rounding, seed, steps_of(inner)))
    _build(inner, views, variables)
    return views.stored


def _build(inner: Any, views: _ViewMaker, variables: Sequence[Variable]) -> None:
    if is_several(inner):
        updates.build_parts_by(inner, lambda part, of_part: _build(part, views, of_part), variables)
        return
    of_weights = [views.of_weight(inner, v) for v in variables]
    make_slot = functools.partial(_make_slot, inner, views)
    updates.build_on_views(inner, variables, of_weights, make_slot)
    update = functools.partial(_update, inner, of_weights)
    updates.update_by(inner, of_weights, update)
    if _in_blocks(inner):
        in_blocks = _InBlocks(inner, of_weights, views, update)
        updates.update_together_by(inner, in_blocks)
    if views.memory.master_weights:
        updates.finish_on_views(inner, of_weights)


def _make_slot(
    inner: Any,
    views: _ViewMaker,
    reference_variable: Any,
    name: str | None = None,
    initializer: Any = "zeros",
) -> Any:
    """`add_variable_from_reference` of an optimizer, with the dtype that was chosen for slots."""
    variable = getattr(reference_variable, "variable", reference_variable)  # of a view
    view = None
    if views.memory.slot_dtype == "int8":
        view = views.of_coded_slot(inner, variable, name or "var", initializer)
    if view is None:
        view = _uncoded_slot(inner, views, variable, name, initializer)
    if name not in _SUMS:
        views.slots.setdefault(id(variable), []).append(view)
    return view


def _uncoded_slot(
    inner: Any, views: _ViewMaker, variable: Variable, name: str | None, initializer: Any
) -> Any:
    dtype = views.memory.slot_of(variable.dtype)
    if name in _SUMS and dtype in HALF_DTYPES:
        dtype = "float32"
    slot = updates.add_slot(inner, variable, name or "var", initializer, dtype)
    return views.of_slot(inner, slot, variable)


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


def _in_blocks(inner: Any) -> bool:
    """Whether an optimizer updates weights in blocks."""
    return backend.block_sizes() is not None and updates.is_parallel(inner)


class _InBlocks:
    """Does the updates of all weights, of most of them in blocks; see `blocks.py`.

    Args:
        inner: an optimizer of Keras's, which computes each number by itself.
        of_weights: the views of its weights.
        views: has made them, and those of the slots.
        update: updates one weight.
    """

    def __init__(
        self,
        inner: Any,
        of_weights: Sequence[Any],
        views: _ViewMaker,
        update: Callable[..., None],
    ):
        self._inner, self._update, self._rounding = inner, update, views.rounding
        self._members = [self._member(view, views.slots) for view in of_weights]
        self._blocks: dict[tuple[int, ...], list[Block]] = {}
        # By the optimizer's settings, and the kind of the blocks.
        self._compiled: dict[Any, dict[Any, Callable[..., Sequence[Tensor]]]] = {}

    def __call__(
        self, gradients: Sequence[Tensor], variables: Sequence[Variable], learning_rate: Tensor
    ) -> None:
        """Update variables."""
        given: dict[int, Tensor] = {}  # by the ids of the views
        members = []
        for gradient, variable in zip(gradients, variables, strict=True):
            member = self._members[updates.row_of(self._inner, variable)]
            if member is None or not backend.are_in_place(member.variables()):
                self._update(gradient, variable, learning_rate)
            else:
                given[id(member.view)] = gradient
                members.append(member)
        key, settings = self._rounding.key(), updates.settings_of(self._inner)
        for block in self._blocks_of(members):
            rate = ops.cast(learning_rate, "float32")
            self._update_block(block, given, rate, key, settings)

    def _update_block(
        self,
        block: Block,
        gradients: Mapping[int, Tensor],
        learning_rate: Tensor,
        key: Tensor,
        settings: Any,
    ) -> None:
        parts = [block.rows(view, part) for view in block.views for part in view.PARTS]
        numbers = [v.value for v in self._own_numbers]
        starts = block.starts(key).values()
        values = [block.read(each) for each in parts]
        inputs = [block.gradient(gradients), learning_rate, *numbers, *starts, *values]
        function = self._function_of(block, inputs, settings)
        for part, value in zip(parts, function(*inputs), strict=True):
            backend.write_rows(part, value)

    def _function_of(
        self, block: Block, inputs: Sequence[Tensor], settings: Any
    ) -> Callable[..., Sequence[Tensor]]:
        """What updates a block; if the backend has programs, one with the settings fixed in it."""
        plain = functools.partial(self._compute, block)
        programs = self._compiled.get(settings)
        if programs is None:
            if len(self._compiled) == _MOST_SETTINGS:
                return plain
            programs = {}
        if block.kind not in programs:
            program = backend.compiled_block(plain, inputs)
            if program is None:
                return plain
            programs[block.kind] = program
            self._compiled[settings] = programs
        return programs[block.kind]

    def _compute(
        self, block: Block, gradient: Tensor, learning_rate: Tensor, *tensors: Tensor
    ) -> list[Tensor]:
        """What the parts of the views of a block become: a function of tensors alone.

        Args:
            block: any block of the same kind as the one that is updated.
            gradient: float32.
            learning_rate: float32[].
            tensors: the optimizer's own numbers, the starts of the random ones, and the parts.
        """
        left = iter(tensors)
        scope = StatelessScope([(v, next(left)) for v in self._own_numbers])
        places = [(view, part) for view in block.views for part in view.PARTS]
        drawn = dict.fromkeys(view.draw.number for view in block.views if view.at_random)
        starts = {number: next(left) for number in drawn}
        standing = Standing({(id(view), part): next(left) for view, part in places}, starts)
        at_rate = updates.at_learning_rate(self._inner, learning_rate)
        with scope, at_rate, one_update(standing):
            updates.decay_weights(self._inner, block.view)
            updates.update_one(self._inner, gradient, block.view, learning_rate)
        return [standing.values[id(view), part] for view, part in places]

    @functools.cached_property
    def _own_numbers(self) -> list[Variable]:
        return updates.own_numbers(self._inner)  # once it is built

    def _blocks_of(self, members: Sequence[Member]) -> list[Block]:
        sizes = backend.block_sizes() or (0, 0)
        key = (*sizes, *(id(member) for member in members))
        if key not in self._blocks:
            if len(self._blocks) == _MOST_SELECTIONS:
                self._blocks.clear()
            self._blocks[key] = blocks_of(members, *sizes)
        return self._blocks[key]

    def _member(self, view: Any, slots: Mapping[int, Sequence[Any]]) -> Member | None:
        """None if the weight is updated by itself."""
        if not isinstance(view, (Float32View, SplitView)) or isinstance(view, MasterView):
            return None
        of_weight = tuple(slots.get(id(view.variable), ()))
        if not math.prod(view.shape) or not view.shape:
            return None
        if not all(isinstance(each, Float32View) for each in of_weight):
            return None
        groups = [each.groups for each in of_weight if isinstance(each, CodedView)]
        rows = math.lcm(*(each.size for each in groups if each.axis == 0))
        kind = updates.decays(self._inner, view), *map(_kind_of, (view, *of_weight))
        return Member(view, of_weight, rows, not groups, kind)


def _kind_of(view: Any) -> Any:
    """What is the same for views that read and write alike."""
    coded = (view.code, view.groups) if isinstance(view, CodedView) else ()
    return (type(view), *(v.dtype for v in view.parts()), view.draw.part, *coded)


def exact_weights(stored: Stored | None) -> dict[int, Tensor]:
    """float32 values of the weights that have remainders or masters, by the ids of the weights."""
    views = stored.weights.values() if stored else ()
    return {id(view.variable): view.read() for view in views}


def numbers_of(inner: Any, stored: Stored | None) -> list[Any]:
    """What an optimizer keeps beside remainders, masters and scales: variables, or their views."""
    if stored is None:
        return list(inner.variables)
    parts = {id(x.scales) for x in stored.slots.values() if isinstance(x, CodedView)}
    kept = [v for v in inner.variables if id(v) not in {*stored.weights, *parts}]
    return [stored.slots.get(id(v), v) for v in kept]


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
