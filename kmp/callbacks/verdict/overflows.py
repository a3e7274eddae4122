"""Detectors of overflows: at the scale's floor, in every step, too often, and at the beginning."""

import collections

from kmp.callbacks.verdict.detector import Detector
from kmp.callbacks.verdict.large_steps import GradientSize
from kmp.callbacks.verdict.observation import Observation
from kmp.callbacks.verdict.states import Verdict
from kmp.health.report import GradientReport
from kmp.health.telemetry import FIRST_STEPS, NUM_EVENTS
from kmp.scaling.rules import DynamicLossScale, NoOpLossScale

_IN_A_ROW = 20  # overflows: from 2**15, the scale has sunk below 1
_NOTHING_APPLIED = 30  # steps of an epoch that was skipped as a whole
_OFTEN = 5  # overflows of which a few are nothing
_WINDOW = 500  # steps that the rate of overflows is taken over: that often is 1% of them
# Overflows a step: what the growth of the scale costs by itself, by default.
_LEAST_RATE = 1 / DynamicLossScale.growth_interval

_GROWING = "If the gradients grow from step to step, lower the learning rate. Otherwise: "
LOCATE = "kmp.debug.locate_nonfinite(model, x, y) on such a batch names the layer"
OTHER_MICRO_BATCHES = (
    "One overflow discards a whole window of gradient accumulation: until it is mended, "
    'on_overflow="drop_micro_batch" trains on the other micro-batches.'
)
_OTHER_BATCHES = (
    " If none can, mend that layer; until then min_scale=1.0 keeps the scale up for the other "
    "batches."
)


class Collapsed(Detector):
    """COLLAPSED: steps in a row have overflowed at a scale that does not fall any further.

    Where no layer computes in float16, a lower scale would not help.
    """

    def see(self, look: Observation) -> Verdict | None:
        report = look.report
        if not (look.events and self._is_exhausted(look)):
            return None
        return Verdict(
            "COLLAPSED",
            look.events[0].first_variable,
            f"{report.consecutive_skips} steps in a row overflowed at a loss scale of "
            f"{report.loss_scale:g}"
            + (", its floor" if look.dynamic else ", which is fixed" if look.scale_is_fixed else "")
            if look.in_float16
            else f"the gradients of {report.consecutive_skips} steps in a row held inf or NaN, "
            "though the loss was finite",
            _advice(look),
        )

    def _is_exhausted(self, look: Observation) -> bool:
        report, dynamic = look.report, look.dynamic
        searches = not look.scale_is_fixed and look.in_float16
        if searches and dynamic:
            return report.consecutive_skips >= 2 and report.loss_scale <= dynamic.min_scale
        enough = _IN_A_ROW if dynamic else 10
        if look.is_epoch_end and not searches:
            enough = min(enough, max(2, look.steps))
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
            f"The loss scale, {look.report.loss_scale:g} now, has not found its level. "
            + _advice(look)
            + (f" {OTHER_MICRO_BATCHES}" if look.drops_windows else ""),
        )


class BrokenGradients(Detector):
    """UNSTABLE: gradients hold inf or NaN where no loss scale is the cause: nothing is in float16.

    As at the root of zero, or in an attention over nothing: the loss is finite, its gradient not.
    """

    def see(self, look: Observation) -> Verdict | None:
        if look.in_float16 or not look.events or _is_early(look):
            return None  # early on, code of a layer's own may cast to float16
        at_least = "" if len(look.events) < NUM_EVENTS else "at least "
        last = look.events[0]
        return Verdict(
            "UNSTABLE",
            last.first_variable,
            f"the gradients of {at_least}{len(look.events)} of the last {look.steps} steps held "
            f"inf or NaN, those of step {last.step} for one, though the loss was finite",
            _advice(look),
        )


def _is_early(look: Observation) -> bool:
    """Whether a dynamic scale may still be on its way to where it belongs."""
    events, step = look.events, look.report.step
    early = events and events[-1].step <= FIRST_STEPS and step <= 2 * FIRST_STEPS
    return bool(early and look.dynamic)


