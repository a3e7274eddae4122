"""What a step measures of its gradients, planned once when the optimizer is built.

The plan depends on variables and settings, not on the device. How to measure on a device is decided
when the step is compiled for it: `backend.per_target` passes the name of the target to the
functions here, and `_WAYS` has an entry for each target.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from kmp._backend import UNSHARDED, Sharding, backend
from kmp._backend.types import Gradient, Tensor
from kmp.health import details, measure
from kmp.health.measure import LEVELS, GradientGroup, group_gradients


class _Way(NamedTuple):
    """How a target measures gradients."""

    with_the_check: bool  # whether the pass that checks for inf and NaN also measures levels
    together: bool  # whether large gradients of one shape are reduced as a stack
    branches: bool  # whether to use conditionals. They save work, but stall an accelerator


_WAYS = {
    # XLA fuses a stack into its reduction on GPUs; elsewhere it writes the stack to memory.
    "gpu": _Way(with_the_check=True, together=True, branches=False),
    "tpu": _Way(with_the_check=True, together=False, branches=False),
    "cpu": _Way(with_the_check=True, together=False, branches=True),
    "host": _Way(with_the_check=False, together=False, branches=True),  # outside XLA
    "torch.compile": _Way(with_the_check=True, together=False, branches=False),
}


class GradientSpec(NamedTuple):
    """How the gradient of a variable is unscaled."""

    dtype: str | None = None  # what it is cast to afterwards, if anything
    # Whether the "gradient" is the variable's next value (float8 scales) and must not be divided.
    is_next_value: bool = False


class Due(NamedTuple):
    """What tells whether a step is due to measure."""

    # (number of the step, skips in a row before it, sampling) -> are levels, details due?
    flags: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    sampling: Tensor  # int32[4]
    health: Tensor  # float32[num_variables, 5], whose first columns are the levels measured last


class StepNumbers(NamedTuple):
    """What a step reads of the optimizer's counters before it writes anything."""

    step: Tensor  # int32[], its number, counted from 1
    consecutive_skips: Tensor  # int32[], how many steps right before it overflowed
    rule: Any  # the state of the loss-scaling rule, a NamedTuple
    peak: Any = ()  # the state of the rule that leaves out spikes, a NamedTuple

    def filled(self, tensors: Sequence[Tensor]) -> "StepNumbers":
        """Return a copy with these tensors, in the order of the property `tensors`."""
        step, consecutive_skips, *states = tensors
        rule, peak = states[: len(self.rule)], states[len(self.rule) :]
        filled_peak = type(self.peak)(*peak) if peak else ()
        return StepNumbers(step, consecutive_skips, type(self.rule)(*rule), filled_peak)

    @property
    def tensors(self) -> list[Tensor]:
        """All of them in one list."""
        return [self.step, self.consecutive_skips, *self.rule, *self.peak]


class Inspection(NamedTuple):
    """What a step knows about its gradients before it writes anything."""

    finite: Tensor  # bool[], whether all gradients are finite
    loss_finite: Tensor  # bool[], False if the loss is known not to be finite
    before: StepNumbers  # on the host if the flags are
    nonfinite: Tensor  # float32[num_variables], above 0 where a gradient is not finite
    blamed: tuple[Tensor, Tensor] | None  # from `measure.blame`; None if nobody has asked yet
    # Of the true gradients of this step, if the plan asks for them:
    max_abs: Tensor | None = None  # float32[], the largest
    norm: Tensor | None = None  # float32[], the l2 norm of all
    norms: Tensor | None = None  # float32[num_variables], that of each
    # None if nothing is measured:
    due_levels: Tensor | None = None  # bool[], whether this step measures levels
    due_details: Tensor | None = None  # bool[], whether this step measures details
    levels: Tensor | None = None  # float32[num_variables, 4], perhaps of an earlier step
    sample: Tensor | None = None  # float32[2 * n] a device, from `details.sample`
    order: Sequence[int] = ()  # of the variables in the sample
    on_host: bool = False  # whether the host knows the flags, and may branch on them


