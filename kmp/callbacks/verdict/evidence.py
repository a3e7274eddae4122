"""What a verdict is given about."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kmp.callbacks.verdict.spoiled import Spoiled
from kmp.callbacks.verdict.standstill import Still, Weight
from kmp.callbacks.verdict.states import Limits
from kmp.health.report import GradientReport, OverflowEvent


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """What a verdict is given about.

    Attributes:
        report: the present one.
        start: the one at the end of the last epoch; None for the beginning of training.
        settled: one of a window of steps ago, after the first 100; None if there is none yet.
        rule: the loss-scaling strategy.
        limits: where the verdict turns.
        weights: the trainable variables by their paths.
        update_ratios: the medians of log10(update / weight) of the last looks.
        least_norm: of the gradients so far, after the first 100 steps; inf before.
        still: the weights that stand still, if they have for long enough.
        silent: the weights whose gradients have been exactly zero for long enough, if they are
            half of all.
        learning_rate: returns that of the variables with some paths; asked if they stand still.
        spoiled: the layers' and the optimizer's state that a bad batch has spoiled.
        losses: of the epoch, at its end: in training and, if there is one, in validation.
        drops_windows: whether one overflow discards a whole window of gradient accumulation.
    """

    report: GradientReport
    start: GradientReport | None = None
    settled: GradientReport | None = None
    rule: Any = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    weights: Mapping[str, Weight] = dataclasses.field(default_factory=dict)
    update_ratios: list[float] = dataclasses.field(default_factory=list)
    least_norm: float = math.inf
    still: Still | None = None
    silent: Still | None = None
    learning_rate: Callable[[Sequence[str]], float] = lambda paths: math.nan
    spoiled: Sequence[Spoiled] = ()
    losses: Mapping[str, float] = dataclasses.field(default_factory=dict)
    drops_windows: bool = False

    @property
    def steps(self) -> int:
        """Steps since the last epoch's end."""
        return self.report.step - (self.start.step if self.start else 0)

    @property
    def skips(self) -> int:
        """Steps skipped since then."""
        return self.report.skipped_steps - (self.start.skipped_steps if self.start else 0)

    @property
    def events(self) -> list[OverflowEvent]:
        """The overflows since then, the last one first; at most 16 are known."""
        since = self.start.step if self.start else 0
        return [event for event in self.report.events if event.step > since]
