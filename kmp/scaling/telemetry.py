"""What the optimizer measures: the variables that hold it, when, and how it is read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from kmp._backend.types import Tensor, Variable
from kmp._common import whole_number
from kmp.health import details as _sample
from kmp.health import measure as health
from kmp.health.report import GradientReport
from kmp.health.transfer import read_report


def _zeros(shape: Sequence[int], dtype: str) -> Tensor:
    """Zeros that come from the host, where Keras's are a program for each shape on JAX."""
    return ops.convert_to_tensor(np.zeros(shape, dtype))


class MeasuresGradients:
    """Mixin of the optimizer: the measurements' variables, and the way to plan and read them."""

    built: bool
    measure_gradients: bool
    add_variable: Any
    gradient_health: Any = None
    measures_details = False

    def _build_measurements(self, rows: int) -> None:
        self.loss_nonfinite = self._add("loss_nonfinite")
        if not self.measure_gradients:
            return
        self.gradient_health = self._add("gradient_health", (rows, len(health.COLUMNS)))
        self.gradient_details = self._add(
            "gradient_details", (rows, len(_sample.COLUMNS) + _sample.BINS)
        )
        self.overflow_events = self._add(
            "overflow_events", (health.NUM_EVENTS, len(health.EVENT_COLUMNS))
        )
        self.sampling = self._add("sampling", (4,), "int32")

    def _require_measurements(self, method: str) -> None:
        if not self.built or self.gradient_health is None:
            raise ValueError(
                f"`{method}` needs an optimizer that is built and measures. Received: "
                f"built={self.built}, measure_gradients={self.measure_gradients}. Call "
                "optimizer.build(model.trainable_variables) first, and leave "
                "measure_gradients=False out."
            )

    def _add(self, name: str, shape: tuple[int, ...] = (), dtype: str = "float32") -> Variable:
        return self.add_variable(
            shape=shape, dtype=dtype, initializer=_zeros, aggregation="none", name=name
        )

    def sample_gradients(self, update_freq: int, *, and_at: int = 0, details: bool = True) -> None:
        """Choose how often to measure; `GradientHealth` does so in `fit`.

        Call it before the step is compiled: one that is compiled already keeps its details, or does
        without.

        Args:
            update_freq: int >= 1, training steps between two measurements of levels and details.
                The first 100 steps and overflows have their levels measured anyhow.
            and_at: int, one more step to measure, by its number in training, counted from 1.
            details: bool, whether to measure weights, updates and exponents too, on samples of at
                most 4,096 numbers a variable.

        Raises:
            ValueError: if the optimizer is not built or does not measure, or a value is no number
                of steps.
        """
        self._require_measurements("sample_gradients")
        interval = whole_number("update_freq", update_freq, "sample_gradients")
        noted = ops.convert_to_numpy(self.sampling)[2:]
        self.sampling.assign(np.array([interval, and_at, *noted], "int32"))
        self.measures_details = bool(details)

    def gradient_report(self) -> GradientReport:
        """Return what has been measured so far, in one transfer: for loops of your own.

        It waits for the device; ask seldom. On JAX assign the state that the compiled step returned
        to `optimizer.variables` first.

        Raises:
            ValueError: if the optimizer is not built or does not measure.

        Example:

        >>> optimizer = kmp.scaled("sgd", learning_rate=0.5)
        >>> weight = keras.Variable([1.0, 2.0], name="weight")
        >>> optimizer.build([weight])
        >>> optimizer.gradient_report().paths
        ('weight',)
        """
        self._require_measurements("gradient_report")
        return read_report(self)
