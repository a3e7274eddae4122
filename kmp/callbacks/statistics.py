"""Batch statistics that one batch would ruin: behind a BatchNormalization its gradients look sound.

A layer's moving variance hardly grows in a step of sound training. If a batch would multiply it by
more than the factor of `spikes=`, all moving statistics stay as they were before that step.
"""

from collections.abc import Sequence
from typing import Any

from keras import ops
from keras.layers import BatchNormalization

from kmp._backend import backend
from kmp._backend.types import Tensor, Variable


def hold_statistics(
    model: Any,
    norms: Sequence[BatchNormalization],
    kept: Sequence[tuple[Variable, Tensor]],
    applied: Tensor,
) -> None:
    """Put the moving statistics back if a step has multiplied one by more than the rule's factor.

    As for gradients there is a budget: a true change of scale is followed once it is spent.

    Args:
        model: compiled with a `kmp.LossScaleOptimizer` with `spikes`, if there are `norms`.
        norms: the batch normalizations.
        kept: variables, theirs among them, with their values before the step.
        applied: bool[], whether the step was applied. A skipped one has been undone already.
    """
    before = {id(v): x for v, x in kept} if norms else {}
    moved = [x for x in norms if x.trainable and id(getattr(x, "moving_variance", None)) in before]
    if not moved:
        return
    optimizer = model.optimizer
    rule, counter = optimizer.spikes, optimizer.statistics_spent
    steps, spent = ops.convert_to_tensor(optimizer.steps), ops.convert_to_tensor(counter)
    variances = [x.moving_variance for x in moved]
    grown = [rule.keeps_statistics(before[id(v)], v.value, steps, spent) for v in variances]
    has_grown = backend.over_processes(model, ops.any(ops.stack(grown)), ops.any)
    holds = ops.logical_and(has_grown, applied)
    variables = [v for x in moved for v in (x.moving_mean, x.moving_variance)]
    backend.restore_unless(ops.logical_not(holds), variables, [before[id(v)] for v in variables])
    counter.assign(rule.spend(spent, holds))
    held = ops.convert_to_tensor(optimizer.held_statistics)
    optimizer.held_statistics.assign(held + ops.cast(holds, "int32"))
