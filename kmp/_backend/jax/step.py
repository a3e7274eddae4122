"""How the parts of a step run on JAX: per target, and kept from writing where it is skipped."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from kmp._backend import default
from kmp._backend.one_device import OneReplica
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


def run_step(
    step: Callable[..., None],
    gradients: list[Tensor],
    variables: list[Variable],
    inner: Any,
    loss_nonfinite: Variable,
) -> None:
    # One program spans all devices.
    step(_one_replica, gradients, variables)


def _update_if(
    keep: Tensor, inner: Any, gradients: list[Tensor], variables: list[Variable]
) -> None:
    if not isinstance(keep, jax.core.Tracer):
        if keep:
            inner.apply(gradients, variables)
        return
    with _MaskedScope(keep), _accumulating_by_selects(inner):
        inner.apply(gradients, variables)


_one_replica = OneReplica(_update_if)


def _accumulating_by_selects(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """Within, a Keras optimizer that accumulates gradients does so without a conditional.

    Keras computes the update in every micro-batch and chooses with `lax.cond`, whose operands XLA
    copies: all parameters and slots. A moving average of the weights stays with Keras.
    """
    keras_own = keras.optimizers.Optimizer._backend_apply_gradients
    is_kerass = type(optimizer)._backend_apply_gradients is keras_own
    if optimizer.gradient_accumulation_steps and not optimizer.use_ema and is_kerass:
        return default.applying_by(optimizer, functools.partial(_accumulate, optimizer))
    return contextlib.nullcontext()


def _accumulate(optimizer: Any, gradients: Sequence[Tensor], variables: Sequence[Variable]) -> None:
    """Add to the accumulators; the last micro-batch of a window updates with their mean instead."""
    steps = optimizer.gradient_accumulation_steps
    is_last = (optimizer._iterations.value + 1) % steps == 0
    places = [optimizer._get_variable_index(v) for v in variables]
    accumulators = [optimizer._accumulated_gradients[i] for i in places]
    sums = [g + a.value for g, a in zip(gradients, accumulators, strict=True)]
    with _MaskedScope(is_last):
        default.update(optimizer, [x / steps for x in sums], variables)
    for accumulator, value in zip(accumulators, sums, strict=True):
        accumulator.assign(jnp.where(is_last, 0, value))


# JAX's names of its compilers, and what a device of theirs is called here.
_TARGETS = {"cpu": "cpu", "tpu": "tpu", "cuda": "gpu", "rocm": "gpu"}

# `jax.lax.platform_dependent` would trace the function for each target in every program.
_per_target = Primitive("kmp_per_target")
_per_target.multiple_results = True


def per_target(
    function: Callable[..., Sequence[Tensor]], shapes: Sequence[tuple[int, ...]], *tensors: Tensor
) -> Sequence[Tensor]:
    if not any(isinstance(x, jax.core.Tracer) for x in tensors):
        return function(jax.default_backend(), *tensors)
    tensors = tuple(map(jax.numpy.asarray, tensors))
    return _per_target.bind(*tensors, function=function, shapes=tuple(shapes))


@_per_target.def_abstract_eval
def _(*_: Any, function: Callable, shapes: tuple) -> list:
    return [jax.core.ShapedArray(shape, jax.numpy.dtype("float32")) for shape in shapes]


@_per_target.def_impl
def _(*tensors: Tensor, function: Callable, shapes: tuple) -> Sequence[Tensor]:
    """Where `jax.grad` or `jax.vmap` of a step is not compiled."""
    return function(jax.default_backend(), *tensors)


def _lower(context: Any, *operands: Any, function: Callable, shapes: tuple, target: str) -> Any:
    lowered = mlir.lower_fun(functools.partial(function, target), multiple_results=True)
    return lowered(context, *operands)


def _batch(
    tensors: Sequence[Tensor], axes: Sequence[Any], *, function: Callable, shapes: tuple
) -> tuple[Sequence[Tensor], Sequence[int]]:
    """`jax.vmap` over steps, as for an ensemble."""

    def each(target: str, *tensors: Tensor) -> Sequence[Tensor]:
        return jax.vmap(functools.partial(function, target), tuple(axes))(*tensors)

    pairs = zip(tensors, axes, strict=True)
    size = next(x.shape[axis] for x, axis in pairs if axis is not None)
    found = _per_target.bind(
        *tensors, function=each, shapes=tuple((size, *shape) for shape in shapes)
    )
    return found, [0] * len(shapes)


def _jvp(primals: Sequence[Tensor], _: Any, **parameters: Any) -> tuple[list, list]:
    """`jax.grad` through a step, as in meta-learning: what is looked at is constant there."""
    found = _per_target.bind(*primals, **parameters)
    return found, [jnp.zeros_like(x) for x in found]


batching.primitive_batchers[_per_target] = _batch
ad.primitive_jvps[_per_target] = _jvp

for _platform, _target in _TARGETS.items():
    mlir.register_lowering(
        _per_target, functools.partial(_lower, target=_target), platform=_platform
    )
