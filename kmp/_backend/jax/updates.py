"""How an optimizer updates variables on JAX in a step that may be skipped."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import keras
from jax import numpy as jnp

from kmp._backend import base
from kmp._backend.types import Tensor, Variable


class _MaskedScope(keras.StatelessScope):
    """A scope in which assigning keeps the old value where `keep` is False.

    The select then fuses into the update that it guards. A `lax.cond` around the update costs some
    30 bytes moved a parameter on GPUs and stays a conditional on TPUs.
    """

    def __init__(self, keep: Tensor):
        super().__init__()
        self.keep = keep
        self.updated: dict[int, Variable] = {}

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        if value is None and self.original_scope is not None:
            value = self.original_scope.get_current_value(variable)
        return value

    def add_update(self, update):
        variable, value = update
        self.updated[id(variable)] = variable
        super().add_update((variable, jnp.where(self.keep, value, variable.value)))

    def __exit__(self, *args, **kwargs):
        super().__exit__(*args, **kwargs)
        for variable in self.updated.values():
            variable.assign(self.state_mapping[id(variable)])


def update_if(keep: Tensor, inner: Any, gradients: list[Tensor], variables: list[Variable]) -> None:
    """Let `inner` update the variables if `keep`."""
    if not isinstance(keep, jax.core.Tracer):
        if keep:
            inner.apply(gradients, variables)
        return
    with _MaskedScope(keep), _accumulating_by_selects(inner):
        inner.apply(gradients, variables)


def _accumulating_by_selects(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """Within, a Keras optimizer that accumulates gradients does so without a conditional.

    Keras computes the update in every micro-batch and chooses with `lax.cond`, whose operands XLA
    copies: all parameters and slots. A moving average of the weights stays with Keras.
    """
    keras_own = keras.optimizers.Optimizer._backend_apply_gradients
    is_kerass = type(optimizer)._backend_apply_gradients is keras_own
    if optimizer.gradient_accumulation_steps and not optimizer.use_ema and is_kerass:
        return base.applying_by(optimizer, functools.partial(_accumulate, optimizer))
    return contextlib.nullcontext()


def _accumulate(optimizer: Any, gradients: Sequence[Tensor], variables: Sequence[Variable]) -> None:
    """Add to the accumulators; the last micro-batch of a window updates with their mean instead."""
    steps = optimizer.gradient_accumulation_steps
    is_last = (optimizer._iterations.value + 1) % steps == 0
    places = [optimizer._get_variable_index(v) for v in variables]
    accumulators = [optimizer._accumulated_gradients[i] for i in places]
    sums = [g + a.value for g, a in zip(gradients, accumulators, strict=True)]
    with _MaskedScope(is_last):
        base.update(optimizer, [x / steps for x in sums], variables)
    for accumulator, value in zip(accumulators, sums, strict=True):
        accumulator.assign(jnp.where(is_last, 0, value))
