"""One training step of the loss-scaling optimizer: the whole sequence, told once and in order.

It is the same on every backend and under every distribution strategy. `backend.run_step` decides
how its parts run, once or on several replicas, and says so by the argument `replicas`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from keras import ops

from kmp._backend import backend
from kmp._backend.types import Gradient, Tensor, Variable
from kmp._keras.optimizer import layouts_of
from kmp.half_memory import gradient_dtypes
from kmp.health.measure import GradientGroup
from kmp.health.plan import Gradients, GradientSpec, Look, MeasurePlan, look, take_sample
from kmp.health.telemetry import Telemetry
from kmp.precision.trees import cast_floats
from kmp.scaling.inner import DroppedWindow
from kmp.scaling.rules import (
    ON_HOST,
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    ScaleState,
    StaticLossScale,
)


@dataclasses.dataclass(frozen=True)
class Counters:
    """The variables that a step moves whether it is applied or skipped."""

    scale: Variable  # float32[], the loss scale
    finite_steps: Variable  # int[], the rule's counter of finite steps
    overflows: Variable  # int32[], skipped steps in a row up to now
    skipped_steps: Variable  # int32[], skipped steps so far
    steps: Variable  # int[], all steps so far
    loss_nonfinite: Variable  # float32[], above 0 if the present loss is known not to be finite

    @property
    def state(self) -> ScaleState:
        """What the rule's `next` takes."""
        return ScaleState(*backend.read(None, [self.scale, self.finite_steps, self.overflows]))


@dataclasses.dataclass(frozen=True)
class ScaledStep:
    """What the steps of one optimizer have in common."""

    inner: Any  # the Keras optimizer that updates the variables
    variables: Sequence[Variable]  # those that it was built with
    plan: MeasurePlan  # what is measured
    counters: Counters
    telemetry: Telemetry | None  # the measurements; None if nothing is measured
    window: DroppedWindow | None  # what an overflow discards beside its micro-batch, if anything

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
        specs = [self.plan.specs[place] for place in places]
        if any(self.plan.split):
            pairs = zip(places, scaled, strict=True)
            scaled = [x if x is None else self.plan.sharding.constrain(i, x) for i, x in pairs]

        def divide(scaled: list[Gradient]) -> list[Gradient]:  # each replica reads its own scale
            return _unscaled(rule, scaled, specs, self.counters.state)

        true = replicas.on_each(divide, scaled)
        before = self.counters.state
        step = ops.cast(ops.convert_to_tensor(self.counters.steps), "int32") + 1  # its number
        in_xla = backend.inside_xla()
        traced = in_xla and not backend.is_concrete(before.scale)
        plan = self.plan if traced else self.plan.eagerly

        def groups(gradients: list[Gradient]) -> list[GradientGroup]:
            return self._groups(plan, replicas.local(gradients), places, in_xla)

        if traced:
            # Divide twice, here and in the update: XLA fuses both, and writes no true gradients.
            gradients = Gradients(groups(scaled), before, functools.partial(_unscaled, rule))
        else:
            gradients = Gradients(groups(true))
        due = self.telemetry.at_start() if self.telemetry else None
        loss_nonfinite = replicas.loss_nonfinite(self.counters.loss_nonfinite)
        seen = look(plan, gradients, loss_nonfinite, [step, *before], due)
        if self.telemetry and measures_details and (not seen.on_host or seen.due_details):
            seen = take_sample(plan, seen, groups(scaled), self._weights())
        applies = seen.finite
        if self.window is not None:
            applies = ops.logical_and(seen.finite, self.window.admits())
        replicas.update_if(applies, self.inner, true, variables)
        self._record(plan, rule, seen, applies, replicas.knows_loss)

    def forget_scale_of(self, before: ScaleState, nonfinite: Tensor) -> None:
        """If the last step's loss was `nonfinite`, bool[], undo what the step did to the scale.

        A lower scale cannot help then. On TensorFlow and PyTorch `scale_loss` records such a loss
        before the step; on JAX, which scales it in a pure function, call this after the step.
        """
        after = _kept_if(nonfinite, before, self.counters.state)
        self.counters.scale.assign(after.scale)
        self.counters.finite_steps.assign(after.finite_steps)
        if self.telemetry is not None:
            self.telemetry.mark_loss(nonfinite)

    def _groups(
        self, plan: MeasurePlan, gradients: list[Gradient], places: Sequence[int], in_xla: bool
    ) -> list[GradientGroup]:
        """Gradients that hold numbers; small ones stacked inside XLA, which writes no stack."""
        rows: list[Gradient] = [None] * len(self.variables)
        for gradient, place in zip(gradients, places, strict=True):
            rows[place] = gradient
        if in_xla:
            return plan.group_gradients(rows)
        dense, sizes = backend.are_dense(rows), plan.sizes
        held = ((i, x) for i, x in enumerate(rows) if x is not None and sizes[i])
        return [GradientGroup(x, (i,), False, is_dense=dense[i]) for i, x in held]

    def _record(
        self, plan: MeasurePlan, rule: LossScale, seen: Look, applied: Tensor, knows_loss: bool
    ) -> None:
        """Write the next scale, the counters and the measurements."""
        counters, (step, *state) = self.counters, seen.numbers
        before = ScaleState(*state)
        largest = () if seen.max_abs is None else (seen.max_abs,)
        after = _next_state(rule, before, seen.finite, *largest)
        nonfinite = ~(seen.finite | seen.loss_finite)
        if knows_loss and (not seen.on_host or nonfinite):
            after = _kept_if(nonfinite, before, after)
        if self.telemetry and (not seen.on_host or seen.due_levels):
            self.telemetry.record(plan, seen, step, before.scale, self._weights)
        _assign(counters.scale, before.scale, after.scale)
        _assign(counters.finite_steps, before.finite_steps, after.finite_steps)
        _assign(counters.overflows, before.overflows, after.overflows)
        if self.window is not None or not (seen.on_host and seen.finite):
            counters.skipped_steps.assign_add(ops.cast(ops.logical_not(applied), "int32"))
        if seen.on_host:
            counters.steps.assign(step)
        else:
            # Always 1, but computed from `finite`: at the end of data of unknown length TensorFlow
            # runs a step without data, which would count a constant 1.
            counters.steps.assign_add(ops.where(seen.finite, 1, 1))
        if not (seen.on_host and seen.loss_finite):
            counters.loss_nonfinite.assign(ops.zeros((), "float32"))
        if self.window is not None:
            self.window.record(seen.finite)

    def _weights(self) -> list[Tensor]:
        return list(map(ops.convert_to_tensor, self.variables))


