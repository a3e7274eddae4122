"""One training step of the loss-scaling optimizer: the whole sequence, told once and in order.

It is the same on every backend and under every distribution strategy. `backend.run_step` decides
how its parts run, once or on several replicas, and says so by the argument `replicas`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from kmp._backend import UNSHARDED, backend
from kmp._backend.types import ON_HOST, Gradient, Tensor, Variable
from kmp._keras.optimizer import layouts_of
from kmp.half_memory import gradient_dtypes
from kmp.health.measure import GradientGroup
from kmp.health.plan import (
    Gradients,
    GradientSpec,
    Inspection,
    MeasurePlan,
    StepNumbers,
    inspect_gradients,
    take_sample,
)
from kmp.health.spikes import SkipSpikes
from kmp.health.telemetry import Telemetry
from kmp.precision.trees import cast_floats
from kmp.scaling.inner import DroppedWindow
from kmp.scaling.rules import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale


@dataclasses.dataclass(frozen=True)
class Counters:
    """The variables that a step moves whether it is applied or skipped."""

    rule: Any  # the rule's state: its NamedTuple, with a variable in each field
    peak: Any  # the same of the rule that leaves out spikes; () if there is none
    spikes: Variable | None  # int32[], steps left out as spikes so far
    consecutive_skips: Variable  # int32[], overflows in a row up to now
    skipped_steps: Variable  # int32[], skipped steps so far
    steps: Variable  # int[], all steps so far
    loss_nonfinite: Variable  # float32[], above 0 if the present loss is known not to be finite

    @property
    def state(self) -> Any:
        """What the rule's `next` takes."""
        return _read(self.rule)

    @property
    def counts(self) -> dict[str, Variable]:
        """The fields of the rule's state that mean something to this rule alone."""
        fields = self.rule._asdict().items()
        return {name: v for name, v in fields if name not in ("scale", "overflows")}

    def numbers(self) -> StepNumbers:
        """What the step that now begins reads of them."""
        steps, skips = backend.read(None, [self.steps, self.consecutive_skips])
        return StepNumbers(
            step=ops.cast(steps, "int32") + 1,
            consecutive_skips=skips,
            rule=self.state,
            peak=_read(self.peak),
        )

    def assign_state(self, before: Any, after: Any) -> None:
        """Write the rule's state but for `consecutive_skips`, if that is one of its fields."""
        for variable, old, new in zip(self.rule, before, after, strict=True):
            if variable is not self.consecutive_skips:
                _assign(variable, old, new)


