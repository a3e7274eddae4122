"""What a skipped step must not leave behind, and the train step that sees to it."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from keras import ops
from keras.layers import BatchNormalization, SpectralNormalization

from kmp._backend import backend
from kmp._backend.types import Tensor, Variable
from kmp._keras import layers_of, own_state, own_weights
from kmp._keras.building import calls_in_a_scope
from kmp._keras.optimizer import is_loss_scale_optimizer
from kmp._keras.training import (
    Buffer,
    is_replicated,
    metrics_of,
    noting_calls,
    state_of,
    still_there,
)
from kmp.callbacks.loss_tracker import LossTracker
from kmp.precision.trees import is_float
from kmp.scaling.optimizer import LossScaleOptimizer

Pair: TypeAlias = tuple[Variable, Tensor]  # a variable, and its value from before the step


class _Kept(NamedTuple):
    """What is known before a step.

    Attributes:
        variables: those that a skipped step must leave alone.
        values: their values.
        averages: the variables of each average of the epoch.
        sums: their values.
        counter: int[] or float[], what tells a skipped step; see `_skip_counter`.
        nonfinite_losses: int32[], the tracker's.
        spikes: int32[], steps left out as spikes, if the optimizer leaves out any.
        norms: the batch normalizations, whose statistics are held if the optimizer leaves out
            spikes.
        scale: the state of the loss scale, if the optimizer must be told of the loss.
    """

    variables: list[Variable]
    values: list[Tensor]
    averages: list[list[Variable]]
    sums: list[list[Tensor]]
    counter: Tensor
    nonfinite_losses: Tensor
    spikes: Tensor | None
    norms: list[BatchNormalization]
    scale: Any


def protected_step(
    model: Any, train_step: Callable[..., Any], tracker: LossTracker
) -> Callable[..., Any]:
    """Wrap a model's train step so that a step that the optimizer skips leaves nothing behind.

    Args:
        model: `keras.Model`, compiled.
        train_step: its own, with the signature of the backend.
        tracker: the loss tracker that the model has while this step is compiled.
    """
    optimizer = model.optimizer
    noting = _NotingStep(model, _tracked_step(model, train_step, tracker))
    if not is_loss_scale_optimizer(optimizer):
        return backend.sums_in_float32(noting)  # which skips nothing
    # Buffers of PyTorch that the first step left alone, as masks: they are not copied in each step.
    idle: set[Any] = set()
    is_first = True

    def before() -> _Kept:
        layers = layers_of(model)
        state = noting.watch(layers, _undone_by_a_skip(model, layers, tracker))
        variables = [v for v in state if not isinstance(v, Buffer) or v.key not in idle]
        averages = _averages(model, tracker)
        counters = [_skip_counter(optimizer), tracker.nonfinite_losses, *_spike_counter(optimizer)]
        values = backend.copied_values([*counters, *variables, *itertools.chain(*averages)])
        (counter, losses, *spikes), values = values[: len(counters)], values[len(counters) :]
        sums = iter(values[len(variables) :])
        return _Kept(
            variables=variables,
            values=values[: len(variables)],
            averages=averages,
            sums=[[next(sums) for _ in average] for average in averages],
            counter=counter,
            nonfinite_losses=losses,
            spikes=spikes[0] if spikes else None,
            norms=[x for x in layers if isinstance(x, BatchNormalization)] if spikes else [],
            scale=_scale_before(model),
        )

    def after(kept: _Kept, logs: Any) -> Any:
        nonlocal is_first
        applied = ops.logical_not(_was_skipped(optimizer, kept.counter))
        pairs = [*_changed(kept), *noting.assigned]
        if is_first and backend.is_concrete(applied):
            is_first = False
            idle.update(v.key for v, x in pairs if isinstance(v, Buffer) and v.holds(x))
        _restore(*noting.kept_by_the_step(pairs), applied)
        hold_statistics(model, kept.norms, pairs, applied)
        nonfinite = ops.greater(tracker.nonfinite_losses.value, kept.nonfinite_losses)
        _restore_averages(kept, applied, _is_lost(optimizer, kept, nonfinite))
        if kept.scale is not None:
            nonfinite = ops.logical_and(ops.logical_not(applied), nonfinite)
            optimizer.scaled_step.forget_scale_of(kept.scale, nonfinite)
        return _present_logs(model, logs)

    step = backend.around_train_step(model, noting, before, after)
    return backend.sums_in_float32(step)


class _NotingStep:
    """A train step that notes which variables its own code assigns.

    These are frozen weights, as those of a target network, which most steps leave alone: then
    nothing is copied. And they are variables of the model itself, as for gradients that the step
    accumulates.

    Attributes:
        assigned: the weights that the latest step has assigned, with their values from before.

    Args:
        model: `keras.Model`, compiled.
        train_step: with the signature of the backend.
    """

    def __init__(self, model: Any, train_step: Callable[..., Any]):
        self.assigned: list[tuple[Variable, Tensor]] = []
        self._model, self._train_step = model, train_step
        self._watched: list[Variable] = []
        self._own: list[Variable] = []
        self._of_calls: set[int] = set()

    def watch(self, layers: Sequence[Any], known: Sequence[Variable]) -> list[Variable]:
        """Watch the frozen weights of layers, but for `known` variables, in the next step.

        Returns:
            `known`, and on JAX the frozen weights: there no assignment shows, and to keep all of
            them costs nothing.
        """
        ids = {id(v) for v in known}
        weights = [v for x in layers for v in own_weights(x) if not v.trainable]
        frozen = [v for v in weights if id(v) not in ids]
        self._watched = [] if backend.IS_PURE else frozen
        # Replicas trace in turns, with the same variables.
        self._own = [] if is_replicated(self._model) else own_state(self._model)
        return [*known, *(frozen if backend.IS_PURE else [])]

    def __call__(self, *args: Any) -> Any:
        with (
            backend.noting_assignments(self._watched) as self.assigned,
            noting_calls(self._own) as self._of_calls,
        ):
            return self._train_step(*args)

    def kept_by_the_step(self, pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
        """The variables of the model that its calls do not assign, and the others."""
        own = {id(v) for v in self._own} - self._of_calls
        return [p for p in pairs if id(p[0]) in own], [p for p in pairs if id(p[0]) not in own]


def _changed(kept: _Kept) -> list[tuple[Variable, Tensor]]:
    """The variables whose value is another tensor than before the step, and that value."""
    pairs = still_there(zip(kept.variables, kept.values, strict=True))
    return [(v, x) for v, x in pairs if v.value is not x]


def _tracked_step(
    model: Any, train_step: Callable[..., Any], tracker: LossTracker
) -> Callable[..., Any]:
    """The train step with the tracker's counts, which notes whether it has scaled its loss."""
    optimizer = model.optimizer
    is_kmps = _is_kmps(optimizer)

    def tracked(*args: Any) -> Any:
        if is_kmps:
            optimizer.scale_was_read = False
        with tracker.training(), calls_in_a_scope(model):
            logs = train_step(*args)
        if is_kmps:
            optimizer.step_scales_loss = optimizer.scale_was_read
        return logs

    return tracked


