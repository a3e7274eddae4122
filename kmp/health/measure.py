"""Gradient health: what the compiled step measures.

The measurements are float32 matrices in optimizer variables: `gradient_health` with a row for each
trainable variable, `overflow_events` with one for each of the last overflows. The step overwrites
them; nothing leaves the device until somebody asks. `kmp.report` reads them on the host.
"""

from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from kmp import _backend
from kmp._backend.types import Tensor
from kmp.health.reduce import Columns, Part, in_rows, reduce_parts, values_of

# Levels of the last measured step first, then what is counted in every step. Levels are in true
# units (after division by the loss scale) and over finite values, so that one inf hides nothing.
COLUMNS = ("l2_norm", "max_abs", "zero_share", "nonfinite", "overflow_steps")
L2_NORM, MAX_ABS, ZERO_SHARE, NONFINITE, OVERFLOW_STEPS = range(len(COLUMNS))

# One row an overflow, the last one first; rows of zeros where there were fewer.
EVENT_COLUMNS = ("step", "loss_scale", "first_variable", "num_variables", "loss_finite")
NUM_EVENTS = 16

# Levels are measured in each of the first steps, in which the scale is being found, in every
# overflowing step, and from then on at an interval: a callback's, or this one.
FIRST_STEPS = 100
INTERVAL = 100


def measure(parts: Sequence[Part], sizes: Sequence[int], *, together: bool = False) -> Tensor:
    """Measure gradients in the graph.

    Args:
        parts: the gradients, already divided by the loss scale, from `kmp.health.reduce.gather`.
            Where there is none the row is of zeros.
        sizes: for each variable its number of elements, what a sparse gradient's share is of.
        together: whether large gradients go together too, as `kmp._reduction` says.

    Returns:
        float32[num_variables, 4]: the columns `l2_norm`, `max_abs`, `zero_share`, `nonfinite`.

    Example:

    >>> from kmp.health.reduce import gather, values_of
    >>> parts = gather([ops.array([3.0, 0.0, -4.0, 0.0])], [4])
    >>> [float(x) for x in measure(parts, [4])[0]]
    [5.0, 4.0, 0.5, 0.0]
    """

    def look(values: Tensor) -> Columns:
        if keras.backend.standardize_dtype(values.dtype) != "float64":
            values = ops.cast(values, "float32")
        finite = ops.isfinite(values)  # before a finite number may leave float32
        clean = ops.cast(ops.where(finite, values, 0.0), "float32")
        nonzero, nonfinite = ops.not_equal(values, 0.0), ops.logical_not(finite)
        counted = (ops.cast(x, "int32") for x in (nonzero, nonfinite))
        return ops.square(clean), ops.abs(clean), *counted

    def join(columns: Columns) -> Tensor:
        return ops.stack([ops.cast(x, "float32") for x in columns], axis=1)

    table = reduce_parts(look, join, parts, len(sizes), together)
    squares, max_abs, nonzero, nonfinite = (table[:, i] for i in range(4))
    present = {i for part in parts for i in part.members}
    whole = np.array([n if i in present else 0 for i, n in enumerate(sizes)])
    whole = ops.convert_to_tensor(whole.astype("float32"))
    zero_share = (whole - nonzero) / ops.maximum(whole, 1.0)
    return ops.stack([ops.sqrt(squares), max_abs, zero_share, nonfinite], axis=1)


def find_nonfinite(parts: Sequence[Part], number: int, *, together: bool = False) -> Tensor:
    """Find gradients in which something is not finite.

    Returns:
        float32[number], above 0 for those; 0 where there is no gradient.
    """

    if not parts:
        return ops.zeros((number,), "float32")
    if not _backend.inside_xla():
        order = [i for part in parts for i in part.members]
        values = [values_of(part) for part in parts]
        finite = _backend.are_finite(values, [part.stacked for part in parts])
        return in_rows(ops.cast(ops.logical_not(finite), "float32"), order, number)

    def look(values: Tensor) -> Columns:
        # Two columns, and both in use, for the sake of `_backend.reduce_columns` on CPUs.
        nonfinite = ops.cast(ops.logical_not(ops.isfinite(values)), "int32")
        return nonfinite, nonfinite

    def join(columns: Columns) -> Tensor:
        return ops.maximum(*columns)

    return ops.cast(reduce_parts(look, join, parts, number, together), "float32")


