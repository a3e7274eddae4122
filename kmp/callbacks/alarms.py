"""What `GradientHealth` warns of, each kind once."""

from collections.abc import Mapping, Sequence
from typing import Any

from kmp._common import warn
from kmp._keras import layers_of
from kmp.callbacks.verdict.large_steps import or_clip
from kmp.callbacks.verdict.observation import Observation
from kmp.callbacks.verdict.states import Limits, Verdict
from kmp.health.report import GradientReport, SpikeEvent
from kmp.scaling.arguments import scales

_NAMED = 5  # variables that a warning names


class Alarms:
    """Warns of a run's reports and verdicts, once for each kind.

    Args:
        limits: where a gradient is vanishing or exploding.
    """

    def __init__(self, limits: Limits):
        self._limits = limits
        self._said: set[str] = set()
        self._step = 0  # of the last report

    def of_verdict(self, step: int, verdict: Verdict) -> None:
        """Warn of the state of a run after a step, if it is one to act upon."""
        if verdict.state not in ("HEALTHY", "CALIBRATING", *self._said):
            self._said.add(verdict.state)
            warn(f"Step {step}: {verdict}")

    def of_gradients(self, look: Observation) -> None:
        """Warn of gradients that overflowed, vanish or explode, since the look before."""
        report, weights = look.report, look.weights
        new = [e for e in report.events if e.step > self._step and e.loss_finite]
        self._of_statistics(report)
        self._of_spikes(look, [e for e in report.spikes if e.step > self._step])
        self._step = report.step
        if new:  # if a loss is not finite, the verdict says more about it
            self._overflow(report, look.in_float16)
        norms, zeros = report.column("l2_norm"), report.column("zero_share")
        # A variable without a gradient has a row of zeros: not even its zeros are counted.
        known = set(look.significant)
        # If all gradients are zero, the loss is flat there, as a hinge loss can be, or the sample
        # weights are zero. On JAX a variable that the loss does not depend on has zeros as well.
        vague = not report.grad_norm
        measured = {
            path: norm
            for path, norm in norms.items()
            if path in known and (norm or (zeros[path] and not (vague or weights[path].network)))
        }
        low, high = self._limits.min_grad_norm, self._limits.max_grad_norm
        self._once(
            report.step,
            f"gradient norm below {low:g}",
            {path: f"norm {x:.2g}" for path, x in measured.items() if x < low},
            "the variable hardly learns. Is its layer connected to the loss, or saturated?",
        )
        self._once(
            report.step,
            f"gradient norm above {high:g}",
            {path: f"norm {x:.2g}" for path, x in measured.items() if x > high},
            f"if the loss does not fall, lower the learning rate{or_clip(look)}. Otherwise scale "
            "large targets down.",
        )

    def of_skipped_steps(self, step: int, steps: int, skips: int) -> None:
        """Warn if many of the last steps of an epoch, which ended with `step`, were skipped."""
        many = skips > 1 and skips > self._limits.max_overflow_rate * steps
        if many and "skipped steps" not in self._said:
            self._said.add("skipped steps")
            warn(
                f"Step {step}: {skips} of the last {steps} steps were skipped "
                f"({skips / steps:.1%}). The epoch's loss and metrics count their batches all the "
                "same, where the loss is finite, but nothing was learned from them."
            )

    def of_unscaled_float16(self, model: Any, rule: Any) -> None:
        """Warn if layers compute in float16 although nothing scales the loss."""
        if scales(rule):
            return
        layers = [x for x in layers_of(model)[1:] if x.path]  # Input has none
        half = [x.path for x in layers if x.compute_dtype == "float16"]
        self._once(
            0,
            "float16 without loss scaling",
            dict.fromkeys(half, "compute dtype float16"),
            'gradients below 6e-8 become zero. Write kmp.scaled(..., loss_scale="dynamic").',
        )

    def _of_statistics(self, report: GradientReport) -> None:
        held = report.held_statistics
        if held and "batch statistics" not in self._said:
            self._said.add("batch statistics")
            steps = "a step" if held == 1 else f"{held} steps"
            warn(
                f"Step {report.step}: the moving statistics of the batch normalizations were held "
                f"in {steps}, which would have multiplied a moving variance. Look at the batches: "
                "their inputs are far larger than those before."
            )

    def _of_spikes(self, look: Observation, new: Sequence[SpikeEvent]) -> None:
        if not new:
            return
        event = new[-1]  # the first of them
        began = look.epoch_start.step if look.epoch_start else 0
        self._once(
            look.report.step,
            "gradient spike",
            {event.variable: f"{event.growth:.3g} times its size"},
            f"step {event.step}, batch {event.step - began - 1} of this epoch (counted from 0), "
            f"was left out: its gradients' norm, {event.norm:.3g}, is above the limit of "
            f"{event.limit:.3g}. Look at the batch: it is bad, or rare and important. "
            "kmp.debug.explain_spike(model, x, y, (other_x, other_y)) tells what is unusual in it.",
        )

    def _overflow(self, report: GradientReport, in_float16: bool) -> None:
        counts = report.overflowed.items()
        usual = "A few at the beginning are how the scale is found."
        broken = (
            "No layer's policy computes in float16: unless code of your own does, no loss scale "
            "helps."
        )
        self._once(
            report.step,
            "gradient overflow",
            {path: f"{count} of {report.step} steps" for path, count in counts},
            "those steps were skipped, and nothing was learned from their batches; the loss scale "
            f"is now {report.loss_scale:g}. {usual if in_float16 else broken}",
        )

    def _once(self, step: int, kind: str, found: Mapping[str, str], advice: str) -> None:
        if not found or kind in self._said:
            return
        self._said.add(kind)
        named = ", ".join(f"{path} ({what})" for path, what in list(found.items())[:_NAMED])
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        warn(f"Step {step}: {kind} in {named}{more}: {advice}")
