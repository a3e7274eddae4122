"""A model's state on the host, to go back to when training diverges."""

from collections.abc import Collection
from typing import Any, NamedTuple

import keras
from keras import ops

from kmp import _backend
from kmp._backend.types import Variable
from kmp.precision.trees import all_finite
from kmp.scaling.rules import DynamicLossScale


class Snapshot(NamedTuple):
    """What training depended on after some step.

    Attributes:
        step: the training step after which it was taken.
        values: copies on the host of `training_state(model)`, in its order.
        loss_scale: the loss scale then; 1.0 where nothing is scaled.
    """

    step: int
    values: list[Any]
    loss_scale: float


def training_state(model: Any) -> list[Variable]:
    """The variables that a rollback restores: weights, statistics, seeds, optimizer state.

    Excludes the loss scale and the optimizer's counters: a rollback does not undo history.
    """
    optimizer = model.optimizer
    state = [*model.trainable_variables, *model.non_trainable_variables]
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return state + list(optimizer.variables)
    window = getattr(optimizer, "window", None)  # where accumulation stands goes with what it has
    return (
        state
        + list(optimizer.inner_optimizer.variables)
        + ([window.position, window.dropped] if window is not None else [])
    )


def constants_that_are_not_finite(model: Any) -> set[int]:
    """The ids of the variables that nothing trains, and that hold inf or NaN: masks of -inf.

    Args:
        model: `keras.Model`, before it trains. Later a moving statistic may be among them.
    """
    variables = list(model.non_trainable_variables)
    finite = ops.stack([True, *(all_finite([x]) for x in _backend.read(model, variables))])
    flags = ops.convert_to_numpy(finite)[1:]
    return {id(v) for v, flag in zip(variables, flags, strict=True) if not flag}


def take_snapshot(model: Any, step: int, meant: Collection[int] = ()) -> Snapshot | None:
    """Copy the training state of `model` to the host; None if it is not all finite.

    Args:
        model: `keras.Model`.
        step: the number of the step that was the last.
        meant: ids of the variables that need not be finite.
    """
    optimizer = model.optimizer
    scale = [optimizer.dynamic_scale] if _scales(optimizer) else []
    state = training_state(model)
    live = _backend.read(model, [*state, *scale])
    loss_scale = _number(live.pop()) if scale else 1.0
    # Asked on the device: a process may hold a part only, and all have to come to one answer.
    if not bool(all_finite([x for v, x in zip(state, live, strict=True) if id(v) not in meant])):
        return None
    return Snapshot(step, [_backend.to_host(x) for x in live], loss_scale)


def restore_snapshot(model: Any, snapshot: Snapshot, lr_factor: float) -> list[str]:
    """Put `model` back to where it was, with a lower learning rate and loss scale than now.

    Args:
        model: `keras.Model`; inside `fit` on JAX what the property `model` of a callback returns,
            which takes the state out of the loop.
        snapshot: what `take_snapshot` returned for it.
        lr_factor: what the present learning rate is multiplied with.

    Returns:
        What changed beside the state, in words.
    """
    optimizer = model.optimizer
    learning_rate = _number(optimizer.learning_rate)
    for variable, value in zip(training_state(model), snapshot.values, strict=True):
        _backend.from_host(variable, value)
    changes = []
    try:
        optimizer.learning_rate = learning_rate * lr_factor
        changes.append(f"learning rate {learning_rate:g} -> {learning_rate * lr_factor:g}")
    except TypeError:  # Keras's answer where a schedule decides
        changes.append("learning rate left to its schedule, which no callback can lower")
    rule = getattr(optimizer, "loss_scale", DynamicLossScale())  # Keras's class has no floor
    if _scales(optimizer) and isinstance(rule, DynamicLossScale):
        # Never up: what overflowed since the snapshot would overflow again.
        now = _number(optimizer.dynamic_scale)
        lowered = max(min(now, snapshot.loss_scale) * rule.backoff_factor, rule.min_scale)
        optimizer.dynamic_scale.assign(lowered)
        optimizer.step_counter.assign(0)
        changes.append(f"loss scale {now:g} -> {lowered:g}")
    return changes


def _number(scalar: Any) -> float:
    return float(ops.convert_to_numpy(ops.convert_to_tensor(scalar)))


def _scales(optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
