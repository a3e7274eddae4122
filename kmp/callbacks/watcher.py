"""What the callbacks that watch a `fit` have in common."""

import inspect
from typing import Any

import keras
from keras.callbacks import CallbackList

from kmp._common import whole_number
from kmp.callbacks.protection import Hold, protect_fit, release

_NEVER = 2**31 - 1  # steps


class Watcher(keras.callbacks.Callback):
    """A callback that protects its `fit`, comes first in it, and looks every so many steps.

    A subclass sets `_cadence` before the first batch, and says in `_look` what a look is.

    Attributes:
        trained: the model. `self.model` would bring all of JAX's state out of the loop.
    """

    _cadence: "Cadence"

    def set_model(self, model):
        super().set_model(model)
        self.trained: Any = model

    def on_train_begin(self, logs=None):
        callbacks = come_first(self)
        protect_fit(self.trained, self._hold())
        self._begin_fit(callbacks)

    def on_train_batch_begin(self, batch, logs=None):
        if self._cadence.is_due(batch):
            self._look()

    def on_train_end(self, logs=None):
        release(self.trained, self)

    def _hold(self) -> Hold:
        """What this callback asks of the model while its `fit` runs."""
        return Hold(self)

    def _begin_fit(self, callbacks: list[keras.callbacks.Callback]) -> None:
        """Begin a `fit` that has these callbacks, this one among them."""

    def _look(self) -> Any:
        """Look at the model."""
        raise NotImplementedError


class Cadence:
    """Tells at the beginning of a batch whether `update_freq` steps have passed since the last yes.

    Batch indices count steps whatever `steps_per_execution` is, so that the answer comes at the
    first execution at or after the due step.
    """

    def __init__(self, update_freq: int, step: int = 0):
        self.update_freq = update_freq
        self.epoch_start = self._last = step

    def is_due(self, batch: int) -> bool:
        """Tell whether to look before the step with this index in the epoch."""
        step = self.epoch_start + batch
        if step - self._last < self.update_freq:
            return False
        self._last = step
        return True


def checked_update_freq(update_freq: Any, owner: str) -> int:
    """The steps between two looks, from what keras.callbacks.TensorBoard takes.

    Example:

    >>> checked_update_freq("batch", "GradientHealth"), checked_update_freq(20, "GradientHealth")
    (1, 20)
    """
    if isinstance(update_freq, str):
        steps = {"batch": 1, "epoch": _NEVER}  # each epoch's end is looked at anyway
        if update_freq not in steps:
            raise ValueError(
                f'`update_freq` of {owner} must be "epoch", "batch" or a whole number of steps. '
                f'Received: update_freq={update_freq!r}. Write for example update_freq="epoch".'
            )
        return steps[update_freq]
    return whole_number("update_freq", update_freq, owner)


def come_first(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """Let `callback` be called before all others of its `fit`; for use in `on_train_begin`.

    Every other callback then sees what `callback` puts into the logs, wherever the user has put it
    in the list. Keras does not tell a callback which list it is in, so this function looks for the
    list among its callers. The callbacks after `callback` keep their places, so the loop that has
    just called `callback` skips none of them and calls none twice.

    Returns:
        All callbacks of this `fit`; only `callback` if something other than Keras has called it.
    """
    frame = inspect.currentframe()
    while frame := frame and frame.f_back:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackList):
            if callback in caller.callbacks:
                caller.callbacks.remove(callback)
                caller.callbacks.insert(0, callback)
            return list(caller.callbacks)
    return [callback]