@dataclasses.dataclass(frozen=True)
class MeasurePlan:
    """What to measure of the gradients of an optimizer's variables."""

    shapes: tuple[tuple[int, ...], ...]  # of each variable
    specs: tuple[GradientSpec, ...]  # of each variable. Only gradients of one spec are stacked
    sharding: Sharding  # how the variables lie on the devices
    levels: bool  # whether the levels of all gradients are measured
    max_abs: bool  # whether the loss-scaling rule needs the largest gradient of every step
    norm: bool  # whether the rule that leaves out spikes needs the norm of every step
    sizes: tuple[int, ...] = dataclasses.field(init=False)  # each variable's number of elements
    # Whether it is split over devices. Its gradient is then not stacked with others
    split: tuple[bool, ...] = dataclasses.field(init=False)
    cuts: tuple[details.Cut, ...] = dataclasses.field(init=False)  # how its shard is sampled
    # For eager steps:
    eagerly: "MeasurePlan" = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shards = self.sharding.shard_shapes(self.shapes)
        split = tuple(shard != shape for shard, shape in zip(shards, self.shapes, strict=True))
        eager = self.sharding.eagerly()
        other = self if eager is self.sharding else dataclasses.replace(self, sharding=eager)
        object.__setattr__(self, "eagerly", other)
        object.__setattr__(self, "sizes", tuple(map(math.prod, self.shapes)))
        object.__setattr__(self, "split", split)
        object.__setattr__(self, "cuts", tuple(map(details.cut, self.shapes, shards)))

    def group_gradients(self, gradients: Sequence[Gradient]) -> list[GradientGroup]:
        """Stack the small gradients, of one a variable or None, that can be measured together."""
        return group_gradients(gradients, self.sizes, self.specs, self.split)

    def per_target(
        self,
        function: Callable[..., Sequence[Tensor]],
        shapes: Sequence[tuple[int, ...]],
        of: Sequence[int | str | None],
        tensors: Sequence[Any],
        apart: bool = False,
    ) -> Sequence[Tensor]:
        """`backend.per_target`, on each device with the shards it holds; see `Sharding.each`."""
        if self.sharding is not UNSHARDED:
            function = self.sharding.each(function, of, apart)
        return backend.per_target(function, shapes, *tensors)

    def of_gradients(self, table: Tensor) -> Tensor:
        """Return `[num_variables, ...]` with zeros in the rows of values that are not gradients."""
        is_next_value = [spec.is_next_value for spec in self.specs]
        if not any(is_next_value):
            return table
        return ops.where(ops.convert_to_tensor(is_next_value)[:, None], 0.0, table)

    def measures_with_the_check(self, way: _Way) -> bool:
        """Tell whether every step measures the levels of all gradients."""
        return self.max_abs or ((self.norm or self.levels) and way.with_the_check)


class Gradients(NamedTuple):
    """The gradients of a step; if not divided yet, with the loss scale and how to divide by it."""

    groups: Sequence[GradientGroup]  # from `plan.group_gradients`
    scale: Any = ()  # the state of the loss-scaling rule, a NamedTuple
    # (values of the groups, their specs, scale) -> the values divided by the scale
    divide: Callable[[list[Gradient], list[Any], Any], list[Gradient]] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """What a program for one target takes, to be put back by `filled`."""
        return [*self.scale, *(group.values for group in self.groups)]

    @property
    def of(self) -> list[int | None]:
        """For each tensor, the variable whose sharding it has, or None; see `Sharding.each`."""
        return [None] * len(self.scale) + _variables_of(self.groups)

    def filled(self, tensors: Sequence[Tensor]) -> "Gradients":
        """The same with these tensors."""
        number = len(self.scale)
        groups = refilled(self.groups, tensors[number:])
        scale = type(self.scale)(*tensors[:number]) if number else ()
        return self._replace(groups=groups, scale=scale)

    def true(self) -> Sequence[GradientGroup]:
        """The gradients after the division by the loss scale."""
        if self.divide is None:
            return self.groups
        values = [group.values for group in self.groups]
        specs = [group.spec for group in self.groups]
        return refilled(self.groups, self.divide(values, specs, self.scale))


def inspect_gradients(
    plan: MeasurePlan,
    gradients: Gradients,
    loss_nonfinite: Tensor,
    before: StepNumbers,
    due: Due | None,
) -> Inspection:
    """Look at the gradients of a step: are they all finite, and how large are they?

    Args:
        plan: the optimizer's plan.
        gradients: of the variables that it was made for.
        loss_nonfinite: float32[], above 0 if the loss is known not to be finite.
        before: the counters, which the host reads in the same transfer as the flags.
        due: from `Telemetry.at_start`; None if nothing is measured.
    """
    nonfinite, levels = _check(plan, gradients)
    # Outside XLA only overflowing steps compute which variable is to blame.
    blamed = measure.blame(nonfinite) if gradients.divide else None
    (number,) = blamed[:1] if blamed else backend.reduce_columns((nonfinite,), (0,))
    sampling, counters = [due.sampling] if due else [], before.tensors
    norm = [measure.global_norm(plan.of_gradients(levels))] if plan.norm else []
    measured = [number, *norm]
    others = [loss_nonfinite, *counters, *sampling]
    (number, *norm), (loss_nonfinite, *read) = backend.read_numbers(measured, others)
    finite, loss_finite = number == 0, loss_nonfinite == 0
    before = before.filled(read[: len(counters)])
    on_host = isinstance(finite, np.bool_)
    seen = Inspection(finite, loss_finite, before, nonfinite, blamed, on_host=on_host)
    if plan.max_abs:
        largest = ops.max(plan.of_gradients(levels)[:, measure.MAX_ABS], initial=0)
        seen = seen._replace(max_abs=largest)
    if plan.norm:
        norms = plan.of_gradients(levels)[:, measure.L2_NORM]
        seen = seen._replace(norm=norm[0], norms=norms)
    if due is None:
        return seen
    due_levels, due_details = due.flags(before.step, before.consecutive_skips, read[-1])
    due_levels = due_levels | ~finite  # an overflowing step always measures its levels
    seen = seen._replace(due_levels=due_levels, due_details=due_details)
    if on_host and not due_levels:
        return seen
    return seen._replace(levels=_complete(plan, gradients, due_levels, levels, due.health))


