"""The loss of each training step, kept inside the compiled step."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from kmp._backend.types import Variable

RECENT = 128  # losses that stay readable: far more than between two looks at the usual cadence
# No finite loss yet. Neither NaN nor inf: JAX compares what processes assign, and NaN differs from
# itself; TensorFlow's `enable_check_numerics` stops at both. Where one replica of up to 1024 has no
# loss yet, their mean is not below `_KNOWN`.
_NONE_YET, _KNOWN = 2.0**100, 2.0**90


class LossTracker(keras.metrics.Metric):
    """Takes the place of Keras's average of the epoch's loss, and keeps the recent losses too.

    Keras's own metric goes on averaging inside. Until a step of the epoch has counted, the result
    is the last finite loss, or NaN: a first step that overflows while the loss scale is being found
    must not look like a dead run. If no loss comes at all, as from a `train_step` that tells the
    metric of none, the result is Keras's, 0.

    Args:
        mean: Keras's metric.

    Attributes:
        mean: the same.
        recent: float32[RECENT], the loss of the i-th step that counted at index i % RECENT.
        counted_steps: int32[], steps that counted since training began.
        seen_steps: int32[], all training steps since then.
        nonfinite_losses: int32[], losses in a row up to now that were not finite.
        latest: float32[], the last finite loss of this epoch; 2**100 before there is one.
    """

    def __init__(self, mean: keras.metrics.Mean):
        super().__init__(name=mean.name, dtype=mean.dtype)
        self.mean = mean
        self._steps_inside = 0  # training steps that are being traced; replicas trace side by side

        def add(name, dtype="int32", shape=(), aggregation="only_first_replica"):
            return self.add_variable(shape, "zeros", dtype, aggregation=aggregation, name=name)

        self.recent = add("recent", "float32", (RECENT,), "mean")
        self.latest = add("latest", "float32", aggregation="mean")
        self.counted_steps, self.seen_steps = add("counted_steps"), add("seen_steps")
        self.nonfinite_losses = add("nonfinite_losses")
        self.latest.assign(_NONE_YET)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Within, updates are those of a training step. Otherwise they are an evaluation's."""
        self._steps_inside += 1
        try:
            yield
        finally:
            self._steps_inside -= 1

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        if self._steps_inside:
            self._count(ops.mean(ops.cast(values, "float32")))
        self.mean.update_state(values, sample_weight=sample_weight)

    def _count(self, loss: Any) -> None:
        finite = ops.isfinite(loss)
        counted, nonfinite, recent, latest = (
            ops.convert_to_tensor(v)
            for v in (self.counted_steps, self.nonfinite_losses, self.recent, self.latest)
        )
        here = ops.equal(ops.arange(RECENT, dtype="int32"), counted % RECENT)
        self.recent.assign(ops.where(here, loss, recent))
        self.latest.assign(ops.where(finite, loss, latest))
        self.nonfinite_losses.assign(ops.where(finite, ops.zeros_like(nonfinite), nonfinite + 1))
        # At the end of data of unknown length TensorFlow's loop runs a step without data, in which
        # whatever does not wait for the loss would count.
        one = ops.where(finite, 1, 1)
        self.counted_steps.assign(counted + one)
        self.seen_steps.assign(ops.convert_to_tensor(self.seen_steps) + one)

    def reset_state(self) -> None:
        self.mean.reset_state()
        self.latest.assign(_NONE_YET)

    def result(self) -> Any:
        mean = self.mean.result()
        latest = ops.convert_to_tensor(self.latest)
        # NaN is computed where it is meant: `enable_check_numerics` takes none in a constant.
        counts = ops.cast(ops.equal(self.nonfinite_losses.value, 0), mean.dtype)
        lost = mean + (counts / counts - 1)
        latest = ops.where(ops.less(latest, _KNOWN), ops.cast(latest, mean.dtype), lost)
        return ops.where(ops.equal(self.mean.count, 0), latest, mean)

    @property
    def happened(self) -> list[Variable]:
        """What a skipped step does not take back: it counts what there was, skipped or not."""
        return [self.seen_steps, self.nonfinite_losses, self.latest]
