"""What the wrapper leaves to the optimizer inside it, its accumulation, and its learning rates."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from keras import ops

from kmp._backend.types import Tensor, Variable
from kmp._keras.optimizer import (
    BaseLossScaleOptimizer,
    accumulators_of,
    is_several,
    own_the_averages,
    parts_of,
    rate_of_last_step,
    refuse_settings,
    steps_of,
    trainable_variables_of,
)
from kmp.half_memory import HalfMemory, Stored, build_inner
from kmp.precision.trees import as_number

ON_OVERFLOW = ("drop_micro_batch", "drop_window")


def _inner_setting(name: str, neutral: Any) -> Any:
    """A setting that is read from, and written to, the inner optimizer.

    On Keras's LossScaleOptimizer `clipnorm` is None and `use_ema` is False, whatever the inner
    optimizer has.

    Args:
        name: of the attribute.
        neutral: the value that Keras's base class sees in `build`, so that it does not create
            averages and accumulators a second time.
    """

    def read(optimizer: Any) -> Any:
        if not _has_inner(optimizer) or optimizer.builds_base:
            return neutral
        return getattr(optimizer.inner_optimizer, name)

    def write(optimizer: Any, value: Any) -> None:
        if _has_inner(optimizer):  # Keras's constructor sets its own defaults before
            setattr(optimizer.inner_optimizer, name, value)

    return property(read, write)


def _has_inner(optimizer: Any) -> bool:
    return "inner_optimizer" in vars(optimizer)


class WrapsInner(BaseLossScaleOptimizer):
    """Keras's LossScaleOptimizer, corrected where it leaves things to its inner optimizer."""

    weight_decay: float | None = _inner_setting("weight_decay", None)
    clipnorm: float | None = _inner_setting("clipnorm", None)
    global_clipnorm: float | None = _inner_setting("global_clipnorm", None)
    clipvalue: float | None = _inner_setting("clipvalue", None)
    use_ema: bool = _inner_setting("use_ema", False)
    ema_momentum: float = _inner_setting("ema_momentum", 0.99)
    ema_overwrite_frequency: int | None = _inner_setting("ema_overwrite_frequency", None)
    gradient_accumulation_steps: int | None = _inner_setting("gradient_accumulation_steps", None)
    builds_base = False  # True while Keras's base class builds itself
    half_memory: HalfMemory  # how variables in half precision are updated
    stored: Stored | None = None  # how they are held; None if none is, or before `build`
    rounding_seed: Variable | None = None

    def __init__(self, inner_optimizer: Any, initial_scale: float, **kwargs: Any):
        refuse_settings(kwargs)
        super().__init__(inner_optimizer, initial_scale, **kwargs)

    def moves_rarely(self, variable: Variable) -> bool:
        """Whether a small update leaves most elements of a variable unchanged; see `HalfMemory`."""
        return self.rounding_seed is not None and self.half_memory.moves_rarely(variable.dtype)

    def build(self, var_list: Sequence[Variable]) -> None:
        # Keras's class would build the inner optimizer with tracking switched off. A variable that
        # is tracked when it is assigned, as Nadam's product of momenta, would never be carried on.
        self.stored = build_inner(
            self.inner_optimizer, var_list, self.half_memory, self.add_counter
        )
        self.rounding_seed = self.stored and self.stored.seed
        self.builds_base = True
        try:
            super().build(var_list)
        finally:
            self.builds_base = False

    def add_counter(
        self,
        name: str,
        shape: tuple[int, ...] = (),
        dtype: str = "float32",
        initializer: Callable[..., Tensor] | None = None,
    ) -> Variable:
        """Create a variable of the wrapper, which begins at zero unless there is an initializer."""
        return self.add_variable(
            shape=shape,
            dtype=dtype,
            initializer=initializer or _zeros,
            aggregation="none",
            name=name,
        )

    def add_counter_of_replicas(self, name: str) -> Variable:
        """Create an int32 counter of 0 that the replicas of a strategy may assign, all alike."""
        return self.add_variable(
            shape=(),
            dtype="int32",
            initializer=_zeros,
            aggregation="only_first_replica",
            name=name,
        )

    def finalize_variable_values(self, var_list: list[Variable]) -> None:
        """At the end of `fit`: write the moving averages of the weights, if any, into them."""
        self.inner_optimizer.finalize_variable_values(var_list)
        for part in parts_of(self.inner_optimizer):
            if part.built:
                own_the_averages(part)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Keep variables from weight decay; see `keras.optimizers.Optimizer`."""
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)


class DroppedWindow:
    """`on_overflow="drop_window"`: one overflow discards the whole window; its boundary stays.

    What was accumulated is cleared, `iterations` returns to the beginning of the window, and the
    micro-batches that are left in the window do not count, as with `torch.amp.GradScaler` when
    `step` is called once for several `backward`.

    Args:
        inner: a built Keras optimizer that accumulates gradients.
        add: creates a variable of the optimizer.
    """

    def __init__(self, inner: Any, add: Callable[..., Variable]):
        self._inner = inner
        self._length = int(inner.gradient_accumulation_steps)
        # Micro-batches of this window so far, and 1 if one of them has overflowed.
        self.position = add("window_position", dtype="int32")
        self.dropped = add("window_dropped", dtype="int32")

    def admits(self) -> Tensor:
        """bool[]: whether no micro-batch of this window has overflowed so far."""
        return ops.equal(self.dropped, 0)

    def record(self, finite: Tensor) -> None:
        """Clear the window after an overflow, and move on to the next micro-batch."""
        overflow = ops.logical_not(finite)
        for accumulator in accumulators_of(self._inner):
            value = ops.convert_to_tensor(accumulator)
            accumulator.assign(ops.where(overflow, ops.zeros_like(value), value))
        iterations = ops.convert_to_tensor(steps_of(self._inner))
        start = iterations - iterations % self._length
        steps_of(self._inner).assign(ops.where(overflow, start, iterations))
        dropped = ops.logical_or(overflow, ops.logical_not(self.admits()))
        position = (ops.convert_to_tensor(self.position) + 1) % self._length
        self.position.assign(position)
        self.dropped.assign(ops.cast(ops.logical_and(dropped, position > 0), "int32"))


def _zeros(shape: Sequence[int], dtype: str) -> Tensor:
    """Zeros from the host: Keras's own would compile a program for each shape on JAX."""
    return ops.convert_to_tensor(np.zeros(shape, dtype))


