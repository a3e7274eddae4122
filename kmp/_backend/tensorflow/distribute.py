"""One step under a `tf.distribute` strategy: reduce first, then decide once for everybody.

Every replica contributes to the all-reduce whatever its own gradients look like. The reduced
gradients are the same everywhere, an inf or NaN of any replica included, so that checking,
unscaling and clipping them gives the same verdict everywhere and nobody waits for somebody who
skipped. Branches stand in the cross-replica context: TensorFlow refuses to synchronise replicas
inside one that stands in a replica's.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kmp._backend import base
from kmp._backend.base import Backend, OneReplica
from kmp._backend.types import Gradient, Tensor, Variable

_lock = threading.Lock()
_replicas_within: collections.Counter[int] = collections.Counter()  # by the optimizer's id
_recorded = threading.local()  # of this replica, whose thread it is, by the ids of variables


def record_loss_of_replica(variable: Variable, nonfinite: Tensor) -> None:
    """Record whether this replica's loss is not finite; the step sums that over the replicas."""
    before = _taken(variable)
    both = nonfinite if before is None else tf.maximum(before, nonfinite)
    vars(_recorded)[str(id(variable))] = both


def _taken(variable: Variable) -> Tensor | None:
    """Return what this replica has recorded in the function that is being traced, and forget it."""
    found = vars(_recorded).pop(str(id(variable)), None)
    graph = tf.compat.v1.get_default_graph()
    is_elsewhere = tf.is_symbolic_tensor(found) and found.graph is not graph
    return None if is_elsewhere else found


def step_on_replicas(
    backend: Backend,
    step: Callable[..., None],
    gradients: list[Gradient],
    variables: list[Variable],
    loss_nonfinite: Variable,
) -> None:
    """Run a step for all replicas at once.

    Args:
        backend: the backend.
        step: takes an `OneReplica`, which runs its parts, gradients and variables.
        gradients: this replica's gradients of the scaled loss.
        variables: their variables.
        loss_nonfinite: the variable that `record_loss_finite` was given.

    Raises:
        ValueError: outside a replica context.
    """
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "`apply` must be called in a replica context. Received: a call in the cross-replica "
            "context of a tf.distribute strategy. Call it inside the function that you give to "
            "strategy.run(...)."
        )
    recorded = _taken(loss_nonfinite)
    *gradients, recorded = _all_reduced([*gradients, recorded])
    if not merges_replicas():
        step(_Knowing(backend, recorded), gradients, variables)
        return

    def merged(strategy: Any, gradients: list, variables: list, recorded: Any) -> None:
        known = None if recorded is None else strategy.experimental_local_results(recorded)[0]
        step(_MergedReplicas(backend, strategy, known), gradients, variables)

    replica = tf.distribute.get_replica_context()
    replica.merge_call(merged, args=(gradients, variables, recorded))


class _Knowing(OneReplica):
    """Knows what the replicas have recorded of their losses: a sum, or None."""

    def __init__(self, backend: Backend, recorded: Tensor | None):
        super().__init__(backend)
        self._recorded = recorded

    def loss_nonfinite(self, variable: Variable) -> Tensor:
        return tf.zeros(()) if self._recorded is None else self._recorded


class _MergedReplicas(_Knowing):
    """Runs the parts of a step from the cross-replica context."""

    def __init__(self, backend: Backend, strategy: Any, recorded: Tensor | None):
        super().__init__(backend, recorded)
        self._strategy = strategy

    def on_each(self, function: Callable, *args: Any) -> Any:
        return self._strategy.extended.call_for_each_replica(function, args=args)

    def local(self, gradients: list[Gradient]) -> list[Gradient]:
        first = self._strategy.experimental_local_results
        return [None if g is None else first(g)[0] for g in gradients]

    def update_if(
        self, applies: Tensor, inner: Any, gradients: list[Gradient], variables: list[Variable]
    ) -> None:
        def update() -> Tensor:
            with reduced_already(inner):
                _update(self.on_each, inner, gradients, variables)
            return applies

        self.backend.branch(applies, update, applies)


