"""Gradient health: what the compiled step measures, and what the host reads out of it.

The measurements are one float32 matrix with a row for each trainable variable, held in an optimizer
variable. The step overwrites it; nothing leaves the device until somebody asks.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from keras import ops

from kmp import _backend
from kmp._types import Gradient, Tensor

# Levels of the last step first, then what accumulates over all steps. Levels are in true units
# (after division by the loss scale) and over the finite values, so that one inf hides nothing.
COLUMNS = ("l2_norm", "max_abs", "zero_share", "nonfinite", "overflow_steps")
L2_NORM, MAX_ABS, ZERO_SHARE, NONFINITE, OVERFLOW_STEPS = range(len(COLUMNS))
_FLOAT16_MAX = 65504.0


def measure(gradients: Sequence[Gradient], sizes: Sequence[int]) -> Tensor:
    """Measure gradients in the graph.

    Args:
        gradients: for each variable its gradient of any shape (tensor or `tf.IndexedSlices`),
            already divided by the loss scale; None gives a row of zeros.
        sizes: for each variable its number of elements, what a sparse gradient's share is of.

    Returns:
        float32[num_variables, 4]: the columns `l2_norm`, `max_abs`, `zero_share`, `nonfinite`.

    Example:

    >>> [float(x) for x in measure([ops.array([3.0, 0.0, -4.0, 0.0])], [4])[0]]
    [5.0, 4.0, 0.5, 0.0]
    """
    rows = [
        ops.zeros((NONFINITE + 1,), "float32") if gradient is None else _measure_one(gradient, size)
        for gradient, size in zip(gradients, sizes, strict=True)
    ]
    return ops.stack(rows)


def count_nonfinite(gradients: Sequence[Gradient]) -> Tensor:
    """Count what is not finite in each gradient, None left out: the column `nonfinite` alone.

    Returns:
        float32[number of gradients].
    """
    values = [_backend.gradient_rows(g) for g in gradients if g is not None]
    return ops.stack([_count(ops.logical_not(ops.isfinite(x))) for x in values])


def _count(mask: Tensor) -> Tensor:
    return ops.sum(ops.cast(mask, "float32"))


def _measure_one(gradient: Gradient, size: int) -> Tensor:
    values = ops.cast(_backend.gradient_rows(gradient), "float32")
    finite = ops.isfinite(values)
    clean = ops.where(finite, values, 0.0)
    return ops.stack(
        [
            ops.sqrt(ops.sum(ops.square(clean))),
            ops.max(ops.abs(clean), initial=0.0),
            (size - _count(ops.not_equal(values, 0.0))) / max(size, 1),
            _count(ops.logical_not(finite)),
        ]
    )


def accumulate(measured: Tensor, previous: Tensor) -> Tensor:
    """Join a step's measurements with the counters so far.

    Args:
        measured: float32[num_variables, 4], from `measure`.
        previous: float32[num_variables, 5], the matrix before the step.

    Returns:
        float32[num_variables, 5], the matrix after the step. Counters are exact up to 2**24 steps.
    """
    overflowed = ops.cast(measured[:, NONFINITE:] > 0, "float32")
    return ops.concatenate([measured, previous[:, OVERFLOW_STEPS:] + overflowed], axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class GradientReport:
    """What the matrix says, on the host.

    Attributes:
        paths: `variable.path` of each row.
        matrix: float32[num_variables, 5], columns as in `kmp.health.COLUMNS`.
        loss_scale: the scale that the next step will use.
        step: training steps so far, skipped ones included.
        skipped_steps: steps so far whose update was left out because of an overflow.
        consecutive_skips: how many of them in a row up to now.

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

    def column(self, name: str) -> dict[str, float]:
        """Return one of `COLUMNS` as `{variable path: value}`."""
        if name not in COLUMNS:
            raise ValueError(f"`name` must be one of {COLUMNS}. Received: name={name!r}.")
        values = self.matrix[:, COLUMNS.index(name)].tolist()
        return dict(zip(self.paths, values, strict=True))

    @property
    def grad_norm(self) -> float:
        """The l2 norm over all variables, in true units."""
        return float(np.linalg.norm(self.matrix[:, L2_NORM].astype("float64")))

    @property
    def max_abs(self) -> float:
        """The largest absolute value of any gradient, in true units."""
        return float(self.matrix[:, MAX_ABS].max(initial=0.0))

    @property
    def headroom_bits(self) -> float:
        """How often the loss scale could double before the largest gradient leaves float16."""
        scaled = self.max_abs * self.loss_scale
        return math.log2(_FLOAT16_MAX / scaled) if 0 < scaled < math.inf else math.inf

    @property
    def overflowed(self) -> dict[str, int]:
        """Variables that ever overflowed, with the number of steps, most often first."""
        counts = self.column("overflow_steps")
        return {p: int(n) for p, n in sorted(counts.items(), key=lambda x: -x[1]) if n}

    def worst(self, n: int = 3) -> list[str]:
        """Name the variables to look at first.

        Those that overflowed most often, then those whose gradient is nearest to leaving float16,
        upwards or downwards (distance of `log2(max_abs)` from the middle of all variables).
        """
        levels = np.log2(np.maximum(self.matrix[:, MAX_ABS].astype("float64"), 2.0**-149))
        distance = np.abs(levels - np.median(levels)) if len(levels) else levels
        order = np.lexsort((-distance, -self.matrix[:, OVERFLOW_STEPS]))
        return [self.paths[i] for i in order[:n]]

    def __str__(self) -> str:
        width = max([len(p) for p in self.paths] + [8])
        lines = [
            f"Gradient health after step {self.step}: loss scale {self.loss_scale:g}, "
            f"{self.skipped_steps} skipped ({self.consecutive_skips} in a row now), "
            f"gradient norm {self.grad_norm:.3g}, headroom {self.headroom_bits:.1f} bits",
            f"{'variable':<{width}}  {'l2 norm':>9}  {'max abs':>9}  {'zeros':>6}  "
            f"{'non-finite':>10}  {'overflows':>9}",
        ]
        for path, (norm, peak, zeros, bad, overflows) in zip(self.paths, self.matrix, strict=True):
            lines.append(
                f"{path:<{width}}  {norm:>9.3g}  {peak:>9.3g}  {zeros:>6.1%}  "
                f"{bad:>10.0f}  {overflows:>9.0f}"
            )
        if self.overflowed:
            lines.append(f"Look first at: {', '.join(self.worst())}")
        return "\n".join(lines)
