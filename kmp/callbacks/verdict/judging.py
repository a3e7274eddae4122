"""The verdict over the steps of an epoch, from its reports."""

import dataclasses
import math
from typing import Any

import numpy as np

from kmp.callbacks.verdict.collapsed import collapsed
from kmp.callbacks.verdict.decayed import decayed
from kmp.callbacks.verdict.evidence import Evidence
from kmp.callbacks.verdict.standstill import Still
from kmp.callbacks.verdict.states import Verdict
from kmp.callbacks.verdict.underflow import underflow
from kmp.health.telemetry import FIRST_STEPS, NUM_EVENTS
from kmp.scaling.rules import DynamicLossScale

_NOTHING_APPLIED = 30  # steps: more than the scale takes to fall from its ceiling to its floor
_GROWN = 100  # how many times as large a gradient has to be to count as exploding
_FELT = 1e-6  # share of a weight that float32 does not round away
_SMALL_RATE = 1e-7  # a learning rate that float32 weights of usual size round away


def judge(evidence: Evidence) -> Verdict:
    """Judge the steps since the last epoch's end."""
    checks = (
        _forward_nan,
        collapsed,
        _stalled,
        _lost,
        _spoiled,
        decayed,
        _silent,
        _calibrating,
        _unstable,
        underflow,
        _healthy,
    )
    return next(verdict for check in checks if (verdict := check(evidence)) is not None)


def _forward_nan(evidence: Evidence) -> Verdict | None:
    dead = [event for event in evidence.events if not event.loss_finite]
    if dead:
        seen = f"{'' if len(evidence.events) < NUM_EVENTS else 'at least '}{len(dead)}"
        reason = (
            f"the loss was not finite in {seen} of the last {evidence.steps} steps, "
            f"in step {dead[-1].step} for one"
        )
    elif lost := [name for name, x in evidence.losses.items() if not math.isfinite(x)]:
        value = float(evidence.losses[lost[0]])
        reason = f"`{lost[0]}` of the epoch is {value}, though all gradients are finite"
    else:
        return None
    if gone := _lost(evidence) or _spoiled(evidence):
        return dataclasses.replace(gone, state="FORWARD-NAN", reason=f"{reason}; {gone.reason}")
    return Verdict(
        "FORWARD-NAN",
        "",
        reason,
        "No loss scale helps: look for a bad batch, a division or logarithm of zero, or an "
        "overflow in the forward pass; kmp.debug.locate_nonfinite(model, x, y) names the "
        "layer, which gradients that are all NaN cannot.",
    )


