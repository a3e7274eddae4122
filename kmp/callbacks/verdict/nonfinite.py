"""Detectors of numbers that are not finite, or that a bad batch has ruined: loss, weights, state.

A huge but finite batch can have finite gradients, so its step is applied. It can leave a moving
variance or a slot at inf for good, or at a value that thousands of good batches cannot correct.
"""

import dataclasses
import math

from kmp.callbacks.verdict.observation import Corrupted, Detector, Observation
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


# How many times as large a moving variance may be as at the last look. One batch, with a momentum
# of 0.99, has to be a thousand times as large as the others.
_GROWTH = 1e4
# The steps after which a moving variance can be compared. It begins at 1, whatever the data; after
# these steps it has come at least a fiftieth of its way, with a momentum of up to 0.999.
_SETTLED = 20


class NonfiniteState(Detector):
    """UNSTABLE: moving statistics, slots or averaged weights hold inf or NaN.

    They are read at the end of each epoch.
    """

    def see(self, look: Observation) -> Verdict | None:
        return corrupted(
            look.nonfinite_state,
            "kmp.layers.Float32BatchNormalization takes in no statistics that are not finite.",
        )


class RuinedVariance(Detector):
    """UNSTABLE: a batch normalization's moving variance has grown too fast between looks."""

    def __init__(self):
        self._sound: dict[tuple[int, str], float] = {}  # the largest, by place and path

    def see(self, look: Observation) -> Verdict | None:
        found = []
        for i, (path, now, epsilon) in enumerate(look.moving_variances):
            before = self._sound.get((i, path), now)
            if now + epsilon > _GROWTH * (before + epsilon):  # which stays the reference
                name = path.split("/")[-1]
                reason = f"{name} has grown from {before:.3g} to {now:.3g} at its largest"
                found.append(Corrupted(path, reason, of_layer=True))
            elif look.report.step >= _SETTLED and math.isfinite(now):
                self._sound[i, path] = now
        return corrupted(
            found, 'kmp.scaled(..., spikes="skip") holds the statistics against such a batch.'
        )


def corrupted(found: list[Corrupted], prevention: str = "") -> Verdict | None:
    """Return UNSTABLE if any state is ruined; `prevention` is the advice for a layer's state."""
    if not found:
        return None
    first, more = found[0], len(found) - 1
    return Verdict(
        "UNSTABLE",
        first.path,
        first.reason + (f"; {more} more variables are affected" if more else ""),
        "The model predicts with it, and good batches take very long to wash it out, or never: "
        f"load a checkpoint from before, and look for a batch of another scale. {prevention}"
        if first.of_layer
        else "The optimizer goes on from it: load a checkpoint from before, or compile the model "
        "with a new optimizer, and look for a batch of another scale.",
    )
