"""What an optimizer keeps of its measurements between steps, in float32 matrices on the device.

`gradient_health` has a row for each trainable variable, `overflow_events` one for each of the last
overflows. The step overwrites them; they stay on the device until `kmp.health.report` reads them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops

from kmp._backend import Sharding, backend
from kmp._backend.types import Tensor, Variable
from kmp._common import whole_number
from kmp.health import details, measure
from kmp.health.measure import LEVELS, NONFINITE
from kmp.health.plan import Due, Inspection, MeasurePlan

COLUMNS = (*LEVELS, "overflow_steps")  # of the last measured step; how many steps overflowed
OVERFLOW_STEPS = len(LEVELS)

# One row per overflow, the latest first; zeros while there have been fewer.
EVENT_COLUMNS = ("step", "loss_scale", "first_variable", "num_variables", "loss_finite")
NUM_EVENTS = 16

# The same of the steps that were left out as spikes; `variable` is the one to blame.
SPIKE_COLUMNS = ("step", "norm", "limit", "variable", "growth")

# Levels are measured in each of the first steps, while the loss scale settles, in every
# overflowing step and the one after it, and otherwise at an interval: that of a callback, or this.
FIRST_STEPS = 100
INTERVAL = 100
NO_SAMPLING = (0, 0)  # nobody has chosen an interval, nor one more step


# The variables that name weights by their rows.
MEASUREMENTS = ("gradient_health", "gradient_details", "overflow_events", "spike_events")


class Telemetry:
    """The variables that hold the measurements: when a step writes them, and what.

    Args:
        add: creates a variable of the optimizer, given its name, shape and dtype.
        rows: how many variables the optimizer updates.
        sampling: the interval and the further step to measure, until `sample` sets others.
        spikes: whether steps are left out as spikes.
    """

    def __init__(
        self,
        add: Callable[..., Variable],
        rows: int,
        sampling: tuple[int, int] = NO_SAMPLING,
        spikes: bool = False,
    ):
        self.health = add("gradient_health", (rows, len(COLUMNS)))
        # Columns as in `details.COLUMNS`, then the counts of the exponents.
        self.details = add("gradient_details", (rows, len(details.COLUMNS) + details.BINS))
        self.events = add("overflow_events", (NUM_EVENTS, len(EVENT_COLUMNS)))
        self.spikes = add("spike_events", (NUM_EVENTS, len(SPIKE_COLUMNS))) if spikes else None
        # See `due`. In a `tf.function` that creates them, variables cannot be assigned to.
        self.sampling = add("sampling", (4,), "int32", lambda *_, **__: _as_tensor(*sampling, 0, 0))

    def at_start(self) -> Due:
        """What tells whether a step is to measure, before it writes anything."""
        return Due(due, *backend.read(None, [self.sampling, self.health]))

    def sample(self, update_freq: Any, and_at: int) -> None:
        """Choose how often steps are measured; see `LossScaleOptimizer.sample_gradients`."""
        interval = whole_number("update_freq", update_freq, "sample_gradients")
        noted = ops.convert_to_numpy(self.sampling)[2:]
        self.sampling.assign(np.array([interval, and_at, *noted], "int32"))

    def record(
        self,
        plan: MeasurePlan,
        seen: Inspection,
        step: Tensor,
        scale: Tensor,
        weights: Callable[[], Sequence[Tensor]],
    ) -> None:
        """Write down what the step of this number has seen with this loss scale.

        Called if its levels are due; else all would stay as it is.

        Args:
            plan: the optimizer's plan.
            seen: from `kmp.health.plan.inspect_gradients`.
            step: int32[].
            scale: float32[].
            weights: returns the values of the variables after the update.
        """
        if not (seen.on_host and seen.finite):
            blamed = seen.blamed or measure.blame(seen.nonfinite)
            events = ops.convert_to_tensor(self.events)
            self.events.assign(add_event(events, step, scale, blamed, seen.loss_finite))
        previous = ops.convert_to_tensor(self.health)
        self.health.assign(accumulate(seen.levels, seen.nonfinite, previous))
        due_details = seen.due_details
        if seen.sample is None:
            due_details = ops.zeros_like(due_details)
        else:
            self._record_details(plan, seen, weights())
        sampling = ops.convert_to_tensor(self.sampling)
        self.sampling.assign(sampled(sampling, step, seen.due_levels, due_details))

    def record_spike(self, seen: Inspection, spike: Tensor, limit: Tensor) -> Inspection:
        """Write down a step that is left out as a spike, and keep its levels out of `health`.

        Args:
            seen: from `kmp.health.plan.inspect_gradients`, with levels.
            spike: bool[], whether the step is one.
            limit: float32[], the largest norm that would not have been a spike.

        Returns:
            `seen` with the levels that are to be written down.
        """
        assert self.spikes is not None
        levels = ops.convert_to_tensor(self.health)[:, : len(LEVELS)]
        if not (seen.on_host and not spike):
            blamed = measure.blame_for_spike(seen.norms, levels[:, measure.L2_NORM])
            row = [seen.before.step, seen.norm, limit, *blamed]
            events = ops.convert_to_tensor(self.spikes)
            self.spikes.assign(add_spike(events, spike, row))
        if seen.levels is None:
            return seen
        return seen._replace(
            levels=ops.where(spike, levels, seen.levels),
            due_levels=seen.due_levels & ~spike,
            due_details=seen.due_details & ~spike,
        )

    def mark_loss(self, nonfinite: Tensor) -> None:
        """Note for the last overflow that its loss was not finite, if `nonfinite`, a bool[]."""
        mark = np.ones((NUM_EVENTS, len(EVENT_COLUMNS)), "float32")
        mark[0, EVENT_COLUMNS.index("loss_finite")] = 0
        events = ops.convert_to_tensor(self.events)
        self.events.assign(ops.where(nonfinite, events * ops.convert_to_tensor(mark), events))

    def _record_details(
        self, plan: MeasurePlan, seen: Inspection, weights: Sequence[Tensor]
    ) -> None:
        def measured(target: str, due: Any, before: Any, previous: Any, *weights: Any) -> list[Any]:
            def table() -> Tensor:
                cuts, sharding = plan.cuts, plan.sharding
                after = details.sample_weights(weights, cuts, seen.order, target, sharding)
                found = details.measure_sample(before, after, cuts, seen.order, sharding)
                return plan.of_gradients(found)

            return [backend.branch(due, table, previous)]

        previous = ops.convert_to_tensor(self.details)
        tensors = (seen.due_details, seen.sample, previous, *weights)
        shapes = [tuple(self.details.shape)]
        of = [None, Sharding.APART, None, *range(len(weights))]
        self.details.assign(plan.per_target(measured, shapes, of, tensors)[0])


def lend_sampling(optimizer: Any, update_freq: int, and_at: int) -> None:
    """Measure as often as a callback asks, until what `kept_sampling` returned is called.

    A loan has a negative interval, so that a checkpoint tells it from what the user has chosen.
    """
    if optimizer.built:
        noted = ops.convert_to_numpy(optimizer.telemetry.sampling)[2:]
        optimizer.telemetry.sampling.assign(np.array([-update_freq, and_at, *noted], "int32"))
    else:
        optimizer.first_sampling = (-update_freq, and_at)


def kept_sampling(optimizer: Any) -> Callable[[], None]:
    """Remember how often an optimizer measures; call the result to restore that.

    For an optimizer that is not built yet, the initial value is restored: zeros. The same holds for
    an optimizer from a checkpoint that was written within another `fit`, and so has that `fit`'s
    loan.
    """
    built = optimizer.built
    kept = ops.convert_to_numpy(optimizer.telemetry.sampling)[:2] if built else NO_SAMPLING
    if kept[0] < 0:
        kept = NO_SAMPLING

    def restore() -> None:
        optimizer.first_sampling = NO_SAMPLING
        if optimizer.built:
            noted = ops.convert_to_numpy(optimizer.telemetry.sampling)[2:]
            optimizer.telemetry.sampling.assign(np.array([*kept, *noted], "int32"))

    return restore


def _as_tensor(*numbers: int) -> Tensor:
    return ops.convert_to_tensor(np.array(numbers, "int32"))


@backend.compiled
def accumulate(levels: Tensor, nonfinite: Tensor, previous: Tensor) -> Tensor:
    """float32[n, 5]: the matrix of `COLUMNS` after a step. Counts are exact up to 2**24 steps.

    Args:
        levels: float32[n, 4]: of this step if it overflowed or was due, else of the last step that
            measured them.
        nonfinite: float32[n], above 0 if the gradient was not finite in this step.
        previous: float32[n, 5], the matrix before the step.
    """
    overflowed = ops.cast(nonfinite > 0, "float32")
    # At least 1, because a float8 scale has no levels.
    nonfinite = overflowed * ops.maximum(levels[:, NONFINITE], 1.0)
    counts = [nonfinite, previous[:, OVERFLOW_STEPS] + overflowed]
    return ops.concatenate([levels[:, :NONFINITE], ops.stack(counts, axis=1)], axis=1)


@backend.compiled
def add_event(
    events: Tensor, step: Tensor, scale: Tensor, blamed: Sequence[Tensor], loss_finite: Tensor
) -> Tensor:
    """float32[16, 5]: the events, with this step in front of them if it overflowed.

    `blamed` is from `measure.blame`. Step numbers are exact up to 2**24.
    """
    number, index = blamed
    row = [step, scale, index, number, loss_finite]
    new = ops.stack([ops.cast(x, "float32") for x in row])[None]
    return ops.where(number > 0, ops.concatenate([new, events[:-1]]), events)


@backend.compiled
def add_spike(events: Tensor, spike: Tensor, row: Sequence[Tensor]) -> Tensor:
    """float32[16, 5]: the events, with `row` in front of them if `spike`."""
    new = ops.stack([ops.cast(x, "float32") for x in row])[None]
    return ops.where(spike, ops.concatenate([new, events[:-1]]), events)


@backend.compiled
def sampled(sampling: Tensor, step: Tensor, levels: Tensor, details: Tensor) -> Tensor:
    """int32[4]: `sampling`, with `step` noted if it measured `levels`, or `details` (bool[])."""
    last = [ops.where(levels, step, sampling[2]), ops.where(details, step, sampling[3])]
    return ops.concatenate([sampling[:2], ops.stack(last)])


def due(step: Tensor, skips: Tensor, sampling: Tensor) -> tuple[Tensor, Tensor]:
    """bool[] and bool[]: whether to measure levels, and details, if no gradient overflows.

    It takes tensors, or arrays that the host has read.

    Args:
        step: int32[], counted from 1.
        skips: int32[], how many of the latest steps before this one overflowed in a row.
        sampling: int32[4]: the interval in steps (0: every 100; negative: of a callback), one
            further step to measure, and the last steps with levels and with details, from
            `sampled`.
    """
    interval = abs(sampling[0])
    interval = interval + INTERVAL * _as_int(interval == 0)
    asked = (step % interval == 0) | (step == sampling[1])
    return asked | (step <= FIRST_STEPS) | (skips > 0), asked


def _as_int(x: Any) -> Any:
    return x.astype("int32") if isinstance(x, np.generic) else ops.cast(x, "int32")
