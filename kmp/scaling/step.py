"""One training step of the loss-scaling optimizer, in the order in which it happens."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from keras import ops

from kmp import _backend
from kmp._backend.types import Gradient, Tensor, Variable
from kmp.health import details as _sample
from kmp.health import measure as health
from kmp.health.reduce import Part, gather
from kmp.scaling.inner import ForwardsToInner
from kmp.scaling.rules import ScaleState
from kmp.scaling.telemetry import MeasuresGradients
from kmp.scaling.trees import map_gradients

_ACCELERATORS = ("gpu", "tpu")  # which a conditional stalls


class Measured(NamedTuple):
    """What a step knows of its gradients before anything is written.

    Attributes:
        finite: bool[], whether all of them are finite.
        loss_finite: bool[], False where the loss is known not to be finite.
        nonfinite: float32[num_variables], above 0 if numbers of a gradient are not finite.
        blamed: what `health.blame` says of those.
        due: whether to measure the levels, and the details: bool[] each, if anything is measured.
        levels: float32[num_variables, 4], from `health.measure`, maybe of an earlier step.
        sample: float32[2 * n], of the scaled gradients and of the weights before the update.
        order: the order of the variables in the sample.
        max_abs: float32[], the largest true gradient, if the rule asks for it.
    """

    finite: Tensor
    loss_finite: Tensor
    nonfinite: Tensor
    blamed: tuple[Tensor, Tensor]
    due: Any = None
    levels: Tensor | None = None
    sample: Tensor | None = None
    order: Sequence[int] = ()
    max_abs: Tensor | None = None


class Kind(NamedTuple):
    """How the gradients of a variable are unscaled.

    Attributes:
        dtype: what they are cast to afterwards, or None.
        overwrites: whether they are none: float8's scales arrive as "gradients" that replace the
            variable, and are never scaled.
    """

    dtype: str | None
    overwrites: bool


class ScaledStep(MeasuresGradients, ForwardsToInner):
    """Mixin: unscale, measure, decide, update, record. The optimizer brings the variables.

    The parts are methods of their own because distribution runs them in different places: each
    replica unscales, all of them decide once, each replica updates.
    """

    @property
    def _state(self) -> ScaleState:
        return ScaleState(
            ops.convert_to_tensor(self.scale_variable),
            ops.convert_to_tensor(self.step_counter),
            ops.convert_to_tensor(self.consecutive_skips),
        )

    def step(self, grads: list[Gradient], variables: list[Variable]) -> None:
        """Run one step on gradients that are the same wherever this code runs."""
        true = self.unscaled(grads, variables)
        measured = self.measured(grads, true, variables)

        def update() -> None:
            _backend.apply(self.inner_optimizer, true, variables)

        guarded = variables + self.inner_optimizer.variables
        _backend.apply_if(self.admitted(measured.finite), update, guarded)
        self.record(measured)

    def unscaled(self, grads: list[Gradient], variables: list[Variable]) -> list[Gradient]:
        """Divide the gradients by the scale that the loss was multiplied with."""
        return self._unscaled(grads, [self._kind(v) for v in variables], self._state)

    def _kind(self, variable: Variable) -> Kind:
        # Keras's accumulators have the variable's dtype and must meet their own.
        accumulates = self.inner_optimizer.gradient_accumulation_steps
        return Kind(
            variable.dtype if accumulates else None,
            self._overwrite_variable_with_gradient(variable),
        )

    def _unscaled(
        self, grads: list[Gradient], kinds: Sequence[Any], state: ScaleState
    ) -> list[Gradient]:
        def true(scaled: Gradient, divided: Gradient, kind: Kind) -> Gradient:
            if kind.overwrites:
                return scaled
            if kind.dtype is None:
                return divided
            return map_gradients(functools.partial(ops.cast, dtype=kind.dtype), divided)

        return list(map(true, grads, self.loss_scale.unscale(grads, state), kinds))

    def measured(
        self, grads: list[Gradient], true: list[Gradient], variables: list[Variable]
    ) -> Measured:
        """Look at scaled gradients and the true ones: are they finite, and how large."""
        watched = self._trainable_variables
        kinds = [self._kind(v) for v in watched]
        scaled = self._rows(grads, variables)
        if not _backend.inside_xla():
            parts = [Part(x, (i,), False) for i, x in enumerate(scaled) if x is not None]
            measured = self._looked_at(gather(self._rows(true, variables), self._sizes, kinds))
        else:
            # XLA divides while it updates, and again here: true gradients are never in memory.
            parts = gather(scaled, self._sizes, kinds)
            measured = self._looked_at(parts, self._divided)
        if not (self.measures_details and measured.due):
            return measured
        order = _sample.layout(parts, len(watched))
        sample = functools.partial(_sample.sample, parts, watched)
        zeros = ops.zeros((_sample.size_before(watched),), "float32")
        if _backend.compiled_for() in _ACCELERATORS:
            before = ops.where(measured.due[1], sample(), zeros)
        else:
            before = _backend.compute_if(measured.due[1], sample, zeros)
        # Otherwise XLA may update the weights first, and would keep a copy of all of them for the
        # sample's sake.
        finite = _backend.after(measured.finite, before)
        return measured._replace(finite=finite, sample=before, order=order)

    def _divided(self, parts: list[Part]) -> list[Part]:
        kinds = [part.kind for part in parts]
        values = self._unscaled([part.values for part in parts], kinds, self._state)
        return [part._replace(values=x) for part, x in zip(parts, values, strict=True)]

    def _looked_at(self, parts: list[Part], true: Callable[..., list[Part]] = list) -> Measured:
        device, number = _backend.compiled_for(), len(self._sizes)
        # XLA fuses a stack of large gradients into their reduction on GPUs; elsewhere it writes it.
        together = device == "gpu"
        measures = self.gradient_health is not None
        reads_max_abs = getattr(self.loss_scale, "reads_max_abs", False)

        def is_measured_always(part: Part) -> bool:
            # Compiling a reduction more takes longer than all that small ones cost.
            cheap = device in _ACCELERATORS or (device == "cpu" and part.stacked)
            return reads_max_abs or (measures and cheap)

        always = [part for part in parts if is_measured_always(part)]
        others = [part for part in parts if not is_measured_always(part)]
        levels = nonfinite = largest = due = None
        if always:
            levels = health.measure(true(always), self._sizes, together=together)
            nonfinite = levels[:, health.NONFINITE]
        if others or levels is None:
            found = health.find_nonfinite(true(others), number, together=together)
            nonfinite = found if nonfinite is None else nonfinite + found
        if reads_max_abs:
            largest = ops.max(self._of_gradients(levels)[:, health.MAX_ABS], initial=0)
        if measures:
            due = health.due(self._step_number(), ops.convert_to_tensor(self.sampling))
        loss_nonfinite = ops.convert_to_tensor(self.loss_nonfinite)
        blamed = health.blame(nonfinite)
        finite, loss_finite, due = _backend.verdict(blamed[0], loss_nonfinite, due)
        if due is None:
            return Measured(finite, loss_finite, nonfinite, blamed, max_abs=largest)
        # An overflow is measured whenever it comes. (Operators, as on torch these are on the host.)
        due = (due[0] | ~finite, due[1])

        def all_levels() -> Tensor:
            # (Divided in here: what a branch asks for would be written in every step.)
            rest = health.measure(true(others), self._sizes)
            return self._of_gradients(rest if levels is None else rest + levels)

        previous = ops.convert_to_tensor(self.gradient_health)[:, : health.OVERFLOW_STEPS]
        if others or levels is None:
            levels = _backend.compute_if(due[0], all_levels, previous)
        else:
            levels = ops.where(due[0], self._of_gradients(levels), previous)
        return Measured(finite, loss_finite, nonfinite, blamed, due, levels, max_abs=largest)

    def _of_gradients(self, measured: Tensor) -> Tensor:
        """Zeros in the rows of float8's scales: what replaces those is no gradient."""
        raw = [self._overwrite_variable_with_gradient(v) for v in self._trainable_variables]
        if not any(raw):
            return measured
        return ops.where(ops.convert_to_tensor(raw)[:, None], 0.0, measured)

    def _rows(self, grads: list[Gradient], variables: list[Variable]) -> list[Gradient]:
        """The gradient, or None, in the row of each variable that the optimizer was built with."""
        rows: list[Gradient] = [None] * len(self._sizes)
        for grad, variable in zip(grads, variables, strict=True):
            rows[self._get_variable_index(variable)] = grad
        return rows

    def _step_number(self) -> Tensor:
        return ops.cast(ops.convert_to_tensor(self._iterations), "int32") + 1

    def admitted(self, finite: Tensor) -> Tensor:
        """bool[]: whether the inner optimizer sees this step."""
        return finite if self._window is None else ops.logical_and(finite, self._window.admits())

    def record(self, measured: Measured) -> None:
        """Write down the verdict: the next scale, the counters and the measurements."""
        finite, before = measured.finite, self._state
        skipped = ops.logical_not(self.admitted(finite))
        largest = () if measured.max_abs is None else (measured.max_abs,)
        state = self.loss_scale.next(before, finite, *largest)
        # No scale helps against a loss that is not finite itself: the scale is left as it is.
        may_move = ops.logical_or(finite, measured.loss_finite)
        kept = ops.minimum(before.finite_steps, state.finite_steps)
        finite_steps = ops.where(may_move, state.finite_steps, kept)
        if self.gradient_health is not None:
            self._record_measurements(measured)
        self.scale_variable.assign(ops.where(may_move, state.scale, before.scale))
        self.step_counter.assign(ops.cast(finite_steps, self.step_counter.dtype))
        self.consecutive_skips.assign(state.overflows)
        self.skipped_steps.assign_add(ops.cast(skipped, "int32"))
        # One, once the verdict is there: at the end of data of unknown length TensorFlow's loop
        # runs a step without any, in which what waits for no gradient would count.
        self._iterations.assign_add(ops.where(finite, 1, 1))
        self.loss_nonfinite.assign(ops.zeros((), "float32"))
        if self._window is not None:
            self._window.record(finite)

    def _record_measurements(self, measured: Measured) -> None:
        step, scale = self._step_number(), self._state.scale
        events = ops.convert_to_tensor(self.overflow_events)
        self.overflow_events.assign(
            health.add_event(events, step, scale, measured.blamed, measured.loss_finite)
        )
        previous = ops.convert_to_tensor(self.gradient_health)
        self.gradient_health.assign(
            health.accumulate(measured.levels, measured.nonfinite, previous)
        )
        due_levels, due_details = measured.due
        sampling = ops.convert_to_tensor(self.sampling)
        if measured.sample is None:
            due_details = ops.zeros_like(due_details)
        else:
            before, order, watched = measured.sample, measured.order, self._trainable_variables

            def details() -> Tensor:
                after = _sample.sample_weights(watched, order)
                return self._of_gradients(_sample.measure_sample(before, after, watched, order))

            previous = ops.convert_to_tensor(self.gradient_details)
            self.gradient_details.assign(_backend.compute_if(due_details, details, previous))
        self.sampling.assign(health.sampled(sampling, step, due_levels, due_details))
