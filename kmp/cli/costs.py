"""What training costs: time, memory, skipped steps."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from kmp._backend import backend
from kmp._backend.types import DeviceMemory, Tree


class Spread(NamedTuple):
    """The median and the quartiles of repeated measurements.

    Attributes:
        median: float.
        low: float, the first quartile.
        high: float, the third one.
    """

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """The `Spread` of at least two numbers."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


class StepMemory(NamedTuple):
    """The most that a training step holds at once.

    Attributes:
        bytes: int, or None if unknown.
        source: str, where the number comes from.
    """

    bytes: int | None
    source: str


def step_memory(model: Any, x: Tree, y: Tree, before: DeviceMemory | None) -> StepMemory:
    """The memory of a training step, from the device's allocator or from XLA.

    Args:
        model: compiled, and trained.
        x: one batch.
        y: its targets.
        before: `backend.device_memory()` before the model was built.
    """
    after = backend.device_memory()
    if before is not None and after is not None:
        return StepMemory(after.peak - before.in_use, "peak of the device's allocator")
    planned = backend.planned_step(model, x, y)
    if planned is not None:
        return StepMemory(planned.bytes, "XLA's analysis of the compiled step")
    return StepMemory(None, "not available on this backend and device")


def mebibytes(memory: StepMemory) -> str:
    """A table cell: the mebibytes, or "-" if they are unknown."""
    return "-" if memory.bytes is None else f"{memory.bytes / 2**20:.1f}"


def skipped_steps(model: Any) -> int:
    """How many steps were skipped; 0 where the loss is not scaled."""
    counter = getattr(model.optimizer, "skipped_steps", None)
    return 0 if counter is None else int(keras.ops.convert_to_numpy(counter.value))
