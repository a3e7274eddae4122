"""Detectors of numbers that are not finite: the loss, and weights."""

import dataclasses
import math

from kmp.callbacks.verdict.corrupted_state import NonfiniteState
from kmp.callbacks.verdict.detector import Detector
from kmp.callbacks.verdict.observation import Observation
from kmp.callbacks.verdict.states import Verdict
from kmp.health.telemetry import NUM_EVENTS


class ForwardNaN(Detector):
    """FORWARD-NAN: the loss itself is not finite. No loss scale can help."""

    def see(self, look: Observation) -> Verdict | None:
        reason = self._reason(look)
        if reason is None:
            return None
        if cause := NonfiniteWeights().see(look) or NonfiniteState().see(look):
            return dataclasses.replace(
                cause, state="FORWARD-NAN", reason=f"{reason}; {cause.reason}"
            )
        return Verdict(
            "FORWARD-NAN",
            "",
            reason,
            "No loss scale helps: look for a bad batch, a division or logarithm of zero, or an "
            "overflow in the forward pass; kmp.debug.locate_nonfinite(model, x, y) names the "
            "layer, which gradients that are all NaN cannot.",
        )

    def _reason(self, look: Observation) -> str | None:
        dead = [event for event in look.events if not event.loss_finite]
        if dead:
            at_least = "" if len(look.events) < NUM_EVENTS else "at least "
            return (
                f"the loss was not finite in {at_least}{len(dead)} of the last {look.steps} steps, "
                f"in step {dead[-1].step} for one"
            )
        losses = look.losses or {}
        lost = [name for name, x in losses.items() if not math.isfinite(x)]
        if not lost:
            return None
        return (
            f"`{lost[0]}` of the epoch is {float(losses[lost[0]])}, though all gradients are finite"
        )


class NonfiniteWeights(Detector):
    """UNSTABLE: weights hold inf or NaN, although no such gradient was applied."""

    def see(self, look: Observation) -> Verdict | None:
        norms = look.report.weight_norm
        lost = [path for path in norms if not math.isfinite(norms[path])]
        if not lost:
            return None
        return Verdict(
            "UNSTABLE",
            lost[-1],
            f"{len(lost)} of {len(norms)} weights hold inf or NaN",
            "No step brings them back: load a checkpoint from before. Gradients that are not "
            "finite are skipped, so look at the learning rate, the optimizer's epsilon and "
            "constraints, and for a batch whose gradients are huge, which the optimizer squares.",
        )
