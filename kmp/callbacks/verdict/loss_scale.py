"""Detectors of overflow and of underflow.

Gradients overflow at the scale's floor, in every step, too often, and at the beginning. They
underflow where float16 loses them at a loss scale that could be higher.
"""

import collections
import math
from typing import Any

import numpy as np

from kmp.callbacks.verdict.large_steps import GradientSize
from kmp.callbacks.verdict.observation import Detector, Observation, Weight, significant
from kmp.callbacks.verdict.states import Verdict
from kmp.health.report import GradientReport
from kmp.health.telemetry import FIRST_STEPS, NUM_EVENTS
from kmp.scaling.rules import DynamicLossScale, NoOpLossScale, dynamic

_IN_A_ROW = 20  # overflows: from 2**15, the scale has sunk below 1
_NOTHING_APPLIED = 30  # steps of an epoch that was skipped as a whole
_OFTEN = 5  # overflows; fewer of them mean nothing
_WINDOW = 500  # steps over which the rate of overflows is taken: `_OFTEN` is 1% of them
# Overflows per step that the growth of the scale causes by itself, at its default interval.
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

_APART = 8  # bits between the gradients of a batch and those of the usual batches
_LEAST = 2.0  # bits of headroom: one is left after the scale has doubled
_LARGE = 2.0**10  # a scaled gradient that is 34 bits above float16's smallest number
_MOST = 100  # largest exponent of a scale: float32 must hold the loss times that scale
_FELT = 2.0**-17  # below, float16 keeps fewer bits than bfloat16, which trains well
_USUAL = 2.0**15  # a scale at which float16 loses no gradient above 2**-40


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
    """UNSTABLE: gradients hold inf or NaN though nothing is in float16: no loss scale is the cause.

    Examples are the square root of zero, and an attention over nothing: the loss is finite, but its
    gradient is not.
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
        skipped = "1 step was" if look.skips == 1 else f"{look.skips} steps were"
        return Verdict(
            "CALIBRATING",
            "",
            f"{skipped} skipped on the way to a loss scale of {report.loss_scale:g}",
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

    Such an overflow is not due to the growth of the scale, and the same batch will overflow again.
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


class Underflow(Detector):
    """UNDERFLOW: float16 loses gradients at a loss scale that could be higher.

    Gradients that are all zero count in the second look in a row: a batch in which no sample
    weighs anything has such gradients too.
    """

    def __init__(self):
        self._was_zero = False

    def see(self, look: Observation) -> Verdict | None:
        was_zero, self._was_zero = self._was_zero, not look.report.grad_norm
        return loses_gradients(look) if was_zero or look.report.grad_norm else None


def loses_gradients(look: Observation) -> Verdict | None:
    """UNDERFLOW, if float16 loses gradients in this look."""
    if look.report.headroom_bits <= max(look.limits.spare_bits, _LEAST):
        return None  # a higher scale would overflow
    return _all_lost(look) or _many_lost(look)


def _half(look: Observation) -> dict[str, Weight]:
    return {p: x for p, x in look.weights.items() if x.compute_dtype == "float16"}


def _all_lost(look: Observation) -> Verdict | None:
    report, half = look.report, _half(look)
    watched = significant(report, half)
    norms, zeros = report.column("l2_norm"), report.column("zero_share")
    # If the gradients of float32 layers are zero too, float16 has not lost them: the loss is flat,
    # because sample weights are zero or a hinge loss is satisfied. If those gradients are large, a
    # layer in between is dead: float16 does not lose that many bits at once. (Each of a million
    # pixels adds a small part to a mean.)
    lossless = [path for path in report.paths if path not in half]
    scaled = report.max_abs * report.loss_scale
    is_flat = bool(lossless) and (not report.grad_norm or scaled >= _LARGE)
    # Nor are all gradients so small at once that none survives a scale of `_USUAL`.
    is_flat |= not report.grad_norm and report.loss_scale >= _USUAL
    # On TensorFlow the share of n zeros in n numbers may round to less than 1.
    if is_flat or not watched or not all(zeros[path] and not norms[path] for path in watched):
        return None
    reason = "every gradient of the float16 layers is exactly zero"
    return Verdict("UNDERFLOW", watched[-1], reason, _higher_scale(report, look.rule))


def _many_lost(look: Observation) -> Verdict | None:
    report, limits = look.report, look.limits
    watched = significant(report, _half(look))
    if report.details is None or not watched:
        return None
    lost_share, degraded_share = report.lost_share, report.degraded_share  # all variables' each
    worst = max(watched, key=lambda path: lost_share[path])
    if lost_share[worst] > limits.max_lost_share:
        share = f"{lost_share[worst]:.2%} of the gradient would be rounded to zero in float16"
        return Verdict("UNDERFLOW", worst, share, _higher_scale(report, look.rule))
    # The bits that small numbers lose are felt where the largest has lost many itself.
    largest = report.column("max_abs")
    felt = {p: largest[p] * report.loss_scale < _FELT for p in watched}
    degraded = {path: degraded_share[path] * felt[path] for path in watched}
    if float(np.mean(list(degraded.values()))) <= limits.max_degraded_share:
        return None
    worst = max(degraded, key=lambda path: degraded[path])
    share = f"{degraded[worst]:.1%} of the gradient has fewer bits in float16 than it should"
    return Verdict("UNDERFLOW", worst, share, _higher_scale(report, look.rule))


def _higher_scale(report: GradientReport, rule: Any) -> str:
    """Say how to get a higher scale, without advising what is set already."""
    all_zero = not math.isfinite(report.headroom_bits)
    headroom = getattr(rule, "headroom_bits", 0)  # of AmaxLossScale
    if headroom > 1 and not all_zero:
        return f"Write kmp.AmaxLossScale(headroom_bits=1); it is {headroom:g} now."
    room = math.log2(report.loss_scale) + report.headroom_bits - 1
    exponent = round(math.log2(_USUAL)) if all_zero else min(math.floor(room), _MOST)
    if found := dynamic(rule):
        advice = _for_dynamic(report, found, exponent)
    else:
        advice = f"Write {_own_scale(exponent)}."  # a fixed scale would not fit larger gradients
    flat = " If they are zero in float32 too, the loss does not depend on the weights."
    return advice + (flat if all_zero else "")


def _own_scale(exponent: int) -> str:
    """Code for a dynamic scale that begins at 2**exponent, or the default if <= 2 bits lower."""
    if exponent - math.log2(DynamicLossScale.initial_scale) <= 2:
        return 'loss_scale="dynamic"'
    ceiling = f", max_scale=2.0**{exponent}" if 2.0**exponent > DynamicLossScale.max_scale else ""
    return f"kmp.DynamicLossScale(initial_scale=2.0**{exponent}{ceiling})"


def _for_dynamic(report: GradientReport, rule: DynamicLossScale, exponent: int) -> str:
    wanted = 2.0**exponent
    refused = [e for e in report.events if e.loss_finite and e.loss_scale <= wanted]
    if refused:
        floor = exponent - _APART
        begin = f"initial_scale=2.0**{floor}, " if 2.0**floor > rule.initial_scale else ""
        ceiling = f", max_scale=2.0**{floor}" if 2.0**floor > DynamicLossScale.max_scale else ""
        leave_out = (
            f"; kmp.DynamicLossScale({begin}min_scale=2.0**{floor}{ceiling}) leaves out those that "
            "overflow"
        )
        return (
            f"A scale of {refused[0].loss_scale:g} overflowed in step {refused[0].step}, on "
            'another batch. In "mixed_bfloat16" with loss_scale="none" both batches count'
            f"{leave_out if rule.min_scale < 2.0**floor else ''}."
        )
    wait = ", or wait for it to grow" if wanted <= rule.max_scale else ""
    if rule.initial_scale < wanted:
        return f"Write {_own_scale(exponent)}{wait}."
    # It has sunk since, longer ago than the last overflows that are known.
    return (
        f"Wait for the scale to grow from {report.loss_scale:g}: it does so every "
        f"{rule.growth_interval} steps, or more often with a lower growth_interval."
    )
