"""The optimizer that `model.compile` takes: loss scaling around any Keras optimizer."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from kmp import _backend
from kmp._backend.types import Gradient, Tensor, Variable
from kmp._common import checked_choice
from kmp.health import measure as health
from kmp.scaling import checkpoint
from kmp.scaling import rules as scaling
from kmp.scaling.arguments import (
    checked_inner,
    choose_rule,
    make_inner,
    portable_config,
    refuse_float16_on_tpu,
    warn_of_unscaled_float16,
    warn_of_unscaled_loss,
)
from kmp.scaling.gradients import checked_gradients, refuse_complex, refuse_unknown
from kmp.scaling.rules import NoOpLossScale, ScaleState, StaticLossScale
from kmp.scaling.step import ScaledStep
from kmp.scaling.trees import all_finite
from kmp.scaling.window import ON_OVERFLOW, DroppedWindow

_SCALE_OF_1 = StaticLossScale(1.0)


def scaled(
    optimizer: Any,
    loss_scale: Any = "dynamic",
    *,
    on_overflow: str = "drop_micro_batch",
    **optimizer_arguments,
) -> Any:
    """Wrap an optimizer in loss scaling, ready for `model.compile`.

    Args:
        optimizer: a `keras.optimizers.Optimizer` class, instance, name or config.
        loss_scale: `"dynamic"`, `"none"`, a positive number (static), or a strategy such as
            `kmp.DynamicLossScale(growth_interval=500)`.
        on_overflow: what an overflow costs under gradient accumulation; see
            `kmp.LossScaleOptimizer`.
        **optimizer_arguments: what the optimizer's constructor takes, with a class or a name.

    Returns:
        `kmp.LossScaleOptimizer`.

    Raises:
        ValueError: if the optimizer scales losses itself, if `loss_scale` names no strategy, or if
            arguments come with an optimizer that is already built from others.

    Example:

    >>> optimizer = scaled("sgd", learning_rate=0.5, momentum=0.9)
    >>> optimizer.inner_optimizer.momentum
    0.9
    """
    inner = make_inner(optimizer, optimizer_arguments)
    rule = scaling.get(loss_scale)  # here None is no default: it may mean either
    return LossScaleOptimizer(inner, loss_scale=rule, on_overflow=on_overflow)


@keras.saving.register_keras_serializable(package="kmp")
class LossScaleOptimizer(ScaledStep, keras.optimizers.LossScaleOptimizer):
    """Scales the loss, checks the gradients, and lets a step happen wholly or not at all.

    In each step:

    ```
    gradients, measured together  = gradients / scale       the scale that the loss was given
    all finite:    inner_optimizer.apply(gradients)
    otherwise:     nothing is written: no weight, slot, iteration, average or accumulator
    scale          = loss_scale.next(scale, finite)
    ```

    A drop-in for `keras.optimizers.LossScaleOptimizer`; unlike it, the scale keeps a floor and a
    ceiling, and the state tells what happened. Attributes and settings that it does not have
    itself are those of the inner optimizer.

    Args:
        inner_optimizer: `keras.optimizers.Optimizer` instance (or its name or config).
        initial_scale: float, Keras's argument: short for `DynamicLossScale(initial_scale=...)`.
        dynamic_growth_steps: int, Keras's argument: the `growth_interval` of the same.
        name: str.
        loss_scale: `"dynamic"`, `"none"`, a positive number or a strategy; not together with the
            two arguments above. See `kmp.scaled`.
        on_overflow: under gradient accumulation, `"drop_micro_batch"` leaves the overflowing
            micro-batch out and the window takes one more in its place (as Keras), or
            `"drop_window"` discards the whole window and keeps its boundary (as PyTorch).
        measure_gradients: bool, whether steps are measured; see `gradient_report()`.
        **kwargs: the base optimizer's arguments at their defaults, as Keras allows in old configs.

    Attributes:
        dynamic_scale: float32[], the scale of the next step.
        step_counter: int[], finite steps in a row since the scale last moved.
        steps: int32[], training steps so far, skipped ones included.
        skipped_steps: int32[], steps so far that were skipped.
        consecutive_skips: int32[], skipped steps in a row up to now.
        gradient_health: float32[num_variables, 5] or None; see `gradient_report()`.
        variable_paths: the path of the variable in each row of it.
        scale_was_read: bool, whether anything has asked for the scale so far. A training step that
            never does forgets to scale its loss.

    Raises:
        ValueError: if the inner optimizer scales the loss itself, or an argument is out of range.

    Warns:
        UserWarning: if the first step applies gradients and nothing has asked for the scale before.

    Example:

    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024), "mse")
    >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
    >>> float(model.optimizer.dynamic_scale), int(model.optimizer.skipped_steps)
    (1024.0, 0)

    Source: Micikevicius et al. 2018; skip and rescale as in torch.amp.GradScaler.
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
        **kwargs,
    ):
        rule = choose_rule(loss_scale, initial_scale, dynamic_growth_steps)
        inner_optimizer = checked_inner(inner_optimizer)
        super().__init__(inner_optimizer, float(rule.init().scale), name=name, **kwargs)
        self.loss_scale = rule
        self.dynamic_growth_steps = getattr(rule, "growth_interval", None)
        self.on_overflow = checked_choice("on_overflow", on_overflow, ON_OVERFLOW)
        self.measure_gradients = bool(measure_gradients)
        self.scale_was_read, self._warned_of_unscaled_loss = False, False
        self._forward_settings()

    @property
    def steps(self) -> Variable:
        """Training steps so far, skipped ones included; `iterations` counts the applied ones."""
        return self._iterations

    @property
    def dynamic_scale(self) -> Variable:
        """float32[], the scale of the next step. Who reads it is taken to scale the loss by it."""
        self.scale_was_read = True
        return self.scale_variable

    @dynamic_scale.setter
    def dynamic_scale(self, variable: Variable) -> None:  # Keras's `build` makes it
        self.scale_variable = variable

    @property
    def loss_scale_matters(self) -> bool:
        """Whether gradients are divided by anything but 1."""
        return not (isinstance(self.loss_scale, NoOpLossScale) or self.loss_scale == _SCALE_OF_1)

    @property
    def present_state(self) -> ScaleState:
        """The loss scale's state as tensors. Who asks here is not taken to scale the loss by it."""
        return self._state

    @property
    def scale_state(self) -> ScaleState:
        """The loss scale's state as tensors, to read or to hand to `loss_scale`."""
        self.scale_was_read = True
        return self._state

    def build(self, var_list: Sequence[Variable]) -> None:
        if self.built:
            return
        var_list = list(var_list)
        refuse_complex(var_list)
        warn_of_unscaled_float16(self.loss_scale, var_list)
        refuse_float16_on_tpu(var_list)
        # Keras's wrapper builds the inner optimizer with tracking switched off, and so loses what
        # that tracks by assigning it: Nadam's product of momenta, which is then never carried on.
        self.inner_optimizer.build(var_list)
        scale_was_read = self.scale_was_read
        with self._settings_of_a_bare_base():
            super().build(var_list)
        self.scale_was_read = scale_was_read  # TensorFlow's tracking reads what is set
        self.variable_paths = tuple(getattr(v, "path", v.name) for v in var_list)
        self._sizes = tuple(math.prod(v.shape) for v in var_list)
        self.skipped_steps = self._add("skipped_steps", dtype="int32")
        self.consecutive_skips = self._add("consecutive_skips", dtype="int32")
        self._window = None
        if self.on_overflow == "drop_window" and self.inner_optimizer.gradient_accumulation_steps:
            self._window = DroppedWindow(self)
        self._build_measurements(len(var_list))

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the present scale, in at least float32.

        On TensorFlow and PyTorch it also notes whether the loss is finite: if not, and its
        gradients therefore are not either, the scale, which is not to blame, stays.
        """
        self.scale_was_read = True
        if self.built:
            _backend.note_loss(self.loss_nonfinite, ops.logical_not(all_finite(loss)))
        state = self._state if self.built else self.loss_scale.init()
        return self.loss_scale.scale(loss, state)

    def apply(
        self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None
    ) -> None:
        """Update the variables, or nothing if any gradient is not finite.

        Args:
            grads: gradients of the *scaled* loss; tensors, arrays, `tf.IndexedSlices` or None.
            trainable_variables: their variables; those of `build` if left out.

        Raises:
            ValueError: if there is no gradient at all, not one for each variable, one of another
                shape than its variable, or a variable that the optimizer was not built with.
        """
        grads = list(grads)
        if not grads:
            return
        if not self.built:
            if trainable_variables is None:
                raise ValueError(
                    "`apply` needs `trainable_variables` when the optimizer is not built yet. "
                    "Call optimizer.build(model.trainable_variables) first, or pass them."
                )
            self.build(list(trainable_variables))
        variables = list(trainable_variables or self._trainable_variables)
        refuse_unknown(variables, lambda v: self._var_key(v) in self._trainable_variables_indices)
        grads = checked_gradients(grads, variables)
        if self.loss_scale_matters and not (self.scale_was_read or self._warned_of_unscaled_loss):
            self._warned_of_unscaled_loss = True
            warn_of_unscaled_loss()
        if not _backend.step_on_replicas(self, grads, variables):
            self.step(grads, variables)

    def loss_was_not_finite(self, before: ScaleState, nonfinite: Tensor) -> None:
        """Take back what the last step did to the scale, if its loss was not finite.

        The scale is not to blame for the gradients of such a loss. On TensorFlow and PyTorch
        `scale_loss` notes it in time; on JAX, where the loss is scaled inside a pure function,
        `kmp.protect` calls this after the step.

        Args:
            before: the state of the scale before the step; see `present_state`.
            nonfinite: bool[], whether the step was skipped and its loss was not finite.
        """
        now = self.present_state
        fewer = ops.minimum(before.finite_steps, now.finite_steps)
        steps = ops.where(nonfinite, fewer, now.finite_steps)
        self.scale_variable.assign(ops.where(nonfinite, before.scale, now.scale))
        self.step_counter.assign(ops.cast(steps, self.step_counter.dtype))
        if self.gradient_health is not None:
            events = ops.convert_to_tensor(self.overflow_events)
            self.overflow_events.assign(health.mark_loss(events, nonfinite))

    def stateless_scale_loss(self, optimizer_variables: Sequence[Tensor], loss: Tensor) -> Tensor:
        """`scale_loss` as a pure function, for JAX.

        `scale_loss` alone would bake the scale of the moment of tracing into the compiled step.

        Args:
            optimizer_variables: values of `optimizer.variables`, those that the same step hands to
                `stateless_apply`.
            loss: float[], the loss.

        Returns:
            float32[], the loss multiplied by the scale that `optimizer_variables` hold.

        Raises:
            ValueError: if the optimizer is not built, or there is not one value a variable.
        """
        if not self.built or len(optimizer_variables) != len(self.variables):
            raise ValueError(
                "`optimizer_variables` must hold one value for each of optimizer.variables. "
                f"Received: {len(optimizer_variables)} values for {len(self.variables)} variables "
                f"(built={self.built}). Write optimizer.build(model.trainable_variables) and "
                "[v.value for v in optimizer.variables] before the loop."
            )
        mapping = list(zip(self.variables, optimizer_variables, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return self.scale_loss(loss)

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Tensor],
        grads: Sequence[Gradient],
        trainable_variables: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """`apply` as a pure function, for JAX.

        Args:
            optimizer_variables: values of `optimizer.variables`.
            grads: gradients of the scaled loss.
            trainable_variables: values of the variables that the optimizer was built with.

        Returns:
            `(trainable_variables, optimizer_variables)` after the step.
        """
        # Keras's own loss scaling branches here; its base class runs `apply` in a stateless scope.
        base: Any = super(keras.optimizers.LossScaleOptimizer, self)
        return base.stateless_apply(optimizer_variables, grads, trainable_variables)

    @property
    def own_variables(self) -> list[Variable]:
        """The wrapper's variables, without those of the inner optimizer."""
        return list(self._variables)

    def save_own_variables(self, store: Any) -> None:
        checkpoint.save_own_variables(self, store)

    def load_own_variables(self, store: Any) -> None:
        checkpoint.load_own_variables(self, store)

    def state(self) -> dict[str, Any]:
        """Return the loss scale's state in the five keys of `torch.amp.GradScaler.state_dict()`."""
        return checkpoint.grad_scaler_state(self)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a GradScaler's `state_dict()`, its rule included.

        Call it before training: a step that is already compiled keeps the rule that it has.

        Raises:
            ValueError: if a key or value is not a GradScaler's, or the optimizer is not built or
                not dynamic. Nothing is changed then.
        """
        checkpoint.load_grad_scaler_state(self, state)

    def get_config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "inner_optimizer": portable_config(self.inner_optimizer),
            "loss_scale": keras.saving.serialize_keras_object(self.loss_scale),
            "on_overflow": self.on_overflow,
            "measure_gradients": self.measure_gradients,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        config = copy.deepcopy(config)  # Keras replaces what it deserialises, in place
        inner = keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(inner, **config)
