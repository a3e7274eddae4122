"""What state a run is in: the verdict over a report and the one before it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kmp._common import number
from kmp.health.measure import FIRST_STEPS, NUM_EVENTS
from kmp.health.report import GradientReport
from kmp.scaling.amax import AmaxLossScale
from kmp.scaling.rules import DynamicLossScale

# From the best to the worst; a state's place is its number in logs and charts.
STATES = (
    "HEALTHY",
    "CALIBRATING",
    "UNDERFLOW",
    "UNSTABLE",
    "STALLED",
    "COLLAPSED",
    "FORWARD-NAN",
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The state of a run.

    ```
    HEALTHY      nothing to do
    CALIBRATING  in the first 100 steps: the loss scale is being found, by overflows
    UNDERFLOW    float16 loses gradients at a scale that could be higher
    UNSTABLE     overflows, gradients or updates are far more, or larger, than in sound training
    STALLED      the weights hardly move, although there are gradients
    COLLAPSED    gradients overflow although the loss scale cannot sink any more
    FORWARD-NAN  the loss itself is not finite: no loss scale can help
    ```

    Attributes:
        state: one of these.
        blame: path of the variable to look at; empty if none is, or none can be told. Of those that
            overflow together it is the last in the model's order, whose gradient comes first.
        reason: what was seen, in numbers.
        advice: one line, what to do.
        code: int, the place of `state` in this list, from 0.

    Example:

    >>> print(Verdict("UNDERFLOW", "dense/kernel", "12% are lost", "Raise the loss scale."))
    UNDERFLOW in dense/kernel: 12% are lost. Raise the loss scale.
    """

    state: str
    blame: str = ""
    reason: str = ""
    advice: str = ""

    @property
    def code(self) -> int:
        return STATES.index(self.state)

    def __str__(self) -> str:
        where = f" in {self.blame}" if self.blame else ""
        return f"{self.state}{where}: {self.reason}. {self.advice}".strip()


@dataclasses.dataclass(frozen=True)
class Limits:
    """Where a verdict turns; see `kmp.callbacks.GradientHealth`, whose arguments these are.

    Raises:
        ValueError: if a number is negative, or no number.

    Example:

    >>> Limits(max_grad_norm=1e6).max_grad_norm
    1000000.0
    """

    max_grad_norm: float = 1e4
    max_overflow_rate: float = 0.01
    max_update_ratio: float = 0.1
    max_lost_share: float = 1e-3
    max_degraded_share: float = 0.05
    spare_bits: float = 4.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = number(field.name, getattr(self, field.name), "GradientHealth")
            if not value >= 0:
                raise ValueError(
                    f"`{field.name}` must not be negative. Received: {field.name}={value}. "
                    f"Write {field.name}={field.default}, the default."
                )
            object.__setattr__(self, field.name, value)


def judge(
    report: GradientReport,
    before: GradientReport | None,
    settled: GradientReport | None,
    rule: Any,
    limits: Limits,
    *,
    float16: Mapping[str, str],
    update_ratios: list[float],
) -> Verdict:
    """Judge the steps since the report before.

    Args:
        report: the present one.
        before: the one before; None for the beginning of training.
        settled: one of a window of steps ago, after the first 100; None if there is none yet.
        rule: the loss-scaling strategy.
        limits: where the verdict turns.
        float16: paths of the variables whose layers compute in float16, with the layers' paths.
        update_ratios: the medians of log10(update / weight) of the last looks.
    """
    since = before.step if before else 0
    events = [event for event in report.events if event.step > since]
    skips = report.skipped_steps - (before.skipped_steps if before else 0)
    dead = [event for event in events if not event.loss_finite]
    if dead:
        number_seen = f"at least {len(dead)}" if len(events) == NUM_EVENTS else str(len(dead))
        return Verdict(
            "FORWARD-NAN",
            "",
            f"the loss was not finite in {number_seen} of the last {report.step - since} steps, "
            f"in step {dead[-1].step} for one",
            "No loss scale helps: look for a bad batch, a division or logarithm of zero, or an "
            "overflow in the forward pass; kmp.debug.locate_nonfinite(model, x, y) names the "
            "layer, which gradients that are all NaN cannot.",
        )
    if events and _is_exhausted(report, rule):
        return Verdict(
            "COLLAPSED",
            events[0].first_variable,
            f"{report.consecutive_skips} steps in a row overflowed at a loss scale of "
            f"{report.loss_scale:g}"
            + (", its floor" if isinstance(rule, DynamicLossScale) else ", which is fixed"),
            "The scale is not to blame any more: keep that layer in float32, or rescale its "
            "inputs; min_scale may be lowered.",
        )
    if report.step and not report.loss_is_scaled:
        return Verdict(
            "STALLED",
            "",
            f"nothing scales the loss, but gradients are divided by a loss scale of "
            f"{report.loss_scale:g}",
            "In your train_step, write loss = self.optimizer.scale_loss(loss) before taking "
            'gradients; or kmp.scaled(..., loss_scale="none").',
        )
    early = events and events[-1].step <= FIRST_STEPS and report.step <= 2 * FIRST_STEPS
    if early and isinstance(rule, DynamicLossScale):
        return Verdict(
            "CALIBRATING",
            "",
            f"{skips} steps were skipped on the way to a loss scale of {report.loss_scale:g}",
            "A few at the beginning are how the scale is found.",
        )
    return (
        _unstable(report, settled, rule, limits, update_ratios)
        or _underflow(report, rule, limits, float16)
        or Verdict("HEALTHY", "", f"loss scale {report.loss_scale:g}, {skips} skipped", "")
    )


