"""A learning rate that sweeps, and what has to be put back after it has."""

import math
from typing import Any

import keras
from keras import ops

from kmp._backend import backend
from kmp._backend.random_states import RandomStates
from kmp._backend.types import Tensor
from kmp._keras.optimizer import inner_optimizer_of, replace_learning_rate, steps_of
from kmp.callbacks.lr_range import learning_rate


class Sweep(keras.optimizers.schedules.LearningRateSchedule):
    """Grows by the same factor with each step that an optimizer applies, from `first_step` on."""

    def __init__(self, min_lr: float, max_lr: float, steps: int, first_step: int):
        self.min_lr, self.max_lr, self.steps = min_lr, max_lr, steps
        self.first_step = first_step

    def __call__(self, step: Tensor) -> Tensor:
        place = ops.cast(step - self.first_step, "float32") / (self.steps - 1)
        low, high = math.log(self.min_lr), math.log(self.max_lr)
        return ops.exp(low + (high - low) * ops.minimum(place, 1.0))

    def at(self, step: int) -> float:
        """The same on the host."""
        return learning_rate(step - self.first_step, self.min_lr, self.max_lr, self.steps)


class SweptModel:
    """A compiled model whose optimizer sweeps until `restore`, which puts everything back.

    Weights, statistics and seeds of the layers, metrics, the optimizer with its learning rate (a
    schedule too), loss scale and counters, and the random states. The copies are on the host.

    Args:
        model: `keras.Model`, compiled, its optimizer built.
        min_lr, max_lr, steps: see `kmp.callbacks.LearningRateFinder`.
    """

    def __init__(self, model: Any, min_lr: float, max_lr: float, steps: int):
        optimizer = model.optimizer
        variables = [*model.variables, *model.metrics_variables, *optimizer.variables]
        self._values = [(v, backend.to_host(v)) for v in unique(variables)]
        self._random_states = RandomStates()
        self._inner = inner_optimizer_of(optimizer)
        applied = int(ops.convert_to_numpy(steps_of(self._inner)))
        self.sweep = Sweep(min_lr, max_lr, steps, applied)
        self._learning_rate = replace_learning_rate(self._inner, self.sweep)

    def restore(self) -> None:
        """Put everything back."""
        replace_learning_rate(self._inner, self._learning_rate)
        for variable, value in self._values:
            backend.from_host(variable, value)
        self._random_states.restore()


def unique(variables: list) -> list:
    """Each variable once, in order."""
    return list({id(v): v for v in variables}.values())