@contextlib.contextmanager
def reduced_already(inner: Any) -> Iterator[None]:
    """Within, a Keras optimizer does not sum the gradients over the replicas a second time.

    Nor do those in a `keras.optimizers.MultiOptimizer`, each of which would for its own variables.
    Keras sums right before the update, after clipping has seen the gradients of one replica.
    Afterwards the optimizer is as it was, for it may be used without loss scaling too. Each
    replica is a thread of its own: the last one to leave puts the optimizer's own method back.
    """
    those_that_sum = [inner, *getattr(inner, "optimizers", ())]
    with _lock:
        _replicas_within[id(inner)] += 1
        for each in those_that_sum:
            each._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars
    try:
        yield
    finally:
        with _lock:
            _replicas_within[id(inner)] -= 1
            if not _replicas_within[id(inner)]:
                del _replicas_within[id(inner)]
                for each in those_that_sum:
                    del each._all_reduce_sum_gradients


def merges_replicas() -> bool:
    """Tell whether the strategy brings its replicas together outside the compiled program.

    All do, but for MirroredStrategy over GPUs under XLA.
    """
    return not tf.__internal__.distribute.strategy_supports_no_merge_call()


def restore_unless(applied: Tensor, variables: list[Variable], old: list[Tensor]) -> None:
    """Give each variable its old value back, on each replica, unless `applied`, a bool[]."""

    def select(variable, value, applied):
        return variable.assign(tf.where(applied, variable, value))

    def restore(strategy, values, applied):
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(variable.value, select, args=(value, applied), group=False)

    strategy = tf.distribute.get_strategy()
    tf.__internal__.distribute.interim.maybe_merge_call(restore, strategy, old, applied)


def _all_reduced(gradients: list[Gradient]) -> list[Gradient]:
    """The sums over the replicas: one all-reduce for each dtype, which TensorFlow does not mix."""
    replica = tf.distribute.get_replica_context()
    present = {i: _gatherable(g) for i, g in enumerate(gradients) if g is not None}
    sums: dict[int, Gradient] = {}
    for dtype in dict.fromkeys(g.dtype for g in present.values()):  # in one order on all replicas
        places = [i for i, g in present.items() if g.dtype == dtype]
        alike = [present[i] for i in places]
        reduced = replica.all_reduce(tf.distribute.ReduceOp.SUM, alike)
        sums |= dict(zip(places, reduced, strict=True))
    return [sums.get(i) for i in range(len(gradients))]


def _gatherable(gradient: Gradient) -> Gradient:
    """Slices in float32 in the place of those in bfloat16, which TensorFlow does not gather."""
    if not isinstance(gradient, tf.IndexedSlices) or gradient.dtype != "bfloat16":
        return gradient
    values = tf.cast(gradient.values, "float32")
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def _update(
    on_each: Callable, inner: Any, gradients: list[Gradient], variables: list[Variable]
) -> None:
    """Apply the inner optimizer on every replica, but decide its two conditionals out here."""
    window, overwrite = inner.gradient_accumulation_steps, inner.ema_overwrite_frequency
    if not (window or (inner.use_ema and overwrite)):
        on_each(inner.apply, gradients, variables)
        return
    overwrites = (inner.iterations + 1) % overwrite == 0 if inner.use_ema and overwrite else None

    def apply(window_ends: bool) -> Tensor:
        def choose(update_with_mean: Callable[[], None], add: Callable[[], None]) -> None:
            return update_with_mean() if window_ends else add()

        def apply_gradients(gradients: list[Gradient], variables: list[Variable]) -> None:
            if window:
                base.accumulate(inner, gradients, variables, choose)
            else:
                base.update(inner, gradients, variables)
            if inner.use_ema:
                inner._update_model_variables_moving_average(inner._trainable_variables)

        with base.applying_by(inner, apply_gradients):
            on_each(inner.apply, gradients, variables)
        return tf.constant(window_ends)

    if window:
        tf.cond(base.ends_window(inner), lambda: apply(True), lambda: apply(False))
    else:
        apply(True)
    if overwrites is not None:

        def overwrite_variables():
            # Keras overwrites before it counts the step, whose number bfloat16 is rounded by.
            inner._iterations.assign_sub(1)
            inner._overwrite_model_variables_with_average_value(inner._trainable_variables)
            inner._iterations.assign_add(1)
            return overwrites

        tf.cond(overwrites, overwrite_variables, lambda: overwrites)