@dataclasses.dataclass(frozen=True)
class ScaledStep:
    """What the steps of one optimizer have in common."""

    inner: Any  # the Keras optimizer that updates the variables
    variables: Sequence[Variable]  # those that it was built with
    plan: MeasurePlan  # what is measured
    counters: Counters
    telemetry: Telemetry | None  # the measurements; None if nothing is measured
    window: DroppedWindow | None  # what an overflow discards beside its micro-batch, if anything
    spikes: SkipSpikes | None  # the rule that leaves out spikes, if any

    def run(
        self,
        rule: LossScale,
        measures_details: bool,
        places: Sequence[int],
        replicas: Any,
        scaled: list[Gradient],
        variables: list[Variable],
    ) -> None:
        """Divide, look, decide, update, record.

        Args:
            rule: how the loss scale moves.
            measures_details: whether weights, updates and exponents are measured when due.
            places: the place of each of `variables` among those that the optimizer was built with.
            replicas: how the parts run, from `backend.run_step`.
            scaled: gradients of the scaled loss, already summed over the replicas.
            variables: one for each of them.
        """
        counters, specs = self.counters, [self.plan.specs[place] for place in places]
        if self.plan.sharding is not UNSHARDED:
            pairs = zip(places, scaled, strict=True)
            scaled = [x if x is None else self.plan.sharding.constrain(i, x) for i, x in pairs]

        def divide(scaled: list[Gradient]) -> list[Gradient]:  # each replica reads its own scale
            return _unscaled(rule, scaled, specs, counters.state)

        true = replicas.on_each(divide, scaled)
        before = counters.numbers()
        in_xla = backend.inside_xla()
        traced = in_xla and not backend.is_concrete(before.step)
        plan = self.plan if traced else self.plan.eagerly

        def groups(gradients: list[Gradient]) -> list[GradientGroup]:
            return self._groups(plan, replicas.local(gradients), places, in_xla)

        if traced:
            # Divide twice, here and in the update: XLA fuses both, and writes no true gradients.
            divide_by = functools.partial(_unscaled, rule)
            gradients = Gradients(groups(scaled), before.rule, divide_by)
        else:
            gradients = Gradients(groups(true))
        due = self.telemetry.at_start() if self.telemetry else None
        loss_nonfinite = replicas.loss_nonfinite(counters.loss_nonfinite)
        seen = inspect_gradients(plan, gradients, loss_nonfinite, before, due)
        if self.telemetry and measures_details and (not seen.on_host or seen.due_details):
            seen = take_sample(plan, seen, groups(scaled), self._weights())
        sound = seen.finite
        if self.spikes is not None:
            sound = sound & (seen.norm <= self.spikes.limit(seen.before.peak))
        applies = sound if self.window is None else ops.logical_and(sound, self.window.admits())
        replicas.update_if(applies, self.inner, true, variables)
        if self.spikes is not None:
            seen = self._record_spike(self.spikes, seen, seen.finite & ~sound)
        self._record(plan, rule, seen, applies, replicas.knows_loss)
        if self.window is not None:
            self.window.record(sound)

    def forget_scale_of(self, before: Any, nonfinite: Tensor) -> None:
        """If the last step's loss was `nonfinite`, bool[], undo what the step did to the scale.

        A lower scale cannot help then. On TensorFlow and PyTorch `scale_loss` records such a loss
        before the step; on JAX, which scales it in a pure function, call this after the step.
        """
        now = self.counters.state
        self.counters.assign_state(now, _kept_if(nonfinite, before, now))
        if self.telemetry is not None:
            self.telemetry.mark_loss(nonfinite)

    def _groups(
        self, plan: MeasurePlan, gradients: list[Gradient], places: Sequence[int], in_xla: bool
    ) -> list[GradientGroup]:
        """The gradients that hold numbers; inside XLA the small ones are stacked."""
        rows: list[Gradient] = [None] * len(self.variables)
        for gradient, place in zip(gradients, places, strict=True):
            rows[place] = gradient
        if in_xla:
            return plan.group_gradients(rows)
        dense, sizes = backend.are_dense(rows), plan.sizes
        held = ((i, x) for i, x in enumerate(rows) if x is not None and sizes[i])
        return [GradientGroup(x, (i,), False, is_dense=dense[i]) for i, x in held]

    def _record(
        self,
        plan: MeasurePlan,
        rule: LossScale,
        seen: Inspection,
        applied: Tensor,
        knows_loss: bool,
    ) -> None:
        """Write the next scale, the counters and the measurements."""
        counters, (step, skips, before, _) = self.counters, seen.before
        largest = () if seen.max_abs is None else (seen.max_abs,)
        after = _next_state(rule, before, seen.finite, *largest)
        nonfinite = ~(seen.finite | seen.loss_finite)
        if knows_loss and (not seen.on_host or nonfinite):
            after = _kept_if(nonfinite, before, after)
        if self.telemetry and (not seen.on_host or seen.due_levels):
            self.telemetry.record(plan, seen, step, before.scale, self._weights)
        counters.assign_state(before, after)
        xp = np if seen.on_host else ops
        _assign(counters.consecutive_skips, skips, xp.where(seen.finite, 0, skips + 1))
        if self.window is not None or not (seen.on_host and applied):
            counters.skipped_steps.assign_add(ops.cast(ops.logical_not(applied), "int32"))
        if seen.on_host:
            counters.steps.assign(step)
        else:
            # Always 1, but computed from `finite`: at the end of data of unknown length TensorFlow
            # runs a step without data, which would count a constant 1.
            counters.steps.assign_add(ops.where(seen.finite, 1, 1))
        if not (seen.on_host and seen.loss_finite):
            counters.loss_nonfinite.assign(ops.zeros((), "float32"))

    def _record_spike(self, rule: SkipSpikes, seen: Inspection, spike: Tensor) -> Inspection:
        """Write the rule's state and the event; return what else the step may write down.

        The levels of a spike are not written: what reads them takes them for those of training.
        """
        counters, before = self.counters, seen.before
        after = rule.next(before.peak, seen.norm, seen.finite)
        for variable, old, new in zip(counters.peak, before.peak, after, strict=True):
            _assign(variable, old, new)
        if counters.spikes is not None and not (seen.on_host and not spike):
            counters.spikes.assign_add(ops.cast(spike, "int32"))
        if self.telemetry is None or (seen.on_host and not (spike or seen.due_levels)):
            return seen
        return self.telemetry.record_spike(seen, spike, rule.limit(before.peak))

    def _weights(self) -> list[Tensor]:
        return list(map(ops.convert_to_tensor, self.variables))


