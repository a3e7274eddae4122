"""One training step of the loss-scaling optimizer, in the order in which it happens."""

import functools
from typing import Any

from keras import ops

from kmp import _backend, health
from kmp._types import Gradient, Tensor, Variable
from kmp._window import DroppedWindow
from kmp.scaling import LossScale, ScaleState
from kmp.trees import map_gradients


class ScaledStep:
    """Mixin: unscale, measure, decide, update, record. The optimizer brings the variables.

    The parts are methods of their own because distribution runs them in different places: each
    replica unscales, all of them decide once, each replica updates.
    """

    inner_optimizer: Any
    loss_scale: LossScale
    dynamic_scale: Variable
    step_counter: Variable
    skipped_steps: Variable
    consecutive_skips: Variable
    gradient_health: Variable | None
    _iterations: Variable
    _sizes: tuple[int, ...]
    _window: DroppedWindow | None
    _get_variable_index: Any
    _overwrite_variable_with_gradient: Any

    @property
    def scale_state(self) -> ScaleState:
        """The loss scale's state as tensors, to read or to hand to `loss_scale`."""
        return ScaleState(
            ops.convert_to_tensor(self.dynamic_scale),
            ops.convert_to_tensor(self.step_counter),
            ops.convert_to_tensor(self.consecutive_skips),
        )

    def step(self, grads: list[Gradient], variables: list[Variable]) -> None:
        """Run one step on gradients that are the same wherever this code runs."""
        grads = self.unscaled(grads, variables)
        measured, finite = self.measured(grads, variables)

        def update() -> None:
            self.inner_optimizer.apply(grads, variables)

        guarded = variables + self.inner_optimizer.variables
        _backend.apply_if(self.admitted(finite), update, guarded)
        self.record(measured, finite)

    def unscaled(self, grads: list[Gradient], variables: list[Variable]) -> list[Gradient]:
        """Divide the gradients by the scale that the loss was multiplied with."""
        true = self.loss_scale.unscale(grads, self.scale_state)
        if self.inner_optimizer.gradient_accumulation_steps:
            # Keras's accumulators have the variable's dtype and must meet their own.
            true = [
                map_gradients(functools.partial(ops.cast, dtype=v.dtype), g)
                for g, v in zip(true, variables, strict=True)
            ]
        # Float8's scales arrive as "gradients" that replace the variable: never scaled.
        overwritten = [self._overwrite_variable_with_gradient(v) for v in variables]
        return [g if raw else t for raw, g, t in zip(overwritten, grads, true, strict=True)]

    def measured(
        self, grads: list[Gradient], variables: list[Variable]
    ) -> tuple[Tensor | None, Tensor]:
        """Measure unscaled gradients: (float32[num_variables, 4] or None, bool[] all finite)."""
        if self.gradient_health is None:
            return None, _backend.verdict(health.count_nonfinite(grads))
        rows: list[Gradient] = [None] * len(self._sizes)
        for grad, variable in zip(grads, variables, strict=True):
            rows[self._get_variable_index(variable)] = grad
        measured = health.measure(rows, self._sizes)
        return measured, _backend.verdict(measured[:, health.NONFINITE])

    def admitted(self, finite: Tensor) -> Tensor:
        """bool[]: whether the inner optimizer sees this step."""
        return finite if self._window is None else ops.logical_and(finite, self._window.admits())

    def record(self, measured: Tensor | None, finite: Tensor) -> None:
        """Write down the verdict: the next scale, the counters and the measurements."""
        skipped = ops.logical_not(self.admitted(finite))
        state = self.loss_scale.next(self.scale_state, finite)
        self.dynamic_scale.assign(state.scale)
        self.step_counter.assign(ops.cast(state.finite_steps, self.step_counter.dtype))
        self.consecutive_skips.assign(state.overflows)
        self.skipped_steps.assign_add(ops.cast(skipped, "int32"))
        self._iterations.assign_add(1)
        if self._window is not None:
            self._window.record(finite)
        if self.gradient_health is not None:
            previous = ops.convert_to_tensor(self.gradient_health)
            self.gradient_health.assign(health.accumulate(measured, previous))
