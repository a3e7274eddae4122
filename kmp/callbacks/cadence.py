"""When a callback looks at the optimizer, and how: in one transfer, without slowing the rest."""

from typing import Any

from kmp.health import report as _reading
from kmp.health.report import GradientReport
from kmp.scaling.optimizer import LossScaleOptimizer


def read_report(model: Any) -> GradientReport | None:
    """Read what the optimizer of `model` has measured; None if it has not been built yet."""
    return _reading.read_report(model.optimizer, model) if model.optimizer.built else None


def require_measuring_optimizer(callback: Any, model: Any) -> None:
    """Raise ValueError unless `model` was compiled with an optimizer that measures gradients."""
    optimizer = getattr(model, "optimizer", None)
    name = type(callback).__name__
    if not isinstance(optimizer, LossScaleOptimizer):
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # under mixed_float16 Keras wraps
        raise ValueError(
            f"{name} reads what kmp's optimizer measures. Received: a model compiled with "
            f"{type(optimizer).__name__}. Write model.compile(optimizer=kmp.scaled("
            f"{type(inner).__name__ if inner else 'keras.optimizers.Adam'}, ...), ...); "
            'with loss_scale="none" where nothing needs scaling.'
        )
    if not optimizer.measure_gradients:
        raise ValueError(
            f"{name} needs the optimizer's measurements. Received: measure_gradients=False. Leave "
            "the argument out of kmp.LossScaleOptimizer(...), or the callback out of `fit`."
        )


class Cadence:
    """Tells at the beginning of a batch whether `update_freq` steps have passed since the last yes.

    Batch indices count steps whatever `steps_per_execution` is, so that the answer comes at the
    first execution at or after the due step.
    """

    def __init__(self, update_freq: int, step: int = 0):
        self.update_freq = update_freq
        self.epoch_start = self._last = step

    def is_due(self, batch: int) -> bool:
        """Tell whether to sample before the step with this index in the epoch."""
        step = self.epoch_start + batch
        if step - self._last < self.update_freq:
            return False
        self._last = step
        return True
