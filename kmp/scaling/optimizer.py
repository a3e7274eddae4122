"""The optimizer that `model.compile` takes: loss scaling around any Keras optimizer."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from kmp._backend import backend
from kmp._backend.types import Gradient, Tensor, Variable
from kmp._common import checked_choice
from kmp._keras import optimizer as keras_optimizer
from kmp.half_memory import HalfMemory
from kmp.health.report import GradientReport, read_report
from kmp.health.spikes import PeakState
from kmp.health.spikes import get as get_spikes
from kmp.health.telemetry import NO_SAMPLING, Telemetry
from kmp.precision.trees import all_finite
from kmp.scaling import arguments, checkpoint, restored
from kmp.scaling.inner import ON_OVERFLOW, DroppedWindow, WrapsInner
from kmp.scaling.step import Counters, ScaledStep, plan_for


@keras.saving.register_keras_serializable(package="kmp")
class LossScaleOptimizer(WrapsInner):
    """Scales the loss, checks the gradients, and applies a step completely or skips it.

    In each step:

    ```
    true gradients = gradients / scale          the scale that the loss was multiplied by
    all finite:    inner_optimizer.apply(true gradients)
    otherwise:     nothing is written: no weight, slot, iteration, average or accumulator
    a spike:       the same, with `spikes`: all are finite, and far larger than lately
    scale          = loss_scale.next(scale, finite)
    ```

    A drop-in for `keras.optimizers.LossScaleOptimizer` whose scale has a floor and a ceiling, and
    whose state tells what happened. Settings such as `clipnorm` are those of the inner optimizer.

    Args:
        inner_optimizer: `keras.optimizers.Optimizer` instance (or its name or config).
        initial_scale: float, as in Keras: the `initial_scale` of a `DynamicLossScale`.
        dynamic_growth_steps: int, as in Keras: the `growth_interval` of that `DynamicLossScale`.
        name: str.
        loss_scale: `"dynamic"`, `"none"`, a positive number or a strategy; not together with the
            two arguments above. See `kmp.scaled`.
        on_overflow: what an overflow costs under gradient accumulation. With `"drop_micro_batch"`
            it costs the micro-batch, and the window takes in one more instead (as Keras); with
            `"drop_window"` the whole window, whose boundary stays (as PyTorch).
        measure_gradients: bool, whether steps are measured; see `gradient_report()`.
        rounding: how bfloat16 weights and slots are rounded after an update computed in float32:
            `"stochastic"`, or `"nearest"`, which loses the smallest updates.
        slot_dtype: `"bfloat16"`, `"float32"`, `"int8"` (8 bits a number where that is safe, else
            bfloat16), or None: that of the variable, float32 for float16.
        master_weights: bool, whether updates of half-precision weights add up in float32: that is
            a bfloat16 weight with an int16 remainder, or a float32 copy of a float16 one. Or 24:
            so many bits, with an int8 remainder.
        spikes: None, `"skip"` or `kmp.SkipSpikes(...)`: whether to leave out a step whose gradients
            are finite, and far larger than the largest lately.
        **kwargs: settings from old Keras configs; only their default values are accepted.

    Attributes:
        step_counter: int[], finite steps since the scale changed, if the strategy counts them.
        skipped_steps: int32[], steps so far that were skipped, as overflows or spikes; with
            "drop_window" also the micro-batches after an overflow, up to the end of its window.
        skipped_spikes: int32[], steps so far that were left out as spikes; None without `spikes`.
        held_statistics: int32[], steps so far in which `kmp.protect` has held batch statistics;
            only with `spikes`.
        consecutive_skips: int32[], overflows in a row up to now.
        variable_paths: the path of the variable in each row of the measurements.
        measures_details: bool, whether steps compiled from now on measure weights and updates.
        first_sampling: two int, what `sample_gradients` would set if the optimizer were built: the
            interval, and one more step. On TensorFlow the first step may build it.
        rounding_seed: int32[], seed of stochastic rounding, initially 0; None if all is float32.
        scale_was_read: bool, whether anything has read the scale, to scale a loss with it.
        step_scales_loss: bool, the same of the last step under `kmp.protect`; None before one.

    Raises:
        ValueError: if the inner optimizer overrides `scale_loss`, an argument is out of range, or
            "drop_window" meets a `keras.optimizers.MultiOptimizer`.

    Warns:
        kmp.PrecisionWarning: if the first step applies gradients though nothing has read the scale.

    Example:

    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024), "mse")
    >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
    >>> float(model.optimizer.dynamic_scale), int(model.optimizer.skipped_steps)
    (1024.0, 0)

    Source: Micikevicius et al. 2018; torch.amp.GradScaler.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
        *,
        loss_scale: Any = None,
        on_overflow: str = "drop_micro_batch",
        measure_gradients: bool = True,
        rounding: str = "stochastic",
        slot_dtype: str | None = None,
        master_weights: bool | int = False,
        spikes: Any = None,
        **kwargs: Any,
    ):
        rule = arguments.choose_rule(loss_scale, initial_scale, dynamic_growth_steps)
        inner_optimizer = arguments.checked_inner(inner_optimizer)
        state = arguments.checked_state(rule)
        # With a different name each time, an Orbax checkpoint would not restore it.
        name = name or "loss_scale_optimizer"
        super().__init__(inner_optimizer, float(state.scale), name=name, **kwargs)
        self.loss_scale, self.spikes = rule, get_spikes(spikes)
        # Not the state itself: TensorFlow's tracking replaces tuples that are set.
        kind: Callable[..., Any] = type(state)
        self._initial_state = functools.partial(kind, *state)
        self.dynamic_growth_steps = getattr(rule, "growth_interval", None)
        self.on_overflow = checked_choice("on_overflow", on_overflow, ON_OVERFLOW)
        if on_overflow == "drop_window" and keras_optimizer.is_several(inner_optimizer):
            raise ValueError(
                "on_overflow='drop_window' discards a window of one optimizer's accumulation, and "
                f"each part of a MultiOptimizer has its own. Received: {inner_optimizer!r}. Leave "
                "on_overflow out: then the micro-batch alone is dropped, in all parts."
            )
        self.measure_gradients = bool(measure_gradients)
        self.half_memory = HalfMemory(rounding, slot_dtype, master_weights)
        self.variable_paths: tuple[str, ...] = ()
        self.scale_was_read, self._warned_of_unscaled_loss = False, False
        self._is_restored = False  # whether that has been looked at, or steps were made since
        self.step_scales_loss: bool | None = None
        self.measures_details = False
        self.first_sampling = NO_SAMPLING
        self.telemetry: Telemetry | None = None
        self.window: DroppedWindow | None = None
        self.skipped_spikes: Variable | None = None

    @property
    def dynamic_scale(self) -> Variable:
        """float32[], the scale of the next step. Reading it counts as scaling the loss by it."""
        self.scale_was_read = True
        return self.scale_variable

    @dynamic_scale.setter
    def dynamic_scale(self, variable: Variable) -> None:  # Keras's `build` makes it
        self.scale_variable = variable

    get_scaled_loss = arguments.gone("get_scaled_loss", "Write optimizer.scale_loss(loss).")
    get_unscaled_gradients = arguments.gone(
        "get_unscaled_gradients",
        "Leave it out: optimizer.apply(gradients, variables) divides them by the scale.",
    )

    def __repr__(self) -> str:
        spikes = "" if self.spikes is None else f", spikes={self.spikes!r}"
        inner = type(self.inner_optimizer).__name__
        return f"<{type(self).__name__} of {inner}, loss_scale={self.loss_scale!r}{spikes}>"

    def __dir__(self) -> list[str]:  # Keras reads all of these when it saves: that scales no loss
        left_out = {"dynamic_scale", "scale_state", "get_scaled_loss", "get_unscaled_gradients"}
        return sorted({*super().__dir__()} - left_out)

    @property
    def scale_state(self) -> Any:
        """State of the next step, for `loss_scale.scale` and `.unscale`. Needs `build`."""
        self.scale_was_read = True
        return self.scaled_step.counters.state

    @property
    def variables(self) -> list[Variable]:
        """The wrapper's variables, then those of the inner optimizer."""
        # On JAX the state is read here before each training, and traced steps cannot read it.
        self._look_at_restored()
        return super().variables

    def _look_at_restored(self) -> None:
        """Warn, once, if a checkpoint has brought only a part of the state."""
        if self.built and not self._is_restored:
            self._is_restored = restored.warn_of_new_slots(self)

    @property
    def divides_gradients(self) -> bool:
        """Whether gradients are divided by anything but 1."""
        return arguments.scales(self.loss_scale)

    @property
    def gradient_health(self) -> Variable | None:
        """float32[num_variables, 5], the measurements; None if steps are not measured."""
        return self.telemetry and self.telemetry.health

    def build(self, var_list: Sequence[Variable]) -> None:
        if self.built:
            return
        var_list = list(var_list)
        arguments.refuse_complex(var_list)
        arguments.check_float16(self.loss_scale, var_list)
        self._is_restored = restored.warn_of_counters_alone(self)
        scale_was_read = self.scale_was_read
        super().build(var_list)
        self.scale_was_read = scale_was_read  # TensorFlow's tracking reads what is set
        self.variable_paths = tuple(getattr(v, "path", v.name) for v in var_list)
        self.skipped_steps = self.add_counter("skipped_steps", dtype="int32")
        self.consecutive_skips = self.add_counter("consecutive_skips", dtype="int32")
        peak = self._add_peak()
        counters = Counters(
            rule=self._add_state(),
            peak=peak,
            spikes=self.skipped_spikes,
            consecutive_skips=self.consecutive_skips,
            skipped_steps=self.skipped_steps,
            steps=self.steps,
            loss_nonfinite=self.add_counter("loss_nonfinite"),
        )
        if self.measure_gradients:
            self.telemetry = Telemetry(
                self.add_counter, len(var_list), self.first_sampling, self.spikes is not None
            )
        if self.on_overflow == "drop_window" and self.gradient_accumulation_steps:
            self.window = DroppedWindow(self.inner_optimizer, self.add_counter)
        plan = plan_for(
            var_list,
            self.inner_optimizer,
            measures=self.measure_gradients,
            max_abs=getattr(self.loss_scale, "reads_max_abs", False),
            norm=self.spikes is not None,
        )
        self.scaled_step = ScaledStep(
            self.inner_optimizer,
            var_list,
            plan,
            counters,
            self.telemetry,
            self.window,
            self.spikes,
        )

    def _add_peak(self) -> Any:
        """The variables of the rule that leaves out spikes; () if there is none."""
        if self.spikes is None:
            return ()
        self.skipped_spikes = self.add_counter("skipped_spikes", dtype="int32")
        self.held_statistics = self.add_counter_of_replicas("held_statistics")
        self.statistics_spent = self.add_counter_of_replicas("statistics_spent")
        return PeakState(
            peak=self.add_counter("spike_peak"),
            norms=self.add_counter("spike_norms", dtype="int32"),
            spent=self.add_counter("spike_spent", dtype="int32"),
        )

    def _add_state(self) -> Any:
        """The variables of the strategy's state. Three have names of Keras's or of kmp 0.1."""
        initial = self._initial_state()
        present = {
            "scale": self.scale_variable,
            "finite_steps": self.step_counter,
            "overflows": self.consecutive_skips,
        }
        for name, value in initial._asdict().items():
            if name not in present:
                start = functools.partial(_constant, value)
                present[name] = self.add_counter(
                    checkpoint.STATE_PREFIX + name, value.shape, str(value.dtype), start
                )
        return type(initial)(*(present[name] for name in initial._fields))

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the present scale, in at least float32.

        TensorFlow and a single PyTorch process also note if it is not finite: then the scale stays.
        """
        self.scale_was_read = True
        if not self.built:
            return self.loss_scale.scale(loss, self.loss_scale.init())
        counters = self.scaled_step.counters
        backend.record_loss_finite(counters.loss_nonfinite, functools.partial(all_finite, loss))
        return self.loss_scale.scale(loss, counters.state)

    def apply(
        self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None
    ) -> None:
        """Update the variables, or nothing if any gradient is not finite.

        Args:
            grads: gradients of the *scaled* loss: tensors, arrays, `tf.IndexedSlices` or None.
            trainable_variables: their variables; those of `build` if left out.

        Raises:
            ValueError: if all gradients are None (an empty list does nothing), if their number or
                a shape does not match the variables, or if a variable was not passed to `build`.
        """
        grads = list(grads)
        if not grads:
            return
        if not self.built:
            if trainable_variables is None:
                raise ValueError(
                    "`apply` needs `trainable_variables` when the optimizer is not built yet. Pass "
                    "them, or call optimizer.build(model.trainable_variables) first."
                )
            self.build(trainable_variables)
        elif not self._is_restored:
            self._look_at_restored()
        self._is_restored = True  # from here on its state is of its own making
        variables = list(trainable_variables or self.scaled_step.variables)
        rows = keras_optimizer.rows_of(self, variables)
        arguments.refuse_unknown(variables, rows)
        grads = arguments.checked_gradients(grads, variables)
        if not (self.scale_was_read or self._warned_of_unscaled_loss) and self.divides_gradients:
            self._warned_of_unscaled_loss = True
            arguments.warn_of_unscaled_loss()
        step = functools.partial(self.scaled_step.run, self.loss_scale, self.measures_details, rows)
        noted = self.scaled_step.counters.loss_nonfinite
        backend.run_step(step, grads, variables, self.inner_optimizer, noted)

    def stateless_scale_loss(self, optimizer_variables: Sequence[Tensor], loss: Tensor) -> Tensor:
        """`scale_loss` as a pure function, for JAX; `scale_loss` would compile the scale in.

        Args:
            optimizer_variables: values of `optimizer.variables`, as for `stateless_apply`.
            loss: float[], the loss.

        Returns:
            float32[], the loss multiplied by the scale that `optimizer_variables` hold.

        Raises:
            ValueError: if the optimizer is not built, or there is not one value a variable.
        """
        arguments.check_stateless(self, optimizer_variables)
        mapping = list(zip(self.variables, optimizer_variables, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return self.scale_loss(loss)

    def sample_gradients(self, update_freq: int, *, and_at: int = 0, details: bool = True) -> None:
        """Choose how often to measure, before the step is compiled.

        Args:
            update_freq: int >= 1, training steps between two measurements. The first 100 steps,
                overflows and the step after each overflow are always measured.
            and_at: int, the number of one more step to measure, counted from 1; 0 for none.
            details: bool, whether to measure weights, updates and exponents too, on samples.

        Raises:
            ValueError: if `update_freq` is < 1, or the optimizer is not built or does not measure.
        """
        arguments.telemetry_of(self, "sample_gradients").sample(update_freq, and_at)
        self.measures_details = bool(details)

    def gradient_report(self) -> GradientReport:
        """Return what has been measured so far, in one transfer that waits for the device.

        On JAX assign the state that the compiled step returned to `optimizer.variables` first.

        Raises:
            ValueError: if the optimizer is not built or does not measure.

        Example:

        >>> optimizer = kmp.scaled("sgd", learning_rate=0.5)
        >>> optimizer.build([keras.Variable([1.0, 2.0], name="weight")])
        >>> optimizer.gradient_report().paths
        ('weight',)
        """
        arguments.telemetry_of(self, "gradient_report")
        return read_report(self)

    save_own_variables = checkpoint.save_own_variables
    load_own_variables = checkpoint.load_own_variables

    def state(self) -> dict[str, Any]:
        """Return the loss scale's state as `torch.amp.GradScaler.state_dict()` does."""
        return checkpoint.grad_scaler_state(self)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a GradScaler's `state_dict()`. Call it before the first step is compiled.

        Raises:
            ValueError: if it is not a GradScaler's, or the optimizer is not built or not dynamic.
        """
        checkpoint.load_grad_scaler_state(self, state)

    def get_config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "inner_optimizer": keras_optimizer.portable_config(self.inner_optimizer),
            "loss_scale": keras.saving.serialize_keras_object(self.loss_scale),
            "on_overflow": self.on_overflow,
            "measure_gradients": self.measure_gradients,
            "spikes": self.spikes and keras.saving.serialize_keras_object(self.spikes),
            **dataclasses.asdict(self.half_memory),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        config = copy.deepcopy(config)  # Keras replaces what it deserialises, in place
        inner = keras.saving.deserialize_keras_object(config.pop("inner_optimizer"), custom_objects)
        return cls(inner, **config)


def _constant(value: np.ndarray, *_: Any, **__: Any) -> Tensor:
    """An initializer; a `tf.function` that creates the variable cannot assign to it."""
    return keras.ops.convert_to_tensor(value)
