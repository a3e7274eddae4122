"""One step under a `tf.distribute` strategy: reduce first, then decide once for everybody.

Every replica contributes to the all-reduce whatever its own gradients look like. The reduced
gradients are the same everywhere, an inf or NaN of any replica included, so that checking,
unscaling and clipping them gives the same verdict everywhere and nobody waits for somebody who
skipped. Branches stand in the cross-replica context: TensorFlow refuses to synchronise replicas
inside one that stands in a replica's.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kmp._backend import plain
from kmp._types import Gradient, Tensor, Variable


def step_on_replicas(optimizer: Any, gradients: list[Gradient], variables: list[Variable]) -> bool:
    """Run `optimizer`'s step for all replicas at once.

    Args:
        optimizer: `kmp.LossScaleOptimizer`, called in a replica context.
        gradients: this replica's gradients of the scaled loss.
        variables: their variables.

    Returns:
        Whether there is a strategy, and the step is done.
    """
    if not tf.distribute.has_strategy():
        return False
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "`apply` must be called in a replica context. Received: a call in the cross-replica "
            "context of a tf.distribute strategy. Call it inside the function that you give to "
            "strategy.run(...)."
        )
    # Keras reduces right before the update; by then clipping has seen the unreduced gradients.
    optimizer.inner_optimizer._all_reduce_sum_gradients = _as_they_are
    gradients = _all_reduced(gradients)
    if merges_replicas():
        tf.distribute.get_replica_context().merge_call(
            lambda strategy, *args: _decide_once(strategy, optimizer, *args),
            args=(gradients, variables),
        )
    else:
        optimizer.step(gradients, variables)
    return True


def merges_replicas() -> bool:
    """Tell whether the strategy brings its replicas together outside the compiled program.

    All do, but for MirroredStrategy over GPUs under XLA.
    """
    return not tf.__internal__.distribute.strategy_supports_no_merge_call()


def writes_logs(model: Any) -> bool:
    """Whether this process writes for all workers of the model's strategy: their chief does."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy is None or strategy.extended.should_save_summary


def keep_old_values(kept: Tensor, variables: list[Variable], old: list[Tensor]) -> None:
    """Write the old value back into each variable, on each replica, unless `kept`."""

    def select(variable, value, kept):
        return variable.assign(tf.where(kept, variable, value))

    def restore(strategy, values, kept):
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(variable.value, select, args=(value, kept), group=False)

    strategy = tf.distribute.get_strategy()
    tf.__internal__.distribute.interim.maybe_merge_call(restore, strategy, old, kept)


def _as_they_are(grads_and_vars):
    return grads_and_vars


def _all_reduced(gradients: list[Gradient]) -> list[Gradient]:
    present = [g for g in gradients if g is not None]
    replica = tf.distribute.get_replica_context()
    reduced = iter(replica.all_reduce(tf.distribute.ReduceOp.SUM, present))
    return [None if g is None else next(reduced) for g in gradients]


def _decide_once(
    strategy: Any, optimizer: Any, gradients: list[Gradient], variables: list[Variable]
) -> None:
    on_each_replica = strategy.extended.call_for_each_replica
    scaled = gradients
    gradients = on_each_replica(optimizer.unscaled, args=(scaled, variables))

    def local(values):
        return [None if g is None else strategy.experimental_local_results(g)[0] for g in values]

    measured = optimizer.measured(local(scaled), local(gradients), variables)

    def update():
        _update(on_each_replica, optimizer.inner_optimizer, gradients, variables)
        return measured.finite

    tf.cond(optimizer.admitted(measured.finite), update, lambda: measured.finite)
    optimizer.record(measured)


def _update(
    on_each_replica: Callable, inner: Any, gradients: list[Gradient], variables: list[Variable]
) -> None:
    """Apply the inner optimizer on every replica, with its two branches lifted out of them."""
    window, overwrite = inner.gradient_accumulation_steps, inner.ema_overwrite_frequency
    if not (window or (inner.use_ema and overwrite)):
        on_each_replica(inner.apply, args=(gradients, variables))
        return
    overwrites = (inner.iterations + 1) % overwrite == 0 if inner.use_ema and overwrite else None

    def apply(window_ends: bool) -> Tensor:
        def apply_gradients(grads, variables):
            _apply_gradients(inner, window_ends, grads, variables)

        with plain.applying_by(inner, apply_gradients):
            on_each_replica(inner.apply, args=(gradients, variables))
        return tf.constant(window_ends)

    if window:
        ends = (inner._iterations + 1) % window == 0
        tf.cond(ends, lambda: apply(True), lambda: apply(False))
    else:
        apply(True)
    if overwrites is not None:

        def overwrite_variables():
            inner._overwrite_model_variables_with_average_value(inner._trainable_variables)
            return overwrites

        tf.cond(overwrites, overwrite_variables, lambda: overwrites)


def _apply_gradients(inner: Any, window_ends: bool, grads: Any, variables: Any) -> None:
    """`BaseOptimizer._backend_apply_gradients` for a window whose end is known while tracing."""
    if inner.gradient_accumulation_steps:
        indices = [inner._get_variable_index(v) for v in variables]
        accumulators = [inner._accumulated_gradients[i] for i in indices]
        if not window_ends:
            inner._backend_increment_gradient_accumulators(grads, accumulators)
        else:
            steps = inner.gradient_accumulation_steps
            grads = [(g + a) / steps for g, a in zip(grads, accumulators, strict=True)]
    if window_ends:
        grads = inner._clip_gradients(grads)
        inner._apply_weight_decay(variables)
        inner._backend_update_step(grads, variables, inner.learning_rate)
        if inner.gradient_accumulation_steps:
            inner._backend_reset_gradient_accumulators()
    if inner.use_ema:
        inner._update_model_variables_moving_average(inner._trainable_variables)