class Calibrating(Detector):
    """CALIBRATING: overflows of the first 100 steps, by which the scale is found."""

    def see(self, look: Observation) -> Verdict | None:
        report = look.report
        if not _is_early(look):
            return None
        return Verdict(
            "CALIBRATING",
            "",
            f"{look.skips} steps were skipped on the way to a loss scale of {report.loss_scale:g}",
            f"A few at the beginning are how the scale is found. If it goes on, {LOCATE}.",
        )


class OverflowRate(Detector):
    """UNSTABLE: far more steps overflow than the growth of the scale explains."""

    def __init__(self):
        self._fit_start: GradientReport | None = None
        self._past: collections.deque[GradientReport] = collections.deque()  # of this `fit`
        self._size = GradientSize()

    def see(self, look: Observation) -> Verdict | None:
        report = look.report
        self._size.see(look)
        if look.fit_start is not self._fit_start:
            self._fit_start = look.fit_start
            self._past.clear()
        if not self._past and look.fit_start and look.fit_start.step:
            self._past.append(look.fit_start)
        settled = self._settled(report.step)
        self._past.append(report)
        steps = skips = 0
        if settled or not look.dynamic:
            steps = report.step - (settled.step if settled else 0)
            skips = report.overflow_skips - (settled.overflow_skips if settled else 0)
        expected = look.dynamic.overflow_rate() if look.dynamic else 0.0
        rate = max(look.limits.max_overflow_rate, min(5 * expected, (1 + expected) / 2))
        if skips < _OFTEN or skips <= rate * steps:
            return None
        return Verdict(
            "UNSTABLE",
            next(iter(report.overflowed), ""),
            f"{skips} of the last {steps} steps overflowed; the growth of the scale explains about "
            f"{expected * steps:.2g}",
            (_GROWING if self._size.has_grown else "") + _advice(look, _OTHER_BATCHES),
        )

    def _settled(self, step: int) -> GradientReport | None:
        """The first report of the window in which the scale is no longer being calibrated."""
        while len(self._past) > 1 and self._past[1].step <= step - _WINDOW:
            self._past.popleft()
        return next((past for past in self._past if past.step >= FIRST_STEPS), None)


class LostAtFloor(Detector):
    """UNSTABLE: steps overflow at the floor of the scale, again and again.

    No growth of the scale has led to such an overflow, and the batch will overflow again.
    """

    def __init__(self):
        self._size = GradientSize()

    def see(self, look: Observation) -> Verdict | None:
        self._size.see(look)
        floor, report = look.dynamic.min_scale if look.dynamic else 0.0, look.report
        at_floor = [x for x in report.events if x.loss_finite and x.loss_scale <= floor]
        lost = [x for x in at_floor if x.step > FIRST_STEPS]
        is_now = lost and lost[0] in look.events
        often = len(lost) >= _OFTEN and len(lost) > _LEAST_RATE * (report.step - lost[-1].step)
        if not (is_now and often):
            return None
        return Verdict(
            "UNSTABLE",
            next(iter(report.overflowed), ""),
            f"{len(lost)} steps since step {lost[-1].step} overflowed at a loss scale of "
            f"{lost[0].loss_scale:g}, its floor",
            (_GROWING if self._size.has_grown else "") + _advice(look, _OTHER_BATCHES),
        )


def _advice(look: Observation, floor: str = "") -> str:
    """What to do if gradients overflow and the loss scale does not find its level.

    Args:
        look: at the run.
        floor: what a higher floor of a dynamic scale is good for if no scale holds the gradients.
    """
    in_float16 = look.in_float16
    if look.dynamic and in_float16:
        return (
            f"{LOCATE}, and a loss scale if one can hold it: write "
            f"kmp.DynamicLossScale(initial_scale=...) with that number.{floor}"
        )
    if (look.dynamic or look.rule == NoOpLossScale()) and not in_float16:
        return (
            "No layer's policy computes in float16: unless code of your own casts to it, no loss "
            f"scale helps, and {LOCATE}."
        )
    other = "dynamic" if in_float16 else "none"
    return f'Write loss_scale="{other}". If it overflows still, {LOCATE}.'
