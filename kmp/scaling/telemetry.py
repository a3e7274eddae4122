"""The measurements that an optimizer keeps between steps."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops

from kmp import _backend
from kmp._backend.types import Tensor, Variable
from kmp._common import whole_number
from kmp.health import details, measure
from kmp.health.plan import Look, MeasurePlan

AddVariable = Callable[..., Variable]  # name, shape, dtype


class Telemetry:
    """The variables that hold the measurements: when a step writes them, and what.

    Args:
        add: creates a variable of the optimizer.
        rows: how many variables the optimizer updates.

    Attributes:
        health: float32[rows, 5], columns as in `measure.COLUMNS`.
        details: float32[rows, 50], columns as in `details.COLUMNS`, then the exponents' counts.
        events: float32[16, 5], columns as in `measure.EVENT_COLUMNS`.
        sampling: int32[4], see `measure.due`.
    """

    def __init__(self, add: AddVariable, rows: int):
        self.health = add("gradient_health", (rows, len(measure.COLUMNS)))
        self.details = add("gradient_details", (rows, len(details.COLUMNS) + details.BINS))
        self.events = add("overflow_events", (measure.NUM_EVENTS, len(measure.EVENT_COLUMNS)))
        self.sampling = add("sampling", (4,), "int32")

    @property
    def levels(self) -> Tensor:
        """float32[rows, 4]: the levels of the last measured step."""
        return _backend.read(None, [self.health])[0][:, : measure.OVERFLOW_STEPS]

    @property
    def cadence(self) -> list[Tensor]:
        """What `measure.due` takes beside the number of the step: `sampling` and `events`."""
        return _backend.read(None, [self.sampling, self.events])

    def sample(self, update_freq: Any, and_at: int) -> None:
        """Choose how often steps are measured; see `LossScaleOptimizer.sample_gradients`."""
        interval = whole_number("update_freq", update_freq, "sample_gradients")
        noted = ops.convert_to_numpy(self.sampling)[2:]
        self.sampling.assign(np.array([interval, and_at, *noted], "int32"))

    def record(
        self,
        plan: MeasurePlan,
        seen: Look,
        step: Tensor,
        scale: Tensor,
        weights: Callable[[], Sequence[Tensor]],
    ) -> None:
        """Write down what a step has seen, if its levels are due; else all would stay as it is.

        Args:
            plan: the optimizer's plan.
            seen: from `kmp.health.plan.look`.
            step: int32[], the number of the step.
            scale: float32[], the scale that its loss was multiplied with.
            weights: returns the values of the variables after the update.
        """
        if not _backend.known(seen.finite):
            blamed = seen.blamed or measure.blame(seen.nonfinite)
            events = ops.convert_to_tensor(self.events)
            self.events.assign(measure.add_event(events, step, scale, blamed, seen.loss_finite))
        previous = ops.convert_to_tensor(self.health)
        self.health.assign(measure.accumulate(seen.levels, seen.nonfinite, previous))
        due_levels, due_details = seen.due_levels, seen.due_details
        if seen.sample is None:
            due_details = ops.zeros_like(due_details)
        else:
            self._record_details(plan, seen, due_details, weights())
        sampling = ops.convert_to_tensor(self.sampling)
        self.sampling.assign(measure.sampled(sampling, step, due_levels, due_details))

    def mark_loss(self, nonfinite: Tensor) -> None:
        """Note for the last overflow that its loss was not finite, if `nonfinite`, a bool[]."""
        events = ops.convert_to_tensor(self.events)
        self.events.assign(measure.mark_loss(events, nonfinite))

    def _record_details(
        self, plan: MeasurePlan, seen: Look, due: Tensor, weights: Sequence[Tensor]
    ) -> None:
        def measured(target: str, due: Any, before: Any, previous: Any, *weights: Any) -> list:
            def table() -> Tensor:
                after = details.sample_weights(weights, plan.cuts, seen.order, target)
                found = details.measure_sample(before, after, plan.cuts, seen.order)
                return plan.of_gradients(found)

            return [_backend.compute_if(due, table, previous)]

        previous = ops.convert_to_tensor(self.details)
        tensors = (due, seen.sample, previous, *weights)
        shapes = [tuple(self.details.shape)]
        self.details.assign(_backend.per_target(measured, shapes, *tensors)[0])


def kept_sampling(optimizer: Any) -> Callable[[], None]:
    """Keep how often an optimizer's steps are measured; call the result to put it back.

    One that is not built yet has nothing else to put back than what it is built with: zeros.
    """
    kept = ops.convert_to_numpy(optimizer.telemetry.sampling)[:2] if optimizer.built else [0, 0]

    def restore() -> None:
        if optimizer.built:
            noted = ops.convert_to_numpy(optimizer.telemetry.sampling)[2:]
            optimizer.telemetry.sampling.assign(np.array([*kept, *noted], "int32"))

    return restore
