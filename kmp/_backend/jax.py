"""The JAX side of `kmp._backend`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
from jax import numpy as jnp

from kmp._backend import default
from kmp._backend.types import Device, DeviceMemory, Gradient, Tensor, Variable


def matmul_float32(x: Tensor, kernel: Tensor) -> Tensor:
    """`x @ kernel` of two half matrices, accumulated and returned in float32."""
    return jnp.matmul(x, kernel, preferred_element_type="float32")


def compiled(function: Callable) -> Callable:
    """`function` of tensors alone, as one program: JAX would compile each of its operations."""
    return jax.jit(function)


def verdict(
    number: Tensor, loss_nonfinite: Tensor, due: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The flags that everybody acts on: whether int32[] is 0, whether float32[] is, ...

    The barrier keeps XLA from copying the reductions of all gradients into each of the masked
    updates, with which the compile time would grow as the square of the number of variables. The
    CPU compiler removes it too early, but copies no reduction of two results, as `number` is of.
    """
    finite = jax.lax.optimization_barrier(number) == 0
    return finite, loss_nonfinite == 0, due


def after(finite: Tensor, sample: Tensor) -> Tensor:
    """`finite`, known only once `sample` is.

    By a dot product, which XLA's CPU compiler copies into no update.
    """
    flags = jnp.stack([jnp.logical_not(finite), jnp.dot(sample, sample) < 0])
    flags = flags.astype("float32")
    return jax.lax.optimization_barrier(jnp.dot(flags, flags)) == 0


def note_loss(variable: Variable, nonfinite: Tensor) -> None:
    """Nothing: on JAX the loss is scaled inside the differentiated function, which is pure."""


def reduce_columns(columns: tuple[Tensor, ...], axes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The maximum of the second column and the sums of the others, in one reduction of all.

    Each gradient is then read once, and the columns as such are never in memory: a reduction of
    one column XLA's CPU compiler splits into two, and writes the column for the first of them.
    """

    zeros = tuple(jnp.zeros((), x.dtype) for x in columns)
    return tuple(jax.lax.reduce(columns, zeros, _combine, axes))


# One function for all: eagerly JAX compiles a reduction again for each that it has not seen.
def _combine(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    pairs = enumerate(zip(a, b, strict=True))
    return tuple(jnp.maximum(x, y) if i == 1 else x + y for i, (x, y) in pairs)


def gradient_sample(gradient: Gradient, strides: Sequence[int]) -> Tensor:
    """The numbers of a gradient at each so many places along each axis.

    Axis by axis on TPUs, for which XLA cannot compile a slice of bfloat16 with two strides. On GPUs
    that would be a kernel an axis, and one for all variables otherwise.
    """
    if platform() != "tpu":
        return default.gradient_sample(gradient, strides)
    for axis, stride in enumerate(strides):
        if stride > 1:
            x = jax.lax.slice_in_dim(gradient, 0, None, stride, axis)
            gradient = jax.lax.optimization_barrier(x)
    return gradient


def compute_if(pred: Tensor, compute: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
    """`compute()` if `pred`, else `otherwise`; neither writes anything."""
    if not isinstance(pred, jax.core.Tracer):
        return compute() if pred else otherwise
    return jax.lax.cond(pred, compute, lambda: otherwise)


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
    # What the model does not list, as a metric that its own `metrics` leaves out, the loop has not.
    live |= {id(v): v.value for v in variables if id(v) not in live}
    return [live[id(v)] for v in variables]


def around_train_step(
    model: Any,
    train_step: Callable[..., Any],
    before: Callable[[], Any],
    after: Callable[[Any, Any], Any],
) -> Callable[..., Any]:
    """Run two functions around Keras's stateless train step; see `default.around_train_step`.

    In each of them the variables have the values of the state that the step takes or returns, and
    what `after` assigns becomes part of that.
    """

    def owned() -> tuple[list[Variable], ...]:  # in the order of the trainer's state
        return (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )

    def holding(state: Any) -> keras.StatelessScope:
        pairs = zip(owned(), state, strict=True)
        mapping = [pair for part in pairs for pair in zip(*part, strict=True)]
        return keras.StatelessScope(mapping, initialize_variables=False)

    def step(state: Any, data: Any) -> tuple[Any, Any]:
        with holding(state):
            kept = before()
        logs, state = train_step(state, data)
        with holding(state) as scope:
            logs = after(kept, logs)
        return logs, tuple([scope.get_current_value(v) for v in part] for part in owned())

    return step


def settle(model: Any) -> None:
    """Write the state that the loop of `fit` holds into the variables of the model."""
    model.jax_state_sync()


SEES_LOSS = False  # the loss is scaled inside the differentiated function, which is pure


def inside_xla() -> bool:
    """True: it compiles each operation that it does not trace."""
    return True


def compiled_for() -> str | None:
    """What XLA compiles for: "cpu", "gpu" or "tpu"."""
    return platform()


def platform() -> str:
    """Where the training runs: "cpu", "gpu" or "tpu"."""
    return jax.default_backend()


def device() -> Device:
    """The first device of this process."""
    first = jax.local_devices()[0]
    major, _, minor = str(getattr(first, "compute_capability", "")).partition(".")
    nvidia = major.isdigit() and minor.isdigit()  # AMD's are called gfx90a and the like
    return Device(platform(), first.device_kind, (int(major), int(minor)) if nvidia else None)


def device_memory() -> DeviceMemory | None:
    """None: JAX cannot forget a peak; `compiled_step_bytes` asks XLA instead."""
    return None


def custom_gradient(
    forward: Callable[..., Sequence[Tensor]],
    backward: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor],
) -> Sequence[Tensor]:
    """`forward(*inputs)`, differentiated by `backward`.

    Args:
        forward: returns a tuple of tensors; all but the first are kept for the backward pass.
        backward: from the inputs, what was kept and the gradients of all of the tensors, those of
            the inputs: one each, or None.
        inputs: tensors, kept for the backward pass.
    """

    def run(*inputs):
        outputs = tuple(forward(*inputs))
        return outputs, (inputs, outputs[1:])

    function = jax.custom_vjp(lambda *inputs: run(*inputs)[0])
    function.defvjp(run, lambda kept, gradients: tuple(backward(*kept, gradients)))
    return function(*inputs)
