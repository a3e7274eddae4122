"""Read on the host what the compiled step has measured, in a single transfer."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp._backend import backend
from kmp._backend.types import Tensor
from kmp._common import table
from kmp.health import details as _sample
from kmp.health.measure import L2_NORM, MAX_ABS, NONFINITE
from kmp.health.telemetry import COLUMNS, OVERFLOW_STEPS

_FLOAT16_MAX = 65504.0


@dataclasses.dataclass(frozen=True)
class OverflowEvent:
    """One step whose gradients were not all finite.

    Attributes:
        step: the number of the step, counted from 1.
        loss_scale: the scale that its loss was multiplied by.
        first_variable: path of the variable whose gradient was the first in the backward pass that
            was not finite: the last such variable in the model's order.
        num_variables: how many variables had a gradient that was not finite.
        loss_finite: False if the loss itself was known not to be finite, in which case no loss
            scale could have helped.

    Example:

    >>> OverflowEvent(12, 32768.0, "dense/kernel", 2, True).loss_finite
    True
    """

    step: int
    loss_scale: float
    first_variable: str
    num_variables: int
    loss_finite: bool


@dataclasses.dataclass(frozen=True)
class SpikeEvent:
    """One step that was left out as a spike: its gradients were finite, and far larger than lately.

    Attributes:
        step: the number of the step, counted from 1.
        norm: the l2 norm of all its gradients, in true units.
        limit: the largest norm that would not have been a spike.
        variable: path of the variable whose gradient had grown most since it was measured last.
        growth: how many times as large its norm was.

    Example:

    >>> SpikeEvent(700, 1400.0, 10.0, "dense/kernel", 1500.0).norm
    1400.0
    """

    step: int
    norm: float
    limit: float
    variable: str
    growth: float


@dataclasses.dataclass(frozen=True, eq=False)
class GradientReport:
    """The measurements of an optimizer, on the host.

    Levels are those of the last measured step, `measured_step`. The first 100 steps are measured,
    every overflow and the step after it, and otherwise every 100th step or as often as
    `GradientHealth` asks.

    Attributes:
        paths: `variable.path` of each row.
        matrix: float32[num_variables, 5] with the columns `l2_norm`, `max_abs`, `zero_share`,
            `nonfinite` (number of values) and `overflow_steps`.
        loss_scale: the scale that the next step will use.
        step: training steps so far, including skipped ones.
        skipped_steps: steps so far whose update was skipped: overflows, and with `spikes=` spikes.
        consecutive_skips: how many of the latest steps overflowed in a row.
        events: the last 16 overflows, the latest first.
        measured_step: the step that the levels belong to; None if unknown.
        details: float32[num_variables, 50] or None: weights, updates and exponents, measured if
            `GradientHealth` or `optimizer.sample_gradients` asked for them.
        loss_is_scaled: False if gradients were divided by a loss scale that nothing has read, so
            that the loss cannot have been multiplied by it.
        skipped_spikes: steps so far that were left out as spikes; None without `spikes=`.
        held_statistics: steps so far in which `kmp.protect` has held the moving statistics of
            BatchNormalization; None without `spikes=`.
        spikes: the last 16 of the steps left out, the latest first.
        spike_limit: the largest norm of the next step's gradients that is not a spike; None if no
            step can be a spike now.

    Example:

    >>> matrix = np.array([[5.0, 4.0, 0.5, 0, 0], [0.0, 0.0, 1.0, 2, 7]], "float32")
    >>> report = GradientReport(("a", "b"), matrix, 1024.0, 100, 7, 1)
    >>> report.worst(1), report.headroom_bits, report.overflowed
    (['b'], 3.999..., {'b': 7})
    """

    paths: tuple[str, ...]
    matrix: np.ndarray
    loss_scale: float
    step: int
    skipped_steps: int
    consecutive_skips: int
    events: tuple[OverflowEvent, ...] = ()
    measured_step: int | None = None
    details: np.ndarray | None = None
    loss_is_scaled: bool = True
    skipped_spikes: int | None = None
    held_statistics: int | None = None
    spikes: tuple[SpikeEvent, ...] = ()
    spike_limit: float | None = None

    def column(self, name: str) -> dict[str, float]:
        """Return a column of `matrix`, such as `"max_abs"`, as `{variable path: value}`."""
        if name not in COLUMNS:
            raise ValueError(f"`name` must be one of {COLUMNS}. Received: name={name!r}.")
        return self._columns[name]

    @functools.cached_property
    def _columns(self) -> dict[str, dict[str, float]]:
        return {name: self._by_path(self.matrix[:, i]) for i, name in enumerate(COLUMNS)}

    def columns(self) -> dict[str, list[Any]]:
        """Return all that is known of each variable, as a table that pandas and trackers take.

        Returns:
            `{column: values}`, a value for each of `paths`: `variable`, the columns of `matrix`,
            then `degraded_share`, `lost_share` and `update_ratio`, None where not measured.

        Example:

        >>> report = GradientReport(("a", "b"), np.ones((2, 5), "float32"), 1024.0, 10, 0, 0)
        >>> report.columns()["variable"], report.columns()["l2_norm"]
        (['a', 'b'], [1.0, 1.0])
        """
        found: dict[str, list[Any]] = {"variable": list(self.paths)}
        found |= {name: list(column.values()) for name, column in self._columns.items()}
        for name in ("degraded_share", "lost_share", "update_ratio"):
            values = getattr(self, name)
            found[name] = [values.get(path) for path in self.paths]
        return found

    def _by_path(self, values: np.ndarray) -> dict[str, float]:
        return dict(zip(self.paths, values.tolist(), strict=True))

    @functools.cached_property
    def overflow_skips(self) -> int:
        """`skipped_steps` without those that were left out as spikes."""
        return self.skipped_steps - (self.skipped_spikes or 0)

    @functools.cached_property
    def grad_norm(self) -> float:
        """The l2 norm of the gradients of all variables, in true units."""
        return float(np.linalg.norm(self.matrix[:, L2_NORM].astype("float64")))

    @functools.cached_property
    def max_abs(self) -> float:
        """The largest absolute value of any gradient, in true units."""
        return float(self.matrix[:, MAX_ABS].max(initial=0.0))

    @functools.cached_property
    def headroom_bits(self) -> float:
        """How often the scale can double before `max_abs` leaves float16; inf if all are zero."""
        scaled = self.max_abs * self.loss_scale
        return math.log2(_FLOAT16_MAX / scaled) if 0 < scaled < math.inf else math.inf

    @functools.cached_property
    def is_finite(self) -> bool:
        """Whether all gradients of the measured step were; the levels leave out what was not."""
        return not self.matrix[:, NONFINITE].any()

    @functools.cached_property
    def overflowed(self) -> dict[str, int]:
        """The number of overflowing steps of each variable that had any, most often first.

        Among equals, the last in the model's order comes first: inf spreads backwards from there.
        """
        counts = reversed(self.column("overflow_steps").items())
        return {p: int(n) for p, n in sorted(counts, key=lambda x: -x[1]) if n}

    @functools.cached_property
    def exponents(self) -> dict[str, np.ndarray] | None:
        """float32[47] for each variable: how many sampled values of the scaled gradient are zero,
        lie in `[2**e, 2**(e + 1))` for e from -28 to 16, or are not finite. None if not measured.
        """
        if self.details is None:
            return None
        return dict(zip(self.paths, self.details[:, len(_sample.COLUMNS) :], strict=True))

    @functools.cached_property
    def degraded_share(self) -> dict[str, float]:
        """Share of each gradient's non-zero values that lose bits in float16 at the current scale:
        they are below its smallest normal number, 2**-14. Empty if not measured."""
        return self._share_below(-14)

    @functools.cached_property
    def lost_share(self) -> dict[str, float]:
        """Share of each gradient's non-zero values that float16 would round to zero at the current
        scale: they are below 2**-25. Empty if not measured. Values that a float16 layer has
        already rounded to zero count as zeros."""
        return self._share_below(-25)

    def _share_below(self, exponent: int) -> dict[str, float]:
        if self.details is None:
            return {}
        finite = self.details[:, len(_sample.COLUMNS) + 1 : -1].astype("float64")
        below = finite[:, : exponent - _sample.LOWEST].sum(axis=1)
        return self._by_path(below / np.maximum(finite.sum(axis=1), 1))

    @functools.cached_property
    def weight_norm(self) -> dict[str, float]:
        """The l2 norm of each variable, estimated from a sample. Empty if not measured."""
        return self._detail(_sample.WEIGHT_NORM)

    @functools.cached_property
    def unmoved_share(self) -> dict[str, float]:
        """Share of each variable's non-zero gradients whose weight the step did not change."""
        return self._detail(_sample.UNMOVED_SHARE)

    @functools.cached_property
    def update_ratio(self) -> dict[str, float]:
        """log10(update norm / weight norm), healthy near -3, if both are finite and not zero.

        Source: the rule of thumb of Stanford's course CS231n, "Neural Networks Part 3".
        """
        if self.details is None:
            return {}
        norms = self.details[:, : _sample.UPDATE_NORM + 1].astype("float64").tolist()
        return {
            path: math.log10(update / weight)
            for path, (weight, update) in zip(self.paths, norms, strict=True)
            if 0 < update < math.inf and 0 < weight < math.inf
        }

    def _detail(self, index: int) -> dict[str, float]:
        return {} if self.details is None else self._by_path(self.details[:, index])

    def worst(self, n: int = 3) -> list[str]:
        """Return the paths of the `n` variables to look at first.

        First those that overflowed, in the order of `overflowed`; then those whose `log2(max_abs)`
        is farthest from the median: their gradients leave float16's range first.
        """
        return [self.paths[i] for i in self._worst(n)]

    def _worst(self, n: int) -> list[int]:
        levels = np.log2(np.maximum(self.matrix[:, MAX_ABS].astype("float64"), 2.0**-149))
        distance = np.abs(levels - np.median(levels)) if len(levels) else levels
        overflows = self.matrix[:, OVERFLOW_STEPS]
        place = np.arange(len(overflows)) * (overflows > 0)
        return np.lexsort((-distance, -place, -overflows))[:n].tolist()

    def summary(self, n: int = 20) -> str:
        """Return the report as text, with the variables to look at first, in the model's order.

        Args:
            n: how many variables to list, an int >= 0; `str(report)` lists all.

        Example:

        >>> report = GradientReport(("a", "b"), np.ones((2, 5), "float32"), 1024.0, 10, 0, 0)
        >>> report.summary(1).splitlines()[-2]
        'and 1 more'
        """
        chosen = sorted(self._worst(n))
        rows = [["variable", "l2 norm", "max abs", "zeros", "non-finite", "overflows"]]
        for i in chosen:
            norm, peak, zeros, bad, overflows = self.matrix[i]
            numbers = [f"{norm:.3g}", f"{peak:.3g}", f"{zeros:.1%}", f"{bad:.0f}"]
            rows.append([self.paths[i], *numbers, f"{overflows:.0f}"])
        levels = "gradients not finite"
        if self.is_finite:
            levels = f"gradient norm {self.grad_norm:.3g}, headroom {self.headroom_bits:.1f} bits"
        lines = [
            f"Gradient health after step {self.step}: loss scale {self.loss_scale:g}, "
            f"{self.skipped_steps} skipped ({self.consecutive_skips} in a row now), {levels}",
            table(rows),
        ]
        if len(chosen) < len(self.paths):
            lines.append(f"and {len(self.paths) - len(chosen)} more")
        if self.overflowed:
            # A fact, and no advice: while the loss scale is found, variables of any model overflow.
            lines.append(f"Overflowed most often: {', '.join(list(self.overflowed)[:3])}")
        if self.held_statistics:
            lines.append(f"Steps so far whose batch statistics were held: {self.held_statistics}")
        if self.spikes:
            lines += ["Left out as spikes, the latest first:", self._table_of_spikes(n)]
        return "\n".join(lines)

    def _table_of_spikes(self, n: int) -> str:
        rows = [["step", "norm", "limit", "most in", "grown"]]
        for event in self.spikes[: max(n, 1)]:
            numbers = [f"{event.norm:.3g}", f"{event.limit:.3g}"]
            rows.append([str(event.step), *numbers, event.variable, f"{event.growth:.3g} times"])
        return table(rows, left=0)

    def __str__(self) -> str:
        return self.summary(len(self.paths))


