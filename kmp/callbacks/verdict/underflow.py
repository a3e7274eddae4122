"""The detector of underflow: float16 loses gradients at a loss scale that could be higher."""

import math
from typing import Any

import numpy as np

from kmp.callbacks.verdict.detector import Detector
from kmp.callbacks.verdict.observation import Observation, significant
from kmp.callbacks.verdict.states import Verdict
from kmp.health.report import GradientReport
from kmp.scaling.amax import AmaxLossScale
from kmp.scaling.rules import DynamicLossScale

_APART = 8  # bits between the gradients of a batch and those of the usual batches
_LARGE = 2.0**10  # a scaled gradient of 34 bits above the smallest number of float16
_USUAL = 2.0**15  # a scale at which float16 loses no gradient above 2**-40


class Underflow(Detector):
    """UNDERFLOW: float16 loses gradients at a loss scale that could be higher."""

    def see(self, look: Observation) -> Verdict | None:
        report, limits = look.report, look.limits
        if report.headroom_bits <= limits.spare_bits:
            return None  # a higher scale would overflow
        half = {p: x for p, x in look.weights.items() if x.compute_dtype == "float16"}
        advice = _higher_scale(report, look.rule)
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
        if watched and not is_flat and all(zeros[path] and not norms[path] for path in watched):
            reason = "every gradient of the float16 layers is exactly zero"
            return Verdict("UNDERFLOW", watched[-1], reason, advice)
        if report.details is None:
            return None
        lost_share, degraded_share = report.lost_share, report.degraded_share  # all variables' each
        lost = {path: lost_share[path] for path in watched}
        degraded = {path: degraded_share[path] for path in watched}
        worst = max(lost, key=lambda path: lost[path], default="")
        if worst and lost[worst] > limits.max_lost_share:
            share = f"{lost[worst]:.2%} of the gradient would be rounded to zero in float16"
            return Verdict("UNDERFLOW", worst, share, advice)
        if degraded and float(np.mean(list(degraded.values()))) > limits.max_degraded_share:
            worst = max(degraded, key=lambda path: degraded[path])
            share = (
                f"{degraded[worst]:.1%} of the gradient has fewer bits in float16 than it should"
            )
            return Verdict("UNDERFLOW", worst, share, advice)
        return None


def _higher_scale(report: GradientReport, rule: Any) -> str:
    if not math.isfinite(report.headroom_bits) and isinstance(rule, DynamicLossScale):
        return (
            "If they are zero in float32 too, the loss does not depend on the weights; otherwise "
            f"begin with a scale above {report.loss_scale:g}, by "
            "kmp.DynamicLossScale(initial_scale=2.0**24)."
        )
    if not math.isfinite(report.headroom_bits):
        return 'Raise the loss scale, by loss_scale="dynamic" or initial_scale=2.0**15.'
    if isinstance(rule, AmaxLossScale):
        return f"Write kmp.AmaxLossScale(headroom_bits=1); it is {rule.headroom_bits:g} now."
    exponent = math.floor(math.log2(report.loss_scale) + report.headroom_bits - 1)
    if isinstance(rule, DynamicLossScale):
        refused = [e for e in report.events if e.loss_finite and e.loss_scale <= 2.0**exponent]
        if refused:
            floor = min(exponent - _APART, math.floor(math.log2(rule.initial_scale)))
            return (
                f"A scale of {refused[0].loss_scale:g} overflowed in step {refused[0].step}, on "
                'another batch. In "mixed_bfloat16" with loss_scale="none" both batches count; '
                f"kmp.DynamicLossScale(min_scale=2.0**{floor}) leaves out those that overflow."
            )
        return f"Write kmp.DynamicLossScale(initial_scale=2.0**{exponent}), or wait for it to grow."
    return f'Write loss_scale="dynamic", or loss_scale=2.0**{exponent}.'
