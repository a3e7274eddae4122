"""Batch statistics that one batch would ruin: behind a BatchNormalization its gradients look sound.

A layer's moving variance hardly grows in a step of sound training. If a batch would multiply it by
more than the factor of `spikes=`, all moving statistics stay as they were before that step.
"""

from collections.abc import Mapping
from typing import Any

from keras import ops
from keras.layers import BatchNormalization

from kmp._backend import backend
from kmp._backend.types import Tensor, Variable
from kmp._keras import layers_of

_FIRST_STEPS = 100  # in which moving variances come down, or up, from 1


def hold_statistics(model: Any, before: Mapping[int, Tensor], applied: Tensor) -> None:
    """Put the moving statistics back if a step has multiplied one by more than the rule's factor.

    As for gradients there is a budget: a true change of scale is followed once it is spent.

    Args:
        model: compiled with a `kmp.LossScaleOptimizer` that has `spikes`.
        before: values of its variables before the step, by their ids.
        applied: bool[], whether the step was applied. A skipped one has been undone already.
    """
    optimizer, statistics = model.optimizer, _statistics_of(model)
    if not statistics:
        return
    rule, spent = optimizer.spikes, optimizer.statistics_spent
    grown = [_largest(v.value) > rule.factor * _largest(before[id(v)]) for _, v in statistics]
    jumps = ops.any(ops.stack(grown))
    has_budget = rule.has_budget(ops.convert_to_tensor(spent))
    is_late = ops.convert_to_tensor(optimizer.steps) > _FIRST_STEPS
    holds = ops.logical_and(ops.logical_and(jumps, has_budget), ops.logical_and(is_late, applied))
    variables = [v for pair in statistics for v in pair]
    backend.restore_unless(ops.logical_not(holds), variables, [before[id(v)] for v in variables])
    spent.assign(rule.spend(ops.convert_to_tensor(spent), holds))
    held = ops.convert_to_tensor(optimizer.held_statistics)
    optimizer.held_statistics.assign(held + ops.cast(holds, "int32"))


def _statistics_of(model: Any) -> list[tuple[Variable, Variable]]:
    """The moving mean and variance of each batch normalization that training moves."""
    norms = [x for x in layers_of(model) if isinstance(x, BatchNormalization)]
    return [(x.moving_mean, x.moving_variance) for x in norms if x.built and x.trainable]


def _largest(variance: Tensor) -> Tensor:
    return ops.cast(ops.max(variance), "float32")
