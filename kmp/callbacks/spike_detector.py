"""The rule that tells a diverging loss from a noisy one: pure functions of plain numbers."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from kmp._common import number, whole_number

# The standard deviation of normal noise is 1.4826 times its median absolute deviation.
_DEVIATIONS_PER_MAD = 1.4826
_MIN_HISTORY = 10  # fewer readings say too little about their spread


class SpikeState(NamedTuple):
    """What the detector remembers between readings.

    Attributes:
        history: the last readings that were not outliers, oldest first; at most `window`.
        outliers: outliers in a row up to now.
    """

    history: tuple[float, ...] = ()
    outliers: int = 0


@dataclasses.dataclass(frozen=True)
class SpikeDetector:
    """Tells a diverging loss from ordinary noise by the median of what came before.

    With the defaults, over the last 50 readings that were not outliers:

    ```
    outlier:   not finite, or, once there are 10 of them,
               reading > median + 6 * 1.4826 * MAD   and   reading > median + (2 - 1) * |median|
    spike:     3 outliers in a row
    ```

    where MAD is the median absolute deviation from the median. Outliers do not enter the history,
    so that a spike cannot hide the next one. As many outliers in a row as the window is long are
    a new level, not a spike, and the history starts over.

    Args:
        window: int >= 10, readings that are remembered.
        threshold: float > 0, the deviation from the median, in standard deviations of normal noise.
        factor: float >= 1, how many times the median a reading must also exceed.
        patience: int in [1, `window`), outliers in a row that make a spike.

    Raises:
        ValueError: if an argument is out of its range.

    Example:

    >>> detector, state = SpikeDetector(), SpikeState()
    >>> for reading in [1.0, 1.2, 0.9, 1.1] * 5 + [9.0, 9.5, 9.2]:
    ...     state = detector.next(state, reading)
    >>> state.outliers, detector.is_spike(state)
    (3, True)

    Source: the median-MAD rule with 1.4826 is Leys et al. 2013, *Detecting outliers: Do not use
    standard deviation around the mean*; twice the usual loss is the threshold of MosaicML
    Composer's `KillLossSpike`. 6 deviations and 3 in a row are kmp's choice: see
    `kmp.callbacks.DivergenceGuard` for how rarely they are wrong.
    """

    window: int = 50
    threshold: float = 6.0
    factor: float = 2.0
    patience: int = 3

    def __post_init__(self):
        owner = "SpikeDetector"
        for name in ("window", "patience"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), owner))
        for name in ("threshold", "factor"):
            object.__setattr__(self, name, number(name, getattr(self, name), owner))
        for name, fits, wanted, instead in (
            ("window", self.window >= _MIN_HISTORY, f"at least {_MIN_HISTORY} readings", 50),
            ("threshold", 0 < self.threshold < math.inf, "a positive, finite number", 6.0),
            ("factor", 1 <= self.factor < math.inf, "a finite number, at least 1", 2.0),
            ("patience", self.patience < self.window, "below `window`", 3),
        ):
            if not fits:
                raise ValueError(
                    f"`{name}` of {owner} must be {wanted}. Received: "
                    f"{name}={getattr(self, name)}. Write {name}={instead}, the default."
                )

    def limit(self, history: Sequence[float]) -> float:
        """Return the largest reading that is not an outlier; inf if `history` is too short."""
        if len(history) < _MIN_HISTORY:
            return math.inf
        middle = statistics.median(history)
        deviation = _DEVIATIONS_PER_MAD * statistics.median([abs(x - middle) for x in history])
        return max(
            middle + self.threshold * deviation,
            middle + (self.factor - 1.0) * abs(middle),
        )

    def next(self, state: SpikeState, reading: float) -> SpikeState:
        """Return the state after one reading of the loss."""
        if math.isfinite(reading) and reading <= self.limit(state.history):
            return SpikeState((*state.history, reading)[-self.window :], 0)
        if state.outliers + 1 >= self.window:
            return SpikeState()
        return SpikeState(state.history, state.outliers + 1)

    def is_spike(self, state: SpikeState) -> bool:
        """Tell whether the last reading made a spike of the outliers: true once for each spike."""
        return state.outliers == self.patience
