"""What an overflow does to the window of micro-batches that gradient accumulation is filling."""

from typing import Any

from keras import ops

from kmp._backend.types import Tensor

ON_OVERFLOW = ("drop_micro_batch", "drop_window")


class DroppedWindow:
    """`on_overflow="drop_window"`: one overflow discards the whole window; its boundary stays.

    What was accumulated is cleared, `iterations` returns to the window's beginning, and the
    micro-batches that are left in the window count for nothing, as with `torch.amp.GradScaler`
    when `step` is called once for several `backward`.

    Args:
        optimizer: `kmp.LossScaleOptimizer`, built, whose inner optimizer accumulates.
    """

    def __init__(self, optimizer: Any):
        self.inner = optimizer.inner_optimizer
        self.length = int(self.inner.gradient_accumulation_steps)
        self.position = optimizer._add("window_position", dtype="int32")
        self.dropped = optimizer._add("window_dropped", dtype="int32")

    def admits(self) -> Tensor:
        """bool[]: whether no micro-batch of this window has overflowed so far."""
        return ops.equal(self.dropped, 0)

    def record(self, finite: Tensor) -> None:
        """Clear the window after an overflow, and move on to the next micro-batch."""
        overflow = ops.logical_not(finite)
        for accumulator in self.inner._accumulated_gradients:
            if accumulator is not None:
                value = ops.convert_to_tensor(accumulator)
                accumulator.assign(ops.where(overflow, ops.zeros_like(value), value))
        iterations = ops.convert_to_tensor(self.inner._iterations)
        start = iterations - iterations % self.length
        self.inner._iterations.assign(ops.where(overflow, start, iterations))
        dropped = ops.logical_or(overflow, ops.logical_not(self.admits()))
        position = (ops.convert_to_tensor(self.position) + 1) % self.length
        self.position.assign(position)
        self.dropped.assign(ops.cast(ops.logical_and(dropped, position > 0), "int32"))