def read_report(optimizer: Any, model: Any = None) -> GradientReport:
    """Read the measurements of a built optimizer that measures; within `fit`, pass its model."""
    kept = optimizer.telemetry
    counters = [optimizer.steps, optimizer.skipped_steps, optimizer.consecutive_skips]
    tables = [kept.sampling, kept.health, kept.events, kept.details]
    of_spikes = []
    if optimizer.spikes is not None:
        peak = optimizer.scaled_step.counters.peak
        of_spikes = [optimizer.skipped_spikes, optimizer.held_statistics, kept.spikes, *peak]
    everything = [optimizer.scale_variable, *counters, *tables, *of_spikes]
    values = transfer(backend.read(model, everything))
    scale, step, skipped, in_a_row, sampling, matrix, events, details, *of_spikes = values
    measured_step, details_step = sampling.tolist()[2:]
    paths, step_scales = optimizer.variable_paths, optimizer.step_scales_loss
    is_scaled = optimizer.scale_was_read if step_scales is None else step_scales
    overflows = tuple(
        OverflowEvent(int(at), its_scale, paths[int(first)], int(number), bool(finite))
        for at, its_scale, first, number, finite in events.tolist()
        if at
    )
    return GradientReport(
        paths=paths,
        matrix=matrix,
        loss_scale=float(scale),
        step=int(step),
        skipped_steps=int(skipped),
        consecutive_skips=int(in_a_row),
        events=overflows,
        measured_step=measured_step,
        details=details if details_step else None,
        loss_is_scaled=is_scaled or not optimizer.divides_gradients,
        **(_spikes(optimizer, of_spikes) if of_spikes else {}),
    )