def learning_rates(optimizer: Any) -> dict[str, float]:
    """The learning rate, or those of a `keras.optimizers.MultiOptimizer`, as Keras names them.

    Args:
        optimizer: `kmp.LossScaleOptimizer`.

    Example:

    >>> learning_rates(kmp.scaled("sgd", learning_rate=0.5))
    {'learning_rate': 0.5}
    """
    inner = optimizer.inner_optimizer
    if not is_several(inner):
        return {"learning_rate": _rate(inner)}
    return {f"learning_rate_{part.name}": _rate(part) for part in parts_of(inner)}


def highest_rate(optimizer: Any, paths: Collection[str]) -> float:
    """The highest learning rate of any of the variables with these paths, in the last step.

    Args:
        optimizer: `kmp.LossScaleOptimizer`, built.
        paths: of at least one of its variables.
    """
    parts = [x for x in parts_of(optimizer) if x.built]
    return max(
        as_number(rate_of_last_step(each))
        for each in parts
        if any(v.path in paths for v in trainable_variables_of(each))
    )


def weight_decay(optimizer: Any) -> float:
    """The largest share of a weight that weight decay takes in a step; 0 without it."""
    return max(_rate(x) * x.weight_decay if x.weight_decay else 0.0 for x in parts_of(optimizer))


def _rate(optimizer: Any) -> float:
    return as_number(optimizer.learning_rate)
