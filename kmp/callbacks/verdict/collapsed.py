"""The verdict COLLAPSED: gradients overflow although the loss scale cannot fall any further."""

from kmp.callbacks.verdict.evidence import Evidence
from kmp.callbacks.verdict.states import Verdict
from kmp.precision.trees import HALF_DTYPES
from kmp.scaling.rules import DynamicLossScale, NoOpLossScale, StaticLossScale


def collapsed(evidence: Evidence) -> Verdict | None:
    """COLLAPSED if steps in a row have overflowed at a scale that does not fall."""
    report, rule = evidence.report, evidence.rule
    is_dynamic = isinstance(rule, DynamicLossScale)
    is_fixed = isinstance(rule, StaticLossScale | NoOpLossScale)
    if is_dynamic:
        exhausted = report.consecutive_skips >= 2 and report.loss_scale <= rule.min_scale
    else:
        enough = 10
        if is_fixed and evidence.losses:  # nothing searches for a scale: a whole epoch is enough
            enough = min(enough, max(2, evidence.steps))
        exhausted = report.consecutive_skips >= enough
    if not (evidence.events and exhausted):
        return None
    blamed = evidence.events[0].first_variable
    weight = evidence.weights.get(blamed)
    advice = "keep that layer in float32, or rescale its inputs"
    if weight and weight.compute_dtype not in HALF_DTYPES:
        advice = "ask kmp.debug.locate_nonfinite for the cause: that layer is in float32 already"
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
