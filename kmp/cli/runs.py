"""One model trained under one policy, and what that cost: what `bench` and `certify` measure."""

import time
from collections.abc import Callable
from typing import Any

import keras

from kmp._backend import backend
from kmp._backend.types import Tree
from kmp.callbacks.protection import Hold, protect_fit, release
from kmp.cli.building import build_under
from kmp.cli.costs import StepMemory, skipped_steps, step_memory


class Run:
    """A model under a policy, with the data it was built with.

    Attributes:
        model: the compiled model.
        data: list, what else `build` returned.
        steps: int, how many it has taken.
        loss: float, of the last epoch; NaN before the first.

    Args:
        build: returns a tuple, a compiled model first; called under float32.
        policy: what `parse_policy` takes.
        seed: int, for all random numbers.
    """

    def __init__(self, build: Callable[[], tuple], policy: str, seed: int):
        self._memory_before = backend.device_memory()
        self.model, *self.data = build_under(build, policy, seed)
        self.steps = 0
        self.loss = float("nan")

    def fit(
        self, x: Tree, y: Tree, batch_size: int, epochs: int = 1, shuffle: bool = False
    ) -> list[float]:
        """Train, protected as with one of kmp's callbacks.

        Returns:
            `[epochs]`, seconds. An epoch ends when its loss is on the host; the first one includes
            the start of `fit`, and whatever it compiles.
        """
        clock = _Clock()
        history = self.model.fit(
            x,
            y,
            batch_size=batch_size,
            epochs=epochs,
            shuffle=shuffle,
            verbose=0,
            callbacks=[clock],
        )
        self.loss = float(history.history["loss"][-1])
        self.steps += epochs * -(-number_of_samples(x) // batch_size)
        return clock.seconds

    def memory(self, x: Tree, y: Tree) -> StepMemory:
        """The most that a training step on the batch `x, y` holds, asked after training."""
        return step_memory(self.model, x, y, self._memory_before)

    @property
    def skipped_steps(self) -> int:
        """How many of the steps were skipped; 0 where the loss is not scaled."""
        return skipped_steps(self.model)


def number_of_samples(x: Tree) -> int:
    """The length of the first axis of a structure of arrays."""
    return len(keras.tree.flatten(x)[0])


class _Clock(keras.callbacks.Callback):
    """Seconds of each epoch, from the end of the one before it; protects its `fit`."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def on_train_begin(self, logs: Any = None) -> None:
        protect_fit(self.model, Hold(self))

    def on_train_end(self, logs: Any = None) -> None:
        release(self.model, self)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
