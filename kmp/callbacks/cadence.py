"""When a callback looks at what the steps have counted."""


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