def blame(nonfinite: Tensor) -> tuple[Tensor, Tensor]:
    """Tell how many variables have numbers that are not finite, and which to blame.

    That is the last in the model's order: its gradient came first, and inf flows backwards from
    there.

    Args:
        nonfinite: float32[num_variables], above 0 if something was not finite in a step.

    Returns:
        int32[], how many; int32[], the index of the last, or 0.
    """
    bad = nonfinite > 0
    places = ops.where(bad, ops.arange(bad.shape[0], dtype="int32"), 0)
    return _backend.reduce_columns((ops.cast(bad, "int32"), places), (0,))


def accumulate(levels: Tensor, nonfinite: Tensor, previous: Tensor) -> Tensor:
    """Join a step's measurements with the counters so far.

    Args:
        levels: float32[num_variables, 4], from `measure`, of this step or an earlier one; of this
            one if anything is not finite.
        nonfinite: float32[num_variables], above 0 if something was not finite in this step.
        previous: float32[num_variables, 5], the matrix before the step.

    Returns:
        float32[num_variables, 5], the matrix after the step. Counters are exact up to 2**24 steps.
    """
    overflowed = ops.cast(nonfinite > 0, "float32")
    # (float8's scales have no levels.)
    nonfinite = overflowed * ops.maximum(levels[:, NONFINITE], 1.0)
    counts = [nonfinite, previous[:, OVERFLOW_STEPS] + overflowed]
    return ops.concatenate([levels[:, :NONFINITE], ops.stack(counts, axis=1)], axis=1)


def add_event(
    events: Tensor, step: Tensor, scale: Tensor, blamed: Sequence[Tensor], loss_finite: Tensor
) -> Tensor:
    """Put this step in front of the overflows so far if it is one, and forget the oldest.

    Args:
        events: float32[16, 5], columns as in `EVENT_COLUMNS`.
        step: int32[], the number of this step, counted from 1.
        scale: float32[], the scale that its loss was multiplied with.
        blamed: what `blame` says of it.
        loss_finite: bool[], False where the loss is known not to be finite.

    Returns:
        float32[16, 5]. Step numbers are exact up to 2**24.
    """
    number, index = blamed
    row = [step, scale, index, number, loss_finite]
    new = ops.stack([ops.cast(x, "float32") for x in row])[None]
    return ops.where(number > 0, ops.concatenate([new, events[:-1]]), events)


def mark_loss(events: Tensor, nonfinite: Tensor) -> Tensor:
    """Note for the last overflow that its loss was not finite.

    Args:
        events: float32[16, 5], columns as in `EVENT_COLUMNS`.
        nonfinite: bool[], whether to.

    Returns:
        float32[16, 5].
    """
    mark = np.ones((NUM_EVENTS, len(EVENT_COLUMNS)), "float32")
    mark[0, EVENT_COLUMNS.index("loss_finite")] = 0
    return ops.where(nonfinite, events * ops.convert_to_tensor(mark), events)


def due(step: Tensor, sampling: Tensor) -> Tensor:
    """Tell whether to measure this step, as far as that does not depend on its gradients.

    Args:
        step: int32[], counted from 1.
        sampling: int32[4]: sample each so many steps (0: each 100), and in this one too; what
            `sampled` noted.

    Returns:
        bool[2]: whether to measure the levels, whether to measure the details.
    """
    interval = ops.where(ops.equal(sampling[0], 0), INTERVAL, sampling[0])
    sampled = ops.logical_or(ops.equal(step % interval, 0), ops.equal(step, sampling[1]))
    return ops.stack([ops.logical_or(sampled, ops.less_equal(step, FIRST_STEPS)), sampled])


def sampled(sampling: Tensor, step: Tensor, levels: Tensor, details: Tensor) -> Tensor:
    """int32[4]: `sampling` with this step noted as the last with levels, with details, if so."""
    last = [ops.where(levels, step, sampling[2]), ops.where(details, step, sampling[3])]
    return ops.concatenate([sampling[:2], ops.stack(last)])
