"""What a replay in the debugging tools asks of JAX."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
from jax import numpy as jnp

from kmp._backend.jax.core import is_concrete
from kmp._backend.types import Gradient, Tensor, Tree, Variable

_LOOPS = ("fori_loop", "map", "scan", "while_loop")


def watch_gradient(x: Tensor, record: Callable[[Tensor], None]) -> Tensor:

    @jax.custom_vjp
    def identity(x):
        return x

    def backward(_, gradient):
        if is_concrete(gradient) and gradient.dtype != jax.dtypes.float0:
            record(gradient)
        return (gradient,)

    identity.defvjp(lambda x: (x, None), backward)
    return identity(x)


def gradients(
    loss: Callable[[], Tensor], variables: list[Variable]
) -> tuple[Tensor, list[Gradient]]:

    def function(values):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
            return loss()

    value, pull_back = jax.vjp(function, [v.value for v in variables])
    return value, pull_back(jnp.ones_like(value))[0]


@contextlib.contextmanager
def without_functions() -> Iterator[None]:
    # Loops stay compiled, since eagerly each of their steps is a dispatch of its own.
    loops = {name: getattr(jax.lax, name) for name in _LOOPS}
    try:
        for name, loop in loops.items():
            setattr(jax.lax, name, jax.disable_jit(False)(loop))
        with jax.disable_jit():
            yield
    finally:
        for name, loop in loops.items():
            setattr(jax.lax, name, loop)


def random_state() -> Callable[[], None]:
    # JAX's random functions have no state.
    return lambda: None


def compiled_bytes(model: Any, specs: list, loss: Callable[[list[Tensor]], Tensor]) -> int | None:

    def step(trained, others, inputs):
        def function(values):
            mapping = list(zip(model.trainable_variables, values, strict=True))
            mapping += list(zip(model.non_trainable_variables, others, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return loss(inputs)

        return jax.grad(function)(trained)

    def spec(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    arguments = (
        [spec(v.shape, v.dtype) for v in model.trainable_variables],
        [spec(v.shape, v.dtype) for v in model.non_trainable_variables],
        [spec(*each) for each in specs],
    )
    analysis = jax.jit(step).lower(*arguments).compile().memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


def compiled_step_bytes(model: Any, x: Tree, y: Tree) -> int | None:

    def spec(value):
        return jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype))

    owners = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([spec(v.value) for v in variables] for variables in owners)
    step = jax.jit(model.train_step, donate_argnums=0)
    analysis = step.lower(state, jax.tree.map(spec, (x, y))).compile().memory_analysis()
    if analysis is None:
        return None
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes  # written in place
    return int(analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes)
