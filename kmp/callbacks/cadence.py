"""When a callback looks at what the steps have counted."""

from typing import Any

from kmp._common import whole_number

_NEVER = 2**31 - 1  # steps


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