def _scale_before(model: Any) -> Any:
    """The state of the loss scale, if the optimizer must be told of the loss after the step.

    Among several processes the optimizer knows only the loss of its own process; the tracker knows
    that of all.
    """
    knows_loss = backend.SEES_LOSS and not backend.trains_together(model)
    if knows_loss or not _is_kmps(model.optimizer):
        return None
    rule = model.optimizer.scaled_step.counters.rule
    return type(rule)(*backend.copied_values(list(rule)))


def _is_lost(optimizer: Any, kept: _Kept, nonfinite: Tensor) -> Tensor:
    """bool[]: whether a step counts in no average: its loss is `nonfinite`, or it was a spike."""
    if kept.spikes is None:
        return nonfinite
    return ops.logical_or(nonfinite, ops.greater(optimizer.skipped_spikes.value, kept.spikes))


def _restore(kept_by_step: Sequence[Pair], others: Sequence[Pair], applied: Tensor) -> None:
    """Put back what a skipped step has changed.

    Of what its own code keeps, only what has become inf or NaN: it may have begun a new sum of
    gradients, because the old one was inf, or was scaled by a scale that has now changed.
    """
    backend.restore_unless(applied, [v for v, _ in others], [x for _, x in others])
    for variable, value in kept_by_step:
        lost = ops.logical_and(ops.logical_not(applied), _became_nonfinite([variable], [value]))
        backend.restore_unless(ops.logical_not(lost), [variable], [value])


