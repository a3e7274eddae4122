"""When a callback looks at the optimizer, and how: in one transfer, without slowing the rest."""

from typing import Any

import keras
from keras import ops

from kmp import _backend
from kmp.health import COLUMNS, GradientReport
from kmp.optimizer import LossScaleOptimizer


def read_report(model: Any) -> GradientReport | None:
    """Read what the optimizer of `model` has counted and measured, in one transfer.

    Args:
        model: `keras.Model`, inside or outside `fit`.

    Returns:
        The report, or None if the optimizer has not been built yet.
    """
    optimizer = model.optimizer
    if not optimizer.built:
        return None
    variables = [
        optimizer.dynamic_scale,
        optimizer.steps,
        optimizer.skipped_steps,
        optimizer.consecutive_skips,
        optimizer.gradient_health,
    ]
    values = [ops.convert_to_tensor(x) for x in _backend.read(model, variables)]
    # Floats travel as their bits: the counters are integers and stay exact beside them.
    packed = ops.concatenate([ops.reshape(_bits(x), (-1,)) for x in values])
    numbers = ops.convert_to_numpy(packed)
    floats = numbers.view("float32")
    return GradientReport(
        paths=optimizer.variable_paths,
        matrix=floats[4:].reshape(-1, len(COLUMNS)),
        loss_scale=float(floats[0]),
        step=int(numbers[1]),
        skipped_steps=int(numbers[2]),
        consecutive_skips=int(numbers[3]),
    )


def _bits(x: Any) -> Any:
    if keras.backend.standardize_dtype(x.dtype) == "float32":
        return ops.view(x, "int32")
    return ops.cast(x, "int32")


def require_measuring_optimizer(callback: Any, model: Any) -> None:
    """Raise ValueError unless `model` was compiled with an optimizer that measures gradients."""
    optimizer = getattr(model, "optimizer", None)
    name = type(callback).__name__
    if not isinstance(optimizer, LossScaleOptimizer):
        raise ValueError(
            f"{name} reads what kmp's optimizer measures. Received: a model compiled with "
            f"{type(optimizer).__name__}. Write model.compile(optimizer=kmp.scaled("
            f"{type(optimizer).__name__ if optimizer else 'keras.optimizers.Adam'}, ...), ...); "
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

    def __init__(self, update_freq: int):
        if isinstance(update_freq, bool) or update_freq != int(update_freq) or update_freq < 1:
            raise ValueError(
                "`update_freq` must be a whole number of training steps, at least 1. "
                f"Received: update_freq={update_freq!r}. Write for example update_freq=100."
            )
        self.update_freq = int(update_freq)
        self._last = 0
        self._epoch_start = 0

    def begin_epoch(self, step: int) -> None:
        """Start an epoch after `step` training steps; what was due stays due."""
        self._epoch_start = step

    def is_due(self, batch: int) -> bool:
        """Tell whether to sample before the step with this index in the epoch."""
        step = self._epoch_start + batch
        if step - self._last < self.update_freq:
            return False
        self._last = step
        return True