def _next_state(rule: LossScale, state: ScaleState, finite: Tensor, *max_abs: Tensor) -> ScaleState:
    """`rule.next`, with NumPy scalars for kmp's rules if the state is on the host.

    A user's rule may call the backend's operations, so it always gets tensors.
    """
    reads_host = type(rule) in (NoOpLossScale, StaticLossScale, DynamicLossScale)
    if isinstance(finite, ON_HOST) and not reads_host:
        state, finite = ScaleState(*map(backend.constant, state)), backend.constant(finite)
    return rule.next(state, finite, *max_abs)


def _assign(variable: Variable, before: Tensor, after: Tensor) -> None:
    """Assign a scalar, unless the host knows that it has not changed."""
    if not isinstance(after, ON_HOST) or after != before:
        variable.assign(after)


def _kept_if(nonfinite: Tensor, before: ScaleState, after: ScaleState) -> ScaleState:
    """`after`, but with the scale of `before` if a loss was `nonfinite`: no scale helps then."""
    steps = ops.minimum(before.finite_steps, after.finite_steps)
    return after._replace(
        scale=ops.where(nonfinite, before.scale, after.scale),
        finite_steps=ops.where(nonfinite, steps, after.finite_steps),
    )


def _unscaled(
    rule: LossScale,
    scaled: list[Gradient],
    specs: Sequence[GradientSpec],
    state: Sequence[Tensor],
) -> list[Gradient]:
    """The true gradients: divided by the scale that the loss was multiplied by."""

    def true(scaled: Gradient, divided: Gradient, spec: GradientSpec) -> Gradient:
        if spec.is_next_value:
            return scaled
        if spec.dtype is None:
            return divided
        return cast_floats(divided, spec.dtype)

    return list(map(true, scaled, rule.unscale(scaled, ScaleState(*state)), specs))


def plan_for(
    variables: Sequence[Variable], inner: Any, measures: bool, max_abs: bool
) -> MeasurePlan:
    """Plan what is measured of the gradients of the variables that `inner` updates."""
    dtypes = gradient_dtypes(inner, variables)
    return MeasurePlan(
        shapes=tuple(tuple(v.shape) for v in variables),
        specs=tuple(
            GradientSpec(dtype, getattr(v, "overwrite_with_gradient", False))
            for v, dtype in zip(variables, dtypes, strict=True)
        ),
        sharding=backend.sharding(layouts_of(variables)),
        levels=measures,
        max_abs=max_abs,
    )