def _restore_averages(kept: _Kept, applied: Tensor, lost_step: Tensor) -> None:
    """Restore the old values of the averages that a skipped step has made inf or NaN.

    Args:
        kept: what was known before the step.
        applied: bool[], whether the step was applied.
        lost_step: bool[], whether the step, if it was skipped, counts in none of the averages.
    """
    for average, sums in zip(kept.averages, kept.sums, strict=True):
        lost = ops.logical_or(lost_step, _became_nonfinite(average, sums))
        counts = ops.logical_or(applied, ops.logical_not(lost))
        backend.restore_unless(counts, average, sums)


def _skip_counter(optimizer: Any) -> Variable:
    """The variable that shows a skipped step.

    It is the counter that such a step increments; with Keras's own optimizer it is the scale, which
    such a step halves.
    """
    return optimizer.skipped_steps if _is_kmps(optimizer) else optimizer.dynamic_scale


def _spike_counter(optimizer: Any) -> list[Variable]:
    """What counts the steps that were left out as spikes, if the optimizer leaves out any."""
    spikes = getattr(optimizer, "skipped_spikes", None)
    return [] if spikes is None else [spikes]


def _was_skipped(optimizer: Any, before: Tensor) -> Tensor:
    """bool[]: whether the step was skipped.

    An optimizer that never steps skips nothing. A GAN has such an optimizer: the one that `compile`
    makes by default, and that Keras wraps in mixed float16.
    """
    now = _skip_counter(optimizer).value
    if _is_kmps(optimizer):
        return ops.greater(now, before)
    # A scale of 0 or inf stays when it is halved; no step is applied with it.
    return ops.logical_or(ops.less(now, before), ops.equal(now * 0.5, now))


def _is_kmps(optimizer: Any) -> bool:
    return isinstance(optimizer, LossScaleOptimizer)


def _present_logs(model: Any, logs: Any) -> Any:
    """Return the metrics as they are now if `logs` has exactly the metrics' names, else `logs`.

    Keras decides the same way at the end of an epoch.
    """
    results = model.get_metrics_result()
    return results if isinstance(logs, dict) and logs.keys() == results.keys() else logs


def _undone_by_a_skip(model: Any, layers: list[Any], tracker: LossTracker) -> list[Variable]:
    """The layers' state, and what the tracker knows of the steps that were applied."""
    state = [v for layer in layers for v in _assigned_by(layer)]
    if any(metric is tracker for metric in model.metrics):
        state += tracker.of_applied_steps
    return list({id(v): v for v in state}.values())


def _averages(model: Any, tracker: LossTracker) -> list[list[Variable]]:
    """The variables of each average of the epoch, of the loss and of each metric.

    They leave out what a skipped step makes inf or NaN, and the whole step if its loss is, or if it
    was left out as a spike. An overflow with a finite loss counts as it does in `evaluate`.
    """
    metrics = [tracker.mean if metric is tracker else metric for metric in metrics_of(model)]
    return [list(metric.variables) for metric in metrics]


def _became_nonfinite(variables: list[Variable], before: list[Tensor]) -> Tensor:
    """bool[]: whether a number of the variables is inf or NaN that was finite before."""
    pairs = [(v.value, x) for v, x in zip(variables, before, strict=True) if is_float(x)]
    lost = [
        ops.any(ops.logical_and(ops.isfinite(x), ops.logical_not(ops.isfinite(now))))
        for now, x in pairs
    ]
    return ops.any(ops.stack([False, *lost]))


def _assigned_by(layer: Any) -> list[Variable]:
    """The variables that a layer assigns while it trains. One of Keras's assigns a weight."""
    if isinstance(layer, SpectralNormalization) and layer.built:
        return [*state_of(layer), layer.kernel]
    return state_of(layer)


def hold_statistics(
    model: Any,
    norms: Sequence[BatchNormalization],
    kept: Sequence[tuple[Variable, Tensor]],
    applied: Tensor,
) -> None:
    """Put the moving statistics back if a step has multiplied one by more than the rule's factor.

    A layer's moving variance hardly grows in a step of sound training, and behind a
    BatchNormalization the gradients of a batch that would ruin it look sound. There is a budget, as
    for gradients: a true change of scale is followed once it is spent.

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
