"""A model's state on the host, to go back to when training diverges."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from keras import ops

from kmp._backend import backend
from kmp._backend.types import Variable
from kmp._keras import layers_of
from kmp._keras.optimizer import (
    inner_optimizer_of,
    is_loss_scale_optimizer,
    optimizers_of,
    parts_of,
    steps_of,
)
from kmp._keras.training import Buffer, buffers_of, still_there
from kmp.precision.trees import all_finite, as_number
from kmp.scaling.optimizer import LossScaleOptimizer
from kmp.scaling.rules import DynamicLossScale, dynamic


class Snapshot(NamedTuple):
    """What training depended on after some step.

    Attributes:
        step: the training step after which it was taken.
        variables: `training_state(model)` then; an optimizer may have been built since.
        values: copies of them on the host.
        loss_scales: the loss scale of each of the model's optimizers then; its initial one where
            nothing has been built, 1.0 where nothing is scaled.
    """

    step: int
    variables: list[Variable]
    values: list[Any]
    loss_scales: list[float]


def training_state(model: Any) -> list[Variable]:
    """The variables that a rollback restores: weights, statistics, seeds, optimizers' state.

    Also how large gradients were lately, for the rule that skips spikes. Excludes the loss scale
    and the optimizers' counters: a rollback does not undo history.
    """
    state = [*model.trainable_variables, *model.non_trainable_variables]
    state += [x for layer in layers_of(model) for x in buffers_of(layer)]
    return state + [v for optimizer in _optimizers(model) for v in _state_of(optimizer)]


def _optimizers(model: Any) -> list[Any]:
    return list({id(x): x for x in optimizers_of(model).values()}.values())


def _state_of(optimizer: Any) -> list[Variable]:
    if not is_loss_scale_optimizer(optimizer):
        return list(optimizer.variables)
    window = getattr(optimizer, "window", None)  # where accumulation stands goes with what it has
    positions = [] if window is None else [window.position, window.dropped]
    step = getattr(optimizer, "scaled_step", None)
    usual = () if step is None else step.counters.peak
    return [*optimizer.inner_optimizer.variables, *positions, *usual]


def constants_that_are_not_finite(model: Any) -> set[int]:
    """The ids of the variables that nothing trains, and that hold inf or NaN: masks of -inf.

    Args:
        model: `keras.Model`, before it trains. Later a moving statistic may be among them.
    """
    variables = list(model.non_trainable_variables)
    finite = ops.stack([True, *(all_finite([x]) for x in backend.read(model, variables))])
    flags = ops.convert_to_numpy(finite)[1:]
    return {id(v) for v, flag in zip(variables, flags, strict=True) if not flag}


def take_snapshot(model: Any, step: int, meant: Collection[int] = ()) -> Snapshot | None:
    """Copy the training state of `model` to the host; None if it is not all finite.

    Args:
        model: `keras.Model`.
        step: the number of the step that was the last.
        meant: ids of the variables that need not be finite.
    """
    state, optimizers = training_state(model), _optimizers(model)
    scales = [_scale_of(optimizer) for optimizer in optimizers]
    live = backend.read(model, [*state, *(x for x in scales if x is not None)])
    # Asked on the device: a process may hold a part only, or have statistics of its own, and all
    # have to come to one answer.
    held = live[: len(state)]
    # A module's mask of -inf is one of its buffers.
    masks = [isinstance(v, Buffer) and "/running_" not in v.path for v in state]
    asked = [id(v) not in meant and not is_mask for v, is_mask in zip(state, masks, strict=True)]
    finite = all_finite([x for x, is_asked in zip(held, asked, strict=True) if is_asked])
    if not bool(backend.over_processes(model, finite, ops.all)):
        return None
    found = iter(live[len(state) :])
    loss_scales = [
        getattr(optimizer, "initial_scale", 1.0) if x is None else as_number(next(found))
        for optimizer, x in zip(optimizers, scales, strict=True)
    ]
    return Snapshot(step, state, [backend.to_host(x) for x in held], loss_scales)


def restore_snapshot(model: Any, snapshot: Snapshot, lr_factor: float) -> list[str]:
    """Put `model` back to where it was, but for learning rate and loss scale.

    The learning rate becomes lower than it is now, the loss scale lower than it was then.

    Args:
        model: `keras.Model`; inside `fit` on JAX what the property `model` of a callback returns,
            which takes the state out of the loop.
        snapshot: what `take_snapshot` returned for it.
        lr_factor: what the present learning rate is multiplied by.

    Returns:
        What changed beside the state, in words.
    """
    optimizers = _optimizers(model)
    rates = {id(x): as_number(x.learning_rate) for each in optimizers for x in parts_of(each)}
    for variable, value in still_there(zip(snapshot.variables, snapshot.values, strict=True)):
        backend.from_host(variable, value)
    pairs = list(zip(optimizers, snapshot.loss_scales, strict=True))
    if len(pairs) > 1:  # what `compile` has without an argument may never step
        pairs = [(x, scale) for x, scale in pairs if as_number(steps_of(inner_optimizer_of(x)))]
    lower = functools.partial(_lower_rate, rates, lr_factor)
    changes = [(x, change) for x, scale in pairs for change in _lowered(x, scale, lower)]
    return [f"{change} ({x.name})" if len(pairs) > 1 else change for x, change in changes]


def _lowered(optimizer: Any, loss_scale: float, lower_rate: Callable[[Any], str]) -> list[str]:
    """Lower the learning rate and the loss scale of an optimizer; say what changed."""
    parts = parts_of(optimizer)
    changes = [lower_rate(x) + (f" ({x.name})" if len(parts) > 1 else "") for x in parts]
    # Keras's class has no floor of its own: kmp's default holds for it.
    rule = dynamic(getattr(optimizer, "loss_scale", DynamicLossScale()))
    scale = _scale_of(optimizer)
    if scale is not None and rule is not None:
        # Not from what it is now: the steps that diverged may have taken it to its floor, and it
        # takes a `growth_interval` of finite steps for each doubling.
        now, floor = as_number(scale), min(loss_scale, rule.min_scale)
        then = max(loss_scale * rule.backoff_factor, floor)
        scale.assign(then)
        _count_anew(optimizer)
        changes.append(f"loss scale {now:g} -> {then:g}")
    return changes


def _lower_rate(rates: Mapping[int, float], factor: float, optimizer: Any) -> str:
    """Lower the rate from what it was before the rollback, not from that of the snapshot."""
    rate = rates[id(optimizer)]
    try:
        optimizer.learning_rate = rate * factor
    except TypeError:  # Keras's answer where a schedule decides
        return "learning rate left to its schedule, which no callback can lower"
    return f"learning rate {rate:g} -> {rate * factor:g}"


def _count_anew(optimizer: Any) -> None:
    """Begin again to count the steps to the scale's next change."""
    if not isinstance(optimizer, LossScaleOptimizer):
        optimizer.step_counter.assign(0)
        return
    initial = optimizer.loss_scale.init()._asdict()
    for name, variable in optimizer.scaled_step.counters.counts.items():
        variable.assign(initial[name])


def _scale_of(optimizer: Any) -> Variable | None:
    if not (is_loss_scale_optimizer(optimizer) and optimizer.built):
        return None
    if isinstance(optimizer, LossScaleOptimizer):  # reading `dynamic_scale` counts as scaling
        return optimizer.scale_variable
    return optimizer.dynamic_scale