def _is_exhausted(report: GradientReport, rule: Any) -> bool:
    """Whether overflows go on although the scale sinks no more."""
    if isinstance(rule, DynamicLossScale):
        return report.consecutive_skips >= 2 and report.loss_scale <= rule.min_scale
    return report.consecutive_skips >= 10


def _unstable(
    report: GradientReport,
    settled: GradientReport | None,
    rule: Any,
    limits: Limits,
    update_ratios: list[float],
) -> Verdict | None:
    steps = skips = 0
    if settled or not isinstance(rule, DynamicLossScale):
        steps = report.step - (settled.step if settled else 0)
        skips = report.skipped_steps - (settled.skipped_steps if settled else 0)
    expected = 1 / getattr(rule, "growth_interval", math.inf)
    rate = max(limits.max_overflow_rate, 5 * expected)
    if skips >= 5 and skips > rate * steps:
        return Verdict(
            "UNSTABLE",
            next(iter(report.overflowed), ""),
            f"{skips} of the last {steps} steps overflowed, where about {expected * steps:.2g} "
            "are the scale's own",
            "Lower the learning rate, clip with global_clipnorm=1.0, or keep that layer in "
            "float32.",
        )
    if report.grad_norm > limits.max_grad_norm:
        norms = report.column("l2_norm")
        return Verdict(
            "UNSTABLE",
            max(norms, key=lambda path: norms[path]),
            f"the gradient's norm is {report.grad_norm:.3g}",
            "Lower the learning rate, or clip with global_clipnorm=1.0.",
        )
    ratio = float(np.median(update_ratios)) if len(update_ratios) >= 10 else -math.inf
    if limits.max_update_ratio and ratio > math.log10(limits.max_update_ratio):
        ratios = report.update_ratio
        return Verdict(
            "UNSTABLE",
            max(ratios, key=lambda path: ratios[path]) if ratios else "",
            f"a step changes the weights by {10**ratio:.2g} of their norm; 0.001 is usual",
            "Lower the learning rate.",
        )
    return None


def _underflow(
    report: GradientReport, rule: Any, limits: Limits, float16: Mapping[str, str]
) -> Verdict | None:
    if report.headroom_bits <= limits.spare_bits:
        return None  # a higher scale would overflow
    advice = _higher_scale(report, rule)
    watched = significant(report, float16)
    zeros = report.column("zero_share")
    # Where float32 layers have gradients of zero too, nobody has lost them: the loss is flat, by
    # weights of zero or a satisfied hinge.
    lossless = [path for path in report.paths if path not in float16]
    is_flat = bool(lossless) and not report.grad_norm
    if watched and not is_flat and all(zeros[path] == 1 for path in watched):
        return Verdict(
            "UNDERFLOW", watched[-1], "every gradient of the float16 layers is exactly zero", advice
        )
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
        share = f"{degraded[worst]:.1%} of the gradient has fewer bits in float16 than it should"
        return Verdict("UNDERFLOW", worst, share, advice)
    return None


def significant(report: GradientReport, layers: Mapping[str, str]) -> list[str]:
    """Those variables whose gradient is not mere rounding.

    A bias right before a batch normalization has a gradient that is zero but for rounding, since
    the mean is subtracted again: it is left out where its norm is below 1e-4 of its layer's.
    """
    norms = report.column("l2_norm")
    largest: dict[str, float] = {}
    for path, layer in layers.items():
        largest[layer] = max(largest.get(layer, 0.0), norms.get(path, 0.0))
    return [
        path
        for path, layer in layers.items()
        if path in norms and norms[path] >= 1e-4 * largest[layer]
    ]


def _higher_scale(report: GradientReport, rule: Any) -> str:
    if not math.isfinite(report.headroom_bits):
        return 'Raise the loss scale, by loss_scale="dynamic" or initial_scale=2.0**15.'
    if isinstance(rule, AmaxLossScale):
        return f"Write kmp.AmaxLossScale(headroom_bits=1); it is {rule.headroom_bits:g} now."
    exponent = math.floor(math.log2(report.loss_scale) + report.headroom_bits - 1)
    if isinstance(rule, DynamicLossScale):
        return f"Write kmp.DynamicLossScale(initial_scale=2.0**{exponent}), or wait for it to grow."
    return f'Write loss_scale="dynamic", or loss_scale=2.0**{exponent}.'