def _spikes(optimizer: Any, values: Sequence[np.ndarray]) -> dict[str, Any]:
    """What a report says of spikes, as its arguments."""
    count, held, events, *peak = values
    limit = float(optimizer.spikes.limit(type(optimizer.scaled_step.counters.peak)(*peak)))
    return {
        "skipped_spikes": int(count),
        "held_statistics": int(held),
        "spikes": tuple(
            SpikeEvent(int(step), norm, limit, optimizer.variable_paths[int(variable)], growth)
            for step, norm, limit, variable, growth in events.tolist()
            if step
        ),
        "spike_limit": limit if math.isfinite(limit) else None,
    }


def transfer(values: Sequence[Tensor]) -> list[np.ndarray]:
    """Copy float32 and int32 tensors to the host in one transfer, bit for bit.

    Floats are transferred as int32 bits, so that the integer counters stay exact.
    """
    tensors = [ops.convert_to_tensor(x) for x in values]
    packed = ops.convert_to_numpy(_packed(tensors))
    ends = np.cumsum([int(np.prod(x.shape)) for x in tensors])
    return [
        (part.view("float32") if _is_float(x) else part).reshape(tuple(x.shape))
        for part, x in zip(np.split(packed, ends[:-1]), tensors, strict=True)
    ]


@backend.compiled
def _packed(tensors: Sequence[Tensor]) -> Tensor:
    bits = [backend.bitcast(x, "int32") if _is_float(x) else ops.cast(x, "int32") for x in tensors]
    return ops.concatenate([ops.reshape(x, (-1,)) for x in bits])


def _is_float(x: Tensor) -> bool:
    return keras.backend.standardize_dtype(x.dtype) == "float32"