def _stalled(evidence: Evidence) -> Verdict | None:
    report, still = evidence.report, evidence.still
    if not report.paths:
        return Verdict(
            "STALLED",
            "",
            "the optimizer has no weight to train: all were frozen when it was built",
            "Set layer.trainable = True for some of them, and compile the model again.",
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
    if evidence.skips == evidence.steps >= _NOTHING_APPLIED:
        return Verdict(
            "STALLED",
            next(iter(report.overflowed), ""),
            f"each of the last {evidence.steps} steps was skipped, although the loss is finite",
            f"The loss scale, {report.loss_scale:g} now, does not find its level: keep that layer "
            "in float32, or begin with a lower initial_scale.",
        )
    cause = still and _cause_of_standstill(evidence, still)
    if not (still and cause):
        return None
    return Verdict(
        "STALLED",
        still.paths[0],
        f"{len(still.paths)} of {still.of} weights with a gradient have not moved in {still.looks} "
        f"looks over {still.steps} steps ({_named(still.paths)}): {cause[0]}",
        cause[1],
    )


def _cause_of_standstill(evidence: Evidence, still: Still) -> tuple[str, str] | None:
    """Why, and what to do; None if there is no cause but that the gradients are small."""
    rate = evidence.learning_rate(still.paths)
    if rate == 0:
        return "the learning rate is 0", "Set it, or look at where its schedule ends."
    if evidence.drops_windows and evidence.skips:
        return (
            f"{evidence.skips} of the last {evidence.steps} steps were skipped, and one overflow "
            "discards a whole window of gradient accumulation",
            'Write on_overflow="drop_micro_batch", or a lower loss scale.',
        )
    dtypes = {evidence.weights[path].dtype for path in still.paths}
    if half := dtypes & {"bfloat16", "float16"}:
        dtype = half.pop()
        return (
            f"they are stored in {dtype}, where the optimizer's updates round to nothing",
            f'Keep them in float32: the policy "mixed_{dtype}" computes in {dtype} and updates '
            "in float32. Or write kmp.scaled(..., master_weights=True).",
        )
    if rate < _SMALL_RATE:
        return f"the learning rate is {rate:.2g}", "Raise it: float32 rounds such updates away."
    norms, weight_norms = evidence.report.column("l2_norm"), evidence.report.weight_norm
    if all(rate * norms[path] > _FELT * weight_norms[path] for path in still.paths):
        return (
            f"at a learning rate of {rate:.2g} their gradients would move them",
            "Look at what holds them back: clipnorm, global_clipnorm, clipvalue, a constraint, or "
            "the optimizer's own update.",
        )
    return None


def _lost(evidence: Evidence) -> Verdict | None:
    norms = evidence.report.weight_norm
    lost = [path for path in norms if not math.isfinite(norms[path])]
    if not lost:
        return None
    return Verdict(
        "UNSTABLE",
        lost[-1],
        f"{len(lost)} of {len(norms)} weights hold inf or NaN",
        "No step brings them back: load a checkpoint from before. Gradients that are not finite "
        "are skipped, so look at the learning rate, the optimizer's epsilon and constraints.",
    )


def _spoiled(evidence: Evidence) -> Verdict | None:
    if not evidence.spoiled:
        return None
    first, more = evidence.spoiled[0], len(evidence.spoiled) - 1
    return Verdict(
        "UNSTABLE",
        first.path,
        first.reason + (f"; {more} more variables are affected" if more else ""),
        "The model predicts with it, and good batches take very long to wash it out, or never: "
        "load a checkpoint from before, and look for a batch of another scale. "
        "kmp.layers.Float32BatchNormalization takes in no statistics that are not finite."
        if first.of_layer
        else "The optimizer goes on from it: load a checkpoint from before, or compile the model "
        "with a new optimizer, and look for a batch of another scale.",
    )


def _silent(evidence: Evidence) -> Verdict | None:
    silent = evidence.silent
    if silent is None or underflow(evidence):  # a higher scale may bring them back
        return None
    paths, number = silent.paths, len(silent.paths)
    seen = f"exactly zero in {silent.looks} looks over {silent.steps} steps"
    if number == silent.of:
        return Verdict(
            "STALLED",
            paths[0],
            f"the gradients of all {number} weights, biases aside, were {seen}",
            "The outputs do not depend on the inputs, or the loss not on the outputs: look for "
            "relu units that are all dead, weights that all begin at zero, a softmax over a single "
            "unit, or a loss or sample weights of zero.",
        )
    in_float16 = any(evidence.weights[path].compute_dtype == "float16" for path in paths)
    return Verdict(
        "STALLED",
        paths[-1],
        f"the gradients of {number} of {silent.of} weights, biases aside, were {seen} "
        f"({_named(paths)})",
        "They do not learn: look for relu units that are all dead, an output whose loss or sample "
        "weights are zero, or ops.stop_gradient. Where it is meant, set layer.trainable = False."
        + (" In float16 the loss scale may be too low as well." if in_float16 else ""),
    )


def _named(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _calibrating(evidence: Evidence) -> Verdict | None:
    report, events = evidence.report, evidence.events
    early = events and events[-1].step <= FIRST_STEPS and report.step <= 2 * FIRST_STEPS
    if not (early and isinstance(evidence.rule, DynamicLossScale)):
        return None
    return Verdict(
        "CALIBRATING",
        "",
        f"{evidence.skips} steps were skipped on the way to a loss scale of {report.loss_scale:g}",
        "A few at the beginning are how the scale is found.",
    )


def _unstable(evidence: Evidence) -> Verdict | None:
    return _overflows_often(evidence) or _explodes(evidence)


def _overflows_often(evidence: Evidence) -> Verdict | None:
    report, settled, rule = evidence.report, evidence.settled, evidence.rule
    steps = skips = 0
    if settled or not isinstance(rule, DynamicLossScale):
        steps = report.step - (settled.step if settled else 0)
        skips = report.skipped_steps - (settled.skipped_steps if settled else 0)
    expected = _own_rate(rule)
    rate = max(evidence.limits.max_overflow_rate, min(5 * expected, (1 + expected) / 2))
    if skips < 5 or skips <= rate * steps:
        return None
    return Verdict(
        "UNSTABLE",
        next(iter(report.overflowed), ""),
        f"{skips} of the last {steps} steps overflowed; the growth of the scale explains about "
        f"{expected * steps:.2g}",
        "Lower the learning rate, clip with global_clipnorm=1.0, or keep that layer in float32.",
    )


def _own_rate(rule: Any) -> float:
    """The share of steps that overflow because the scale has grown: each growth is taken back."""
    if not isinstance(rule, DynamicLossScale):
        return 0.0
    backoffs = math.ceil(math.log(rule.growth_factor) / -math.log(rule.backoff_factor))
    backoffs += rule.hysteresis - 1
    return backoffs / (rule.growth_interval + backoffs)


def _explodes(evidence: Evidence) -> Verdict | None:
    report, limits = evidence.report, evidence.limits
    # A loss in large units has large gradients: they are sound if they are what they were, and the
    # optimizer makes updates of the usual size of them.
    has_grown = report.grad_norm > _GROWN * evidence.least_norm
    known = [x for x in (evidence.update_ratios, list(report.update_ratio.values())) if x]
    largest = max((10 ** float(np.median(x)) for x in known), default=math.inf)
    moves_far = largest > (limits.max_update_ratio or math.inf) or not known
    if report.grad_norm > limits.max_grad_norm and (has_grown or moves_far):
        norms = report.column("l2_norm")
        return Verdict(
            "UNSTABLE",
            max(norms, key=lambda path: norms[path]),
            f"the gradient's norm is {report.grad_norm:.3g}",
            "Lower the learning rate, or clip with global_clipnorm=1.0.",
        )
    seen = evidence.update_ratios
    ratio = float(np.median(seen)) if len(seen) >= 10 else -math.inf
    if not limits.max_update_ratio or ratio <= math.log10(limits.max_update_ratio):
        return None
    ratios = report.update_ratio
    return Verdict(
        "UNSTABLE",
        max(ratios, key=lambda path: ratios[path]) if ratios else "",
        f"a step changes the weights by {10**ratio:.2g} of their norm; 0.001 is usual",
        "Lower the learning rate.",
    )


def _healthy(evidence: Evidence) -> Verdict:
    report, skipped = evidence.report, "0 skipped"
    if report.skipped_steps:
        before = report.skipped_steps - evidence.skips
        skipped = f"{evidence.skips} of the last {evidence.steps} steps skipped, {before} before"
    return Verdict("HEALTHY", "", f"loss scale {report.loss_scale:g}, {skipped}", "")
