"""Detectors of overflows: at the scale's floor, in every step, too often, and at the beginning."""

import collections
import math
from typing import Any

from kmp.callbacks.verdict.detector import Detector
from kmp.callbacks.verdict.observation import Observation
from kmp.callbacks.verdict.states import Verdict
from kmp.health.report import GradientReport
from kmp.health.telemetry import FIRST_STEPS
from kmp.precision.trees import HALF_DTYPES
from kmp.scaling.rules import DynamicLossScale, NoOpLossScale, StaticLossScale

_NOTHING_APPLIED = 30  # steps: more than the scale takes to fall from its ceiling to its floor
_WINDOW = 200  # steps that the rate of overflows is taken over


class Collapsed(Detector):
    """COLLAPSED: steps in a row have overflowed at a scale that does not fall any further."""

    def see(self, look: Observation) -> Verdict | None:
        report, rule = look.report, look.rule
        is_dynamic = isinstance(rule, DynamicLossScale)
        is_fixed = isinstance(rule, StaticLossScale | NoOpLossScale)
        if not (look.events and self._is_exhausted(look)):
            return None
        blamed = look.events[0].first_variable
        weight = look.weights.get(blamed)
        advice = "keep that layer in float32, or rescale its inputs"
        if weight and weight.compute_dtype not in HALF_DTYPES:
            advice = (
                "ask kmp.debug.locate_nonfinite for the cause: that layer is in float32 already"
            )
        before = "The scale cannot fall any further: "
        if not is_dynamic:
            before = 'Write loss_scale="dynamic" or a lower number. If it overflows still, '
            before = before if report.loss_scale > 1 else "The scale is not the cause: "
        return Verdict(
            "COLLAPSED",
            blamed,
            f"{report.consecutive_skips} steps in a row overflowed at a loss scale of "
            f"{report.loss_scale:g}"
            + (", its floor" if is_dynamic else ", which is fixed" if is_fixed else ""),
            f"{before}{advice}" + ("; min_scale may be lowered." if is_dynamic else "."),
        )

    def _is_exhausted(self, look: Observation) -> bool:
        report, rule = look.report, look.rule
        if isinstance(rule, DynamicLossScale):
            return report.consecutive_skips >= 2 and report.loss_scale <= rule.min_scale
        enough = 10
        if isinstance(rule, StaticLossScale | NoOpLossScale) and look.is_epoch_end:
            enough = min(enough, max(2, look.steps))  # nothing searches for a scale
        return report.consecutive_skips >= enough


class AllSkipped(Detector):
    """STALLED: every step of the epoch so far was skipped, though the scale is not at its floor."""

    def see(self, look: Observation) -> Verdict | None:
        if not look.skips == look.steps >= _NOTHING_APPLIED:
            return None
        return Verdict(
            "STALLED",
            next(iter(look.report.overflowed), ""),
            f"each of the last {look.steps} steps was skipped, although the loss is finite",
            f"The loss scale, {look.report.loss_scale:g} now, does not find its level: keep that "
            "layer in float32, or begin with a lower initial_scale.",
        )


class Calibrating(Detector):
    """CALIBRATING: overflows of the first 100 steps, by which the scale is found."""

    def see(self, look: Observation) -> Verdict | None:
        report, events = look.report, look.events
        early = events and events[-1].step <= FIRST_STEPS and report.step <= 2 * FIRST_STEPS
        if not (early and isinstance(look.rule, DynamicLossScale)):
            return None
        return Verdict(
            "CALIBRATING",
            "",
            f"{look.skips} steps were skipped on the way to a loss scale of {report.loss_scale:g}",
            "A few at the beginning are how the scale is found.",
        )


class OverflowRate(Detector):
    """UNSTABLE: far more steps overflow than the growth of the scale explains."""

    def __init__(self):
        self._past: collections.deque[GradientReport] = collections.deque()

    def begin_fit(self) -> None:
        self._past.clear()

    def see(self, look: Observation) -> Verdict | None:
        report, rule = look.report, look.rule
        if not self._past and look.fit_start and look.fit_start.step:
            self._past.append(look.fit_start)
        settled = self._settled(report.step)
        self._past.append(report)
        steps = skips = 0
        if settled or not isinstance(rule, DynamicLossScale):
            steps = report.step - (settled.step if settled else 0)
            skips = report.skipped_steps - (settled.skipped_steps if settled else 0)
        expected = _own_rate(rule)
        rate = max(look.limits.max_overflow_rate, min(5 * expected, (1 + expected) / 2))
        if skips < 5 or skips <= rate * steps:
            return None
        return Verdict(
            "UNSTABLE",
            next(iter(report.overflowed), ""),
            f"{skips} of the last {steps} steps overflowed; the growth of the scale explains about "
            f"{expected * steps:.2g}",
            "Lower the learning rate, clip with global_clipnorm=1.0, or keep that layer in "
            "float32.",
        )

    def _settled(self, step: int) -> GradientReport | None:
        """The first report of the window in which the scale is no longer being calibrated."""
        while len(self._past) > 1 and self._past[1].step <= step - _WINDOW:
            self._past.popleft()
        return next((past for past in self._past if past.step >= FIRST_STEPS), None)


def _own_rate(rule: Any) -> float:
    """The share of steps that overflow because the scale has grown: each growth is taken back."""
    if not isinstance(rule, DynamicLossScale):
        return 0.0
    backoffs = math.ceil(math.log(rule.growth_factor) / -math.log(rule.backoff_factor))
    backoffs += rule.hysteresis - 1
    return backoffs / (rule.growth_interval + backoffs)
