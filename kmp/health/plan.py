"""What a step measures of its gradients, planned once when the optimizer is built.

The plan depends on variables and settings, not on the device. How to measure on a device is decided
when the step is compiled for it: `_backend.per_target` passes the name of the target to the
functions here, and `_WAYS` has an entry for each target.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from keras import ops

from kmp import _backend
from kmp._backend.types import Due, Gradient, Tensor
from kmp.health import details, measure
from kmp.health.measure import LEVELS, Part, gather

# Divides the gradients by the loss scale, which the second argument holds.
Divide = Callable[[Sequence[Part], Sequence[Tensor]], list[Part]]


class _Way(NamedTuple):
    """How a target measures gradients.

    Attributes:
        with_the_check: for small and for large gradients, whether every step measures their
            levels in the same pass that looks for inf and NaN.
        together: whether large gradients of one shape are reduced as a stack.
        branches: whether to use conditionals. They save work, but stall an accelerator.
    """

    with_the_check: tuple[bool, bool]
    together: bool
    branches: bool


_WAYS = {
    # XLA fuses a stack into its reduction on GPUs; elsewhere it writes the stack to memory.
    "gpu": _Way(with_the_check=(True, True), together=True, branches=False),
    "tpu": _Way(with_the_check=(True, True), together=False, branches=False),
    # Compiling one more reduction would take longer than measuring small gradients ever does.
    "cpu": _Way(with_the_check=(True, False), together=False, branches=True),
    "host": _Way(with_the_check=(False, False), together=False, branches=True),  # outside XLA
    "torch.compile": _Way(with_the_check=(True, True), together=False, branches=False),
}


class Kind(NamedTuple):
    """How the gradient of a variable is unscaled.

    Attributes:
        dtype: the dtype that it is cast to afterwards, or None.
        overwrites: whether it is not a gradient but the variable's next value, as for float8's
            scales. Such a value is never scaled.
    """

    dtype: str | None = None
    overwrites: bool = False


class Look(NamedTuple):
    """What a step knows about its gradients before it writes anything.

    Attributes:
        finite: bool[], whether all gradients are finite.
        loss_finite: bool[], False if the loss is known not to be finite.
        nonfinite: float32[num_variables], above 0 where a gradient is not finite.
        blamed: int32[] and int32[], from `measure.blame`; None where nobody has asked yet.
        due_levels: bool[], whether this step measures levels; None if nothing is measured.
        due_details: bool[], whether this step measures details; None if nothing is measured.
        levels: float32[num_variables, 4], from `measure.measure`, possibly of an earlier step.
        max_abs: float32[], the largest true gradient, if the plan asks for it.
        sample: float32[2 * n], from `details.sample`, if details are measured.
        order: the order of the variables in the sample.
    """

    finite: Tensor
    loss_finite: Tensor
    nonfinite: Tensor
    blamed: tuple[Tensor, Tensor] | None
    due_levels: Tensor | None = None
    due_details: Tensor | None = None
    levels: Tensor | None = None
    max_abs: Tensor | None = None
    sample: Tensor | None = None
    order: Sequence[int] = ()


@dataclasses.dataclass(frozen=True)
class MeasurePlan:
    """What to measure of the gradients of an optimizer's variables.

    Attributes:
        shapes: the shape of each variable.
        kinds: how each gradient is unscaled. Only gradients of one kind are stacked.
        shards: into how many pieces each axis of each variable is split over devices. The gradient
            of a variable that is split is reduced by itself, because stacking would move it.
        levels: whether the levels of all gradients are measured.
        max_abs: whether the loss-scaling rule needs the largest gradient of every step.
    """

    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[Kind, ...]
    shards: tuple[tuple[int, ...], ...]
    levels: bool
    max_abs: bool

    def __post_init__(self):
        # Now: torch.compile cannot trace the lock that `cached_property` takes on Python 3.11.
        for name in ("sizes", "split", "cuts"):
            getattr(self, name)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Each variable's number of elements."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @functools.cached_property
    def split(self) -> tuple[bool, ...]:
        """Whether each variable is split over devices."""
        return tuple(max(shards, default=1) > 1 for shards in self.shards)

    @functools.cached_property
    def cuts(self) -> tuple[details.Cut, ...]:
        """How each variable is sampled."""
        return tuple(map(details.cut, self.shapes, self.shards))

    def gather(self, gradients: Sequence[Gradient]) -> list[Part]:
        """Stack the small gradients that can be measured together.

        Args:
            gradients: one for each variable, or None.
        """
        return gather(gradients, self.sizes, self.kinds, self.split)

    def of_gradients(self, table: Tensor) -> Tensor:
        """Return `[num_variables, ...]` with zeros in the rows of values that are not gradients."""
        overwrites = [kind.overwrites for kind in self.kinds]
        if not any(overwrites):
            return table
        return ops.where(ops.convert_to_tensor(overwrites)[:, None], 0.0, table)

    def is_checked_with_levels(self, part: Part, way: _Way) -> bool:
        """Tell whether every step measures the levels of a part."""
        small, large = way.with_the_check
        return self.max_abs or (self.levels and (small if part.stacked else large))


def look(
    plan: MeasurePlan,
    parts: Sequence[Part],
    divide: Divide,
    scale: Sequence[Tensor],
    loss_nonfinite: Tensor,
    cadence: tuple[Due, Sequence[Tensor]] | None,
    previous: Tensor | None,
) -> Look:
    """Look at the gradients of a step: are they all finite, and how large are they?

    Args:
        plan: the optimizer's plan.
        parts: the gradients, from `plan.gather`.
        divide: divides parts by the loss scale.
        scale: the loss scale, as `divide` takes it.
        loss_nonfinite: float32[], above 0 if the loss is known not to be finite.
        cadence: what tells whether levels and details are due, and what that takes, from
            `Telemetry.cadence`; None if nothing is measured.
        previous: float32[num_variables, 4], the levels of the last measured step.
    """
    nonfinite, levels = _check(plan, parts, divide, scale)
    # Outside XLA the few steps that overflow ask for the culprit; the others need only a number.
    blamed = measure.blame(nonfinite) if _backend.inside_xla() else None
    (number,) = blamed[:1] if blamed else _backend.reduce_columns((nonfinite,), (0,))
    due, tensors = cadence or (None, ())
    finite, loss_finite, flags = _backend.flags(number, loss_nonfinite, due, *tensors)
    largest = None
    if plan.max_abs:
        largest = ops.max(plan.of_gradients(levels)[:, measure.MAX_ABS], initial=0)
    if flags is None:
        return Look(finite, loss_finite, nonfinite, blamed, max_abs=largest)
    # An overflowing step always measures its levels. (Operators rather than ops, because on PyTorch
    # the flags are on the host.)
    due_levels, due_details = flags[0] | ~finite, flags[1]
    levels = _complete(plan, parts, divide, scale, due_levels, levels, previous)
    return Look(finite, loss_finite, nonfinite, blamed, due_levels, due_details, levels, largest)


def _check(
    plan: MeasurePlan, parts: Sequence[Part], divide: Divide, scale: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """float32[n] and float32[n, 4]: non-finite gradients, and levels measured in the same pass."""
    number = len(plan.sizes)

    def check(target: str, *tensors: Any) -> Sequence[Tensor]:
        way = _WAYS[target]
        true = divide(_refilled(parts, tensors[len(scale) :]), tensors[: len(scale)])
        always = [part for part in true if plan.is_checked_with_levels(part, way)]
        others = [part for part in true if not plan.is_checked_with_levels(part, way)]
        if not always:
            nonfinite = measure.find_nonfinite(others, number, together=way.together)
            return nonfinite, ops.zeros((number, len(LEVELS)), "float32")
        levels = _levels(plan, always, target)
        nonfinite = measure.nonfinite_of(levels)
        if others:
            found = measure.find_nonfinite(others, number, together=way.together)
            nonfinite = nonfinite + found
        return nonfinite, levels

    shapes = [(number,), (number, len(LEVELS))]
    values = [part.values for part in parts]
    nonfinite, levels = _backend.per_target(check, shapes, *scale, *values)
    return nonfinite, levels


def _complete(
    plan: MeasurePlan,
    parts: Sequence[Part],
    divide: Divide,
    scale: Sequence[Tensor],
    due: Tensor,
    levels: Tensor,
    previous: Any,
) -> Tensor:
    """float32[n, 4]: the levels of all gradients if `due`, else `previous`."""

    def complete(target: str, due: Any, levels: Any, previous: Any, *tensors: Any) -> list[Tensor]:
        way = _WAYS[target]
        refilled = _refilled(parts, tensors[len(scale) :])
        others = [part for part in refilled if not plan.is_checked_with_levels(part, way)]

        def all_levels() -> Tensor:
            if not others:
                return plan.of_gradients(levels)
            # Divide inside the branch: outside, every step would write the quotients to memory.
            true = divide(others, tensors[: len(scale)])
            return plan.of_gradients(levels + _levels(plan, true, target))

        if (others and way.branches) or _backend.known(due) is not None:
            return [_backend.compute_if(due, all_levels, previous)]
        return [ops.where(due, all_levels(), previous)]

    shapes = [(len(plan.sizes), len(LEVELS))]
    values = [part.values for part in parts]
    return _backend.per_target(complete, shapes, due, levels, previous, *scale, *values)[0]


def _levels(plan: MeasurePlan, parts: Sequence[Part], target: str) -> Tensor:
    if target == "host" and not any(part.stacked for part in parts):
        # Outside XLA stacks take time, and are made only in the steps that need them.
        gradients: list[Gradient] = [None] * len(plan.sizes)
        for part in parts:
            gradients[part.members[0]] = part.values
        parts = plan.gather(gradients)
    return measure.measure(parts, plan.sizes, together=_WAYS[target].together)


def take_sample(
    plan: MeasurePlan, seen: Look, parts: Sequence[Part], weights: Sequence[Tensor]
) -> Look:
    """Sample the scaled gradients, and the weights before the update, if details are due.

    Args:
        plan: the optimizer's plan.
        seen: what `look` returned, including what is due.
        parts: the scaled gradients, from `plan.gather`.
        weights: the current value of each variable.

    Returns:
        `seen` with the sample; zeros if details are not due.
    """
    cuts = plan.cuts
    number = details.size_before(cuts)

    def sample(target: str, due: Any, *tensors: Any) -> list[Tensor]:
        refilled = _refilled(parts, tensors[: len(parts)])
        weights = tensors[len(parts) :]
        zeros = ops.zeros((number,), "float32")
        if _WAYS[target].branches:
            taken = lambda: details.sample(refilled, weights, cuts, target)  # noqa: E731
            return [_backend.compute_if(due, taken, zeros)]
        return [ops.where(due, details.sample(refilled, weights, cuts, target), zeros)]

    values = [part.values for part in parts]
    (before,) = _backend.per_target(sample, [(number,)], seen.due_details, *values, *weights)
    # Otherwise XLA may update the weights first, and keep a copy of all of them for the sample.
    finite = _backend.after(seen.finite, before)
    return seen._replace(
        finite=finite, sample=before, order=details.layout(parts, len(plan.shapes))
    )


def _refilled(parts: Sequence[Part], values: Sequence[Any]) -> list[Part]:
    return [Part(x, *part[1:]) for part, x in zip(parts, values, strict=True)]