def _check(plan: MeasurePlan, gradients: Gradients) -> tuple[Tensor, Tensor]:
    """float32[n] and float32[n, 4]: non-finite gradients, and levels measured in the same pass."""
    number = len(plan.sizes)

    def check(target: str, *tensors: Any) -> Sequence[Tensor]:
        way = _WAYS[target]
        true = gradients.filled(tensors).true()
        if plan.measures_with_the_check(way):
            levels = _levels(plan, true, target)
            return measure.nonfinite_of(levels), levels
        nonfinite = measure.find_nonfinite(
            true, number, together=way.together, sharding=plan.sharding
        )
        if not plan.norm:
            return nonfinite, ops.zeros((number, len(LEVELS)), "float32")
        columns = [ops.zeros((number,), "float32")] * len(LEVELS)
        columns[measure.L2_NORM] = measure.find_norms(true, number, sharding=plan.sharding)
        return nonfinite, ops.stack(columns, axis=1)

    shapes = [(number,), (number, len(LEVELS))]
    return tuple(plan.per_target(check, shapes, gradients.of, gradients.tensors))


def _complete(
    plan: MeasurePlan, gradients: Gradients, due: Tensor, levels: Tensor, health: Tensor
) -> Tensor:
    """float32[n, 4]: the levels of all gradients if `due`, else those of `health`."""

    def complete(target: str, due: Any, levels: Any, health: Any, *tensors: Any) -> list[Tensor]:
        previous = health[:, : len(LEVELS)]
        if plan.measures_with_the_check(_WAYS[target]):
            return [ops.where(due, plan.of_gradients(levels), previous)]

        def all_levels() -> Tensor:
            # Divide inside the branch: outside, every step would write the quotients to memory.
            return plan.of_gradients(_levels(plan, gradients.filled(tensors).true(), target))

        return [backend.branch(due, all_levels, previous)]

    shapes = [(len(plan.sizes), len(LEVELS))]
    tensors = due, levels, health, *gradients.tensors
    return plan.per_target(complete, shapes, [None, None, None, *gradients.of], tensors)[0]


def _levels(plan: MeasurePlan, groups: Sequence[GradientGroup], target: str) -> Tensor:
    if target == "host" and not any(group.stacked for group in groups):
        # Outside XLA stacks take time, and are made only in the steps that need them.
        gradients = {group.members[0]: group.values for group in groups}
        groups = plan.group_gradients([gradients.get(i) for i in range(len(plan.sizes))])
    together = _WAYS[target].together
    return measure.measure(groups, plan.sizes, together=together, sharding=plan.sharding)


def take_sample(
    plan: MeasurePlan, seen: Inspection, groups: Sequence[GradientGroup], weights: Sequence[Tensor]
) -> Inspection:
    """`seen` with a sample of the scaled gradients and of the weights; zeros if it is not due.

    Of variables that are split over devices, each device has the sample of its own shards.

    Args:
        plan: the optimizer's plan.
        seen: what `inspect_gradients` returned, including what is due.
        groups: the scaled gradients, from `plan.group_gradients`.
        weights: the value of each variable before the update.
    """
    cuts = plan.cuts
    number = 2 * sum(each.size for each in cuts)  # of gradients, and of weights

    def sample(target: str, due: Any, *tensors: Any) -> list[Tensor]:
        gradients = refilled(groups, tensors[: len(groups)])
        weights = tensors[len(groups) :]
        zeros = ops.zeros((number,), "float32")
        take = functools.partial(details.sample, gradients, weights, cuts, target, plan.sharding)
        if _WAYS[target].branches:
            return [backend.branch(due, take, zeros)]
        return [ops.where(due, take(), zeros)]

    tensors = [seen.due_details, *(group.values for group in groups), *weights]
    of = [None, *_variables_of(groups), *range(len(weights))]
    shapes = [(number * plan.sharding.num_devices,)]
    (before,) = plan.per_target(sample, shapes, of, tensors, apart=True)
    # Otherwise XLA may update the weights first, and keep a copy of all of them for the sample.
    finite = backend.order_after(seen.finite, before)
    order = details.layout(groups, len(plan.shapes))
    return seen._replace(finite=finite, sample=before, order=order)


def _variables_of(groups: Sequence[GradientGroup]) -> list[int | None]:
    """The variable of each group; None for stacks, which are whole on every device."""
    return [None if group.stacked else group.members[0] for group in groups]


def refilled(groups: Sequence[GradientGroup], values: Sequence[Any]) -> list[GradientGroup]:
    """The groups with these values."""
    return [GradientGroup(x, *group[1:]) for group, x in zip(groups, values, strict=True)]
