"""Measure gradients in the compiled step.

The measurements are float32 matrices in optimizer variables: `gradient_health` has a row for each
trainable variable, `overflow_events` one for each of the last overflows. The step overwrites them;
they stay on the device until `kmp.health.report` reads them.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp import _backend
from kmp._backend.types import Tensor
from kmp.health.reduce import Columns, Part, in_rows, reduce_parts, unstacked

# First the levels of the last measured step, then what every step counts. Levels are in true units
# (after division by the loss scale) and over finite values only, so that one inf hides nothing.
COLUMNS = ("l2_norm", "max_abs", "zero_share", "nonfinite", "overflow_steps")
L2_NORM, MAX_ABS, ZERO_SHARE, NONFINITE, OVERFLOW_STEPS = range(len(COLUMNS))

# One row per overflow, the latest first; zeros while there have been fewer.
EVENT_COLUMNS = ("step", "loss_scale", "first_variable", "num_variables", "loss_finite")
NUM_EVENTS = 16

# Levels are measured in each of the first steps, while the loss scale settles, in every
# overflowing step and the one after it, and otherwise at an interval: that of a callback, or this.
FIRST_STEPS = 100
INTERVAL = 100


def measure(parts: Sequence[Part], sizes: Sequence[int], *, together: bool = False) -> Tensor:
    """Measure gradients in the graph.

    Args:
        parts: the gradients, already divided by the loss scale, from `kmp.health.reduce.gather`.
            A variable without a gradient gets a row of zeros.
        sizes: each variable's number of elements, of which a sparse gradient holds only a part.
        together: whether to stack large gradients of one shape, see `reduce_parts`.

    Returns:
        float32[num_variables, 4]: the columns `l2_norm`, `max_abs`, `zero_share`, `nonfinite`.

    Example:

    >>> from kmp.health.reduce import gather, values_of
    >>> parts = gather([ops.array([3.0, 0.0, -4.0, 0.0])], [4])
    >>> [float(x) for x in measure(parts, [4])[0]]
    [5.0, 4.0, 0.5, 0.0]
    """

    table = reduce_parts(_look_at_levels, _table, parts, len(sizes), together)
    present = {i for part in parts for i in part.members}
    whole = [float(n if i in present else 0) for i, n in enumerate(sizes)]
    return _levels(table, _backend.constant(np.array(whole, "float32")))


@_backend.compiled
def _table(columns: Columns) -> Tensor:
    return ops.stack([ops.cast(x, "float32") for x in columns], axis=1)


@_backend.compiled
def _levels(table: Tensor, whole: Tensor) -> Tensor:
    squares, max_abs, nonzero, nonfinite = (table[:, i] for i in range(4))
    zero_share = (whole - nonzero) / ops.maximum(whole, 1.0)
    return ops.stack([ops.sqrt(squares), max_abs, zero_share, nonfinite], axis=1)


@_backend.compiled
def nonfinite_of(levels: Tensor) -> Tensor:
    """float32[num_variables]: how many numbers of each gradient are not finite."""
    return levels[:, NONFINITE]


def _look_at_levels(values: Tensor) -> Columns:
    if keras.backend.standardize_dtype(values.dtype) != "float64":
        values = ops.cast(values, "float32")
    finite = ops.isfinite(values)  # before the cast: a finite float64 may be inf in float32
    clean = ops.cast(ops.where(finite, values, 0.0), "float32")
    nonzero, nonfinite = ops.not_equal(values, 0.0), ops.logical_not(finite)
    counted = (ops.cast(x, "int32") for x in (nonzero, nonfinite))
    return ops.square(clean), ops.abs(clean), *counted


def find_nonfinite(parts: Sequence[Part], number: int, *, together: bool = False) -> Tensor:
    """Find the gradients that hold inf or NaN.

    Returns:
        float32[number], above 0 for those gradients; 0 for a variable without a gradient.
    """
    if not parts:
        return ops.zeros((number,), "float32")
    if not _backend.inside_xla():
        order = [i for part in parts for i in part.members]
        values = [x for part in parts for x in unstacked(part)]
        return in_rows(ops.cast(~_backend.are_finite(values), "float32"), order, number)

    def join(columns: Columns) -> Tensor:
        return ops.maximum(*columns)

    return ops.cast(reduce_parts(_look_for_nonfinite, join, parts, number, together), "float32")


def _look_for_nonfinite(values: Tensor) -> Columns:
    # `_backend.reduce_columns` needs two columns on CPUs, and both must be used.
    nonfinite = ops.cast(ops.logical_not(ops.isfinite(values)), "int32")
    return nonfinite, nonfinite


@_backend.compiled
def blame(nonfinite: Tensor) -> tuple[Tensor, Tensor]:
    """Count the variables with a non-finite gradient, and find the one to blame.

    That is the last of them in the model's order: the backward pass computes its gradient first,
    and inf and NaN spread from there to the variables before it.

    Args:
        nonfinite: float32[num_variables], above 0 if the gradient was not finite in a step.

    Returns:
        int32[], how many; int32[], the index of the last one, 0 if there is none.
    """
    bad = ops.cast(nonfinite > 0, "int32")
    return _backend.reduce_columns((bad, bad * ops.arange(bad.shape[0], dtype="int32")), (0,))


@_backend.compiled
def accumulate(levels: Tensor, nonfinite: Tensor, previous: Tensor) -> Tensor:
    """Update the matrix of measurements with a step's levels and counts.

    Args:
        levels: float32[num_variables, 4], from `measure`, of this step or an earlier one; of this
            step if any gradient is not finite.
        nonfinite: float32[num_variables], above 0 if the gradient was not finite in this step.
        previous: float32[num_variables, 5], the matrix before the step.

    Returns:
        float32[num_variables, 5], the matrix after the step. Counts are exact up to 2**24 steps.
    """
    overflowed = ops.cast(nonfinite > 0, "float32")
    # At least 1, because a float8 scale has no levels.
    nonfinite = overflowed * ops.maximum(levels[:, NONFINITE], 1.0)
    counts = [nonfinite, previous[:, OVERFLOW_STEPS] + overflowed]
    return ops.concatenate([levels[:, :NONFINITE], ops.stack(counts, axis=1)], axis=1)


@_backend.compiled
def add_event(
    events: Tensor, step: Tensor, scale: Tensor, blamed: Sequence[Tensor], loss_finite: Tensor
) -> Tensor:
    """If this step overflowed, add it in front of the past overflows and drop the oldest.

    Args:
        events: float32[16, 5], columns as in `EVENT_COLUMNS`.
        step: int32[], the number of this step, counted from 1.
        scale: float32[], the scale that its loss was multiplied by.
        blamed: what `blame` returned for this step.
        loss_finite: bool[], False if the loss is known not to be finite.

    Returns:
        float32[16, 5]. Step numbers are exact up to 2**24.
    """
    number, index = blamed
    row = [step, scale, index, number, loss_finite]
    new = ops.stack([ops.cast(x, "float32") for x in row])[None]
    return ops.where(number > 0, ops.concatenate([new, events[:-1]]), events)


def mark_loss(events: Tensor, nonfinite: Tensor) -> Tensor:
    """Record that the loss of the latest overflow was not finite, if `nonfinite`.

    Args:
        events: float32[16, 5], columns as in `EVENT_COLUMNS`.
        nonfinite: bool[]; if False, the events are returned unchanged.

    Returns:
        float32[16, 5].
    """
    mark = np.ones((NUM_EVENTS, len(EVENT_COLUMNS)), "float32")
    mark[0, EVENT_COLUMNS.index("loss_finite")] = 0
    return ops.where(nonfinite, events * ops.convert_to_tensor(mark), events)


def due(step: Tensor, sampling: Tensor, events: Tensor) -> tuple[Tensor, Tensor]:
    """Tell whether to measure this step, leaving aside whether its gradients overflow.

    It takes tensors, or arrays that the host has read.

    Args:
        step: int32[], counted from 1.
        sampling: int32[4]: the interval in steps (0: every 100), one further step to measure, and
            the last steps with levels and with details, from `sampled`.
        events: float32[16, 5], columns as in `EVENT_COLUMNS`.

    Returns:
        bool[], whether to measure the levels; bool[], whether to measure the details.
    """
    interval = sampling[0]
    interval = interval + INTERVAL * _as_int(interval == 0)
    sampled = (step % interval == 0) | (step == sampling[1])
    after_overflow = _as_int(events[0, EVENT_COLUMNS.index("step")]) == step - 1
    return sampled | (step <= FIRST_STEPS) | after_overflow, sampled


def _as_int(x: Any) -> Any:
    return x.astype("int32") if isinstance(x, np.generic) else ops.cast(x, "int32")


@_backend.compiled
def sampled(sampling: Tensor, step: Tensor, levels: Tensor, details: Tensor) -> Tensor:
    """int32[4]: `sampling` with this step as the last with levels, or with details, if it is."""
    last = [ops.where(levels, step, sampling[2]), ops.where(details, step, sampling[3])]
    return ops.concatenate([sampling[:2], ops.stack(last)])
