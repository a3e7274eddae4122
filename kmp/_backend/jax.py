"""The JAX side of `kmp._backend`."""

from collections.abc import Callable
from typing import Any

import jax
import keras
from jax import numpy as jnp

from kmp._types import Device, Gradient, Tensor, Variable


def matmul_float32(x: Tensor, kernel: Tensor) -> Tensor:
    """`x @ kernel` of two half matrices, accumulated and returned in float32."""
    return jnp.matmul(x, kernel, preferred_element_type="float32")


def all_reduce_sum(x: Tensor) -> Tensor:
    """`x` itself: on JAX one program spans the devices, and its sums do too."""
    return x


def verdict(nonfinite: Tensor) -> Tensor:
    """The flag that everybody acts on: bool[], whether all of float32[n] counts are 0.

    The dot product keeps XLA from copying the reductions of all gradients into each of the masked
    updates, with which the compile time would grow as the square of the number of variables. An
    optimization barrier does so on accelerators, but the CPU compiler removes it too early.
    """
    return jax.lax.optimization_barrier(jnp.dot(nonfinite, nonfinite)) == 0


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


def apply_if(finite: Tensor, update: Callable[[], None], variables: list[Variable]) -> None:
    """Run `update`, whose assignments to any variable hold only if `finite`."""
    with _MaskedScope(finite):
        update()


def step_on_replicas(optimizer: Any, gradients: list[Gradient], variables: list[Variable]) -> bool:
    """False: on JAX one program spans the devices, and its gradients are the reduced ones."""
    return False


def read(model: Any, variables: list[Variable]) -> list[Tensor]:
    """The present values of variables of `model`, without writing all of its state back.

    Args:
        model: the `keras.Model` being trained. While `fit` runs its state lives in the loop, and
            asking a variable would synchronise and re-collect every variable.
        variables: variables of the model, its optimizer or its metrics.
    """
    state = getattr(model, "_jax_state", None)
    if not state or model._jax_state_synced:
        return [v.value for v in variables]
    live: dict[int, Tensor] = {}
    for key, owned in (
        ("optimizer_variables", lambda: model.optimizer.variables),
        ("metrics_variables", lambda: model.metrics_variables),
        ("trainable_variables", lambda: model.trainable_variables),
        ("non_trainable_variables", lambda: model.non_trainable_variables),
    ):
        if all(id(v) in live for v in variables):
            break  # collecting a large model's variables takes milliseconds
        values = state.get(key)
        if values:
            live |= {id(v): x for v, x in zip(owned(), values, strict=True)}
    return [live[id(v)] for v in variables]


def restore_after_skip(
    model: Any, train_step: Callable, undone_of: Callable[[Any], list[Variable]]
) -> Callable:
    """Wrap Keras's stateless train step: a skipped one returns `undone_of(model)` as it came."""

    def step(state, data):
        logs, new_state = train_step(state, data)
        skipped_steps = [id(v) for v in model.optimizer.variables].index(
            id(model.optimizer.skipped_steps)
        )
        applied = new_state[2][skipped_steps] == state[2][skipped_steps]
        undone = {id(v) for v in undone_of(model)}

        def kept(variables, new_values, old_values):
            return [
                jnp.where(applied, new, old) if id(v) in undone else new
                for v, new, old in zip(variables, new_values, old_values, strict=True)
            ]

        non_trainable = kept(model.non_trainable_variables, new_state[1], state[1])
        metrics = kept(model.metrics_variables, new_state[3], state[3])
        return logs, (new_state[0], non_trainable, new_state[2], metrics)

    return step


def platform() -> str:
    """Where the training runs: "cpu", "gpu" or "tpu"."""
    return jax.default_backend()


def device() -> Device:
    """The first device of this process."""
    first = jax.local_devices()[0]
    major, _, minor = str(getattr(first, "compute_capability", "")).partition(".")
    nvidia = major.isdigit() and minor.isdigit()  # AMD's are called gfx90a and the like
    return Device(platform(), first.device_kind, (int(major), int(minor)) if nvidia else None)
