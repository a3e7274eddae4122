"""The detector of underflow: float16 loses gradients at a loss scale that could be higher."""

import math
from typing import Any

import numpy as np

from kmp.callbacks.verdict.detector import Detector
from kmp.callbacks.verdict.observation import Observation, Weight, significant
from kmp.callbacks.verdict.states import Verdict
from kmp.health.report import GradientReport
from kmp.scaling.rules import DynamicLossScale, dynamic

_APART = 8  # bits between the gradients of a batch and those of the usual batches
_LEAST = 2.0  # bits: so that a scale of twice as much leaves one
_LARGE = 2.0**10  # a scaled gradient of 34 bits above the smallest number of float16
_MOST = 100  # exponent of a scale; float32 must hold the loss times it
_FELT = 2.0**-17  # below, float16 keeps fewer bits than bfloat16, which trains well
_USUAL = 2.0**15  # a scale at which float16 loses no gradient above 2**-40


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
    # If float32 layers have gradients of zero too, nobody has lost them: the loss is flat, by
    # weights of zero or a satisfied hinge. If theirs are large, a layer in between is dead: so
    # many bits are not lost at once. (Each of a million pixels adds a small part to a mean.)
    lossless = [path for path in report.paths if path not in half]
    scaled = report.max_abs * report.loss_scale
    is_flat = bool(lossless) and (not report.grad_norm or scaled >= _LARGE)
    # So small are not all gradients at once, either.
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
    """What to do for a higher scale: nothing that is set already."""
    all_zero = not math.isfinite(report.headroom_bits)
    headroom = getattr(rule, "headroom_bits", 0)  # of AmaxLossScale
    if headroom > 1 and not all_zero:
        return f"Write kmp.AmaxLossScale(headroom_bits=1); it is {headroom:g} now."
    room = math.log2(report.loss_scale) + report.headroom_bits - 1
    exponent = round(math.log2(_USUAL)) if all_zero else min(math.floor(room), _MOST)
    if found := dynamic(rule):
        advice = _for_dynamic(report, found, exponent)
    else:
        advice = f"Write {_own_scale(exponent)}."  # a fixed one fits no larger gradient
    flat = " If they are zero in float32 too, the loss does not depend on the weights."
    return advice + (flat if all_zero else "")


def _own_scale(exponent: int) -> str:
    """A dynamic scale that begins this high, or by default at most two bits lower."""
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