def _read(variables: Any) -> Any:
    """The values of a NamedTuple of variables, in a NamedTuple of its kind; of () the same."""
    return type(variables)(*backend.read(None, list(variables))) if variables else variables


def _next_state(rule: LossScale, state: Any, finite: Tensor, *max_abs: Tensor) -> Any:
    """`rule.next`, with NumPy scalars for kmp's rules if the state is on the host.

    A user's rule may call the backend's operations, so it always gets tensors.
    """
    reads_host = type(rule) in (NoOpLossScale, StaticLossScale, DynamicLossScale)
    if isinstance(finite, ON_HOST) and not reads_host:
        state, finite = type(state)(*map(backend.constant, state)), backend.constant(finite)
    return rule.next(state, finite, *max_abs)


def _assign(variable: Variable, before: Tensor, after: Tensor) -> None:
    """Assign a scalar, unless the host knows that it has not changed."""
    if not isinstance(after, ON_HOST) or after != before:
        variable.assign(after)


def _kept_if(nonfinite: Tensor, before: Any, after: Any) -> Any:
    """`after`, or `before` if a loss was `nonfinite`: no scale helps then."""
    return type(after)(*(ops.where(nonfinite, x, y) for x, y in zip(before, after, strict=True)))


def _unscaled(
    rule: LossScale,
    scaled: list[Gradient],
    specs: Sequence[GradientSpec],
    state: Any,
) -> list[Gradient]:
    """The true gradients: divided by the scale that the loss was multiplied by."""

    def true(scaled: Gradient, divided: Gradient, spec: GradientSpec) -> Gradient:
        if spec.is_next_value:
            return scaled
        if spec.dtype is None:
            return divided
        return cast_floats(divided, spec.dtype)

    return list(map(true, scaled, rule.unscale(scaled, state), specs))


def plan_for(
    variables: Sequence[Variable], inner: Any, *, measures: bool, max_abs: bool, norm: bool
) -> MeasurePlan:
    """Plan what is measured of the gradients of the variables that `inner` updates."""
    dtypes = gradient_dtypes(inner, variables)
    layouts = layouts_of(variables) or backend.placements(variables)
    return MeasurePlan(
        shapes=tuple(tuple(v.shape) for v in variables),
        specs=tuple(
            GradientSpec(dtype, getattr(v, "overwrite_with_gradient", False))
            for v, dtype in zip(variables, dtypes, strict=True)
        ),
        sharding=backend.sharding(layouts),
        levels=measures,
        max_abs=max_abs,
        norm=norm,
    )
