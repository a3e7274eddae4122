"""A primitive of JAX for functions that are traced once the target of a program is known."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from kmp._backend.types import Tensor

# By JAX's name of a compiler, the target that it compiles for.
_TARGETS = {"cpu": "cpu", "tpu": "tpu", "cuda": "gpu", "rocm": "gpu"}

# `jax.lax.platform_dependent` would trace the function for each target in every program.
PER_TARGET = Primitive("kmp_per_target")
PER_TARGET.multiple_results = True


@PER_TARGET.def_abstract_eval
def _(*_: Any, function: Callable, shapes: tuple) -> list:
    return [jax.core.ShapedArray(shape, jax.numpy.dtype("float32")) for shape in shapes]


@PER_TARGET.def_impl
def _(*tensors: Tensor, function: Callable, shapes: tuple) -> Sequence[Tensor]:
    """Run at once: `jax.grad` or `jax.vmap` of an eager step."""
    return function(jax.default_backend(), *tensors)


def _lower(context: Any, *operands: Any, function: Callable, shapes: tuple, target: str) -> Any:
    lowered = mlir.lower_fun(functools.partial(function, target), multiple_results=True)
    return lowered(context, *operands)


def _batch(
    tensors: Sequence[Tensor], axes: Sequence[Any], *, function: Callable, shapes: tuple
) -> tuple[Sequence[Tensor], Sequence[int]]:
    """Support `jax.vmap` over steps, as for an ensemble."""

    def each(target: str, *tensors: Tensor) -> Sequence[Tensor]:
        return jax.vmap(functools.partial(function, target), tuple(axes))(*tensors)

    pairs = zip(tensors, axes, strict=True)
    size = next(x.shape[axis] for x, axis in pairs if axis is not None)
    found = PER_TARGET.bind(
        *tensors, function=each, shapes=tuple((size, *shape) for shape in shapes)
    )
    return found, [0] * len(shapes)


def _jvp(primals: Sequence[Tensor], _: Any, **parameters: Any) -> tuple[list, list]:
    """Support `jax.grad` through a step, as in meta-learning; measurements count as constants."""
    found = PER_TARGET.bind(*primals, **parameters)
    return found, [jnp.zeros_like(x) for x in found]


batching.primitive_batchers[PER_TARGET] = _batch
ad.primitive_jvps[PER_TARGET] = _jvp

for _platform, _target in _TARGETS.items():
    mlir.register_lowering(
        PER_TARGET, functools.partial(_lower, target=_target), platform=_platform
    )
