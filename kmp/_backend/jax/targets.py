"""Functions that JAX traces for the target that a program is compiled for, once it is lowered."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from kmp._backend.types import Tensor

# JAX's names of its compilers, and what a device of theirs is called here.
_TARGETS = {"cpu": "cpu", "tpu": "tpu", "cuda": "gpu", "rocm": "gpu"}

# `jax.lax.platform_dependent` would trace the function for each target in every program.
_per_target = Primitive("kmp_per_target")
_per_target.multiple_results = True


def per_target(
    function: Callable[..., Sequence[Tensor]], shapes: Sequence[tuple[int, ...]], *tensors: Tensor
) -> Sequence[Tensor]:
    """See `Backend.per_target`."""
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
