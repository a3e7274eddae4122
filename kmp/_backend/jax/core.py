"""The JAX side of `kmp._backend`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from jax import numpy as jnp
from keras import ops

from kmp._backend import default
from kmp._backend.types import Device, DeviceMemory, Gradient, Tensor, Variable


def matmul_float32(x: Tensor, kernel: Tensor) -> Tensor:
    return jnp.matmul(x, kernel, preferred_element_type="float32")


def constant(values: Any) -> Tensor:
    return jax.device_put(values)  # `jnp.asarray` and Keras's conversion are programs


def bitcast(x: Tensor, dtype: str) -> Tensor:
    return jax.lax.bitcast_convert_type(x, dtype)


def compiled(function: Callable, static: Sequence[int] = ()) -> Callable:
    # JAX would compile each of its operations.
    return jax.jit(function, static_argnums=tuple(static))


def flags(
    number: Tensor, loss_nonfinite: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    # The barrier keeps XLA from copying the reductions of all gradients into each masked update,
    # with which the compile time would grow as the square of the number of variables. The CPU
    # compiler removes it too early, but does not copy a reduction of two results, which `number`
    # comes from. What is not compiled is read by the host in any case, which then acts on it.
    read = (number, loss_nonfinite, others)
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree_util.tree_leaves(read)):
        number, loss_nonfinite, others = jax.device_get(read)
        return number == 0, loss_nonfinite == 0, others
    return jax.lax.optimization_barrier(number) == 0, loss_nonfinite == 0, others


def after(finite: Tensor, sample: Tensor) -> Tensor:
    # By a dot product, which XLA's CPU compiler copies into no update.
    if is_concrete(finite):
        return finite
    flags = jnp.stack([jnp.logical_not(finite), jnp.dot(sample, sample) < 0])
    flags = flags.astype("float32")
    return jax.lax.optimization_barrier(jnp.dot(flags, flags)) == 0


def note_loss(variable: Variable, is_finite: Callable[[], Tensor]) -> None:
    """The loss is scaled inside the differentiated function, which is pure."""


def reduce_columns(columns: tuple[Tensor, ...], axes: tuple[int, ...]) -> tuple[Tensor, ...]:
    # XLA's CPU compiler splits a reduction of one column in two, and writes the column between
    # them.

    zeros = tuple(jnp.zeros((), x.dtype) for x in columns)
    return tuple(jax.lax.reduce(columns, zeros, _combine, axes))


# One function for all: eagerly JAX compiles a reduction again for each that it has not seen.
def _combine(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    pairs = enumerate(zip(a, b, strict=True))
    return tuple(jnp.maximum(x, y) if i == 1 else x + y for i, (x, y) in pairs)


def gradient_sample(gradient: Gradient, strides: Sequence[int], target: str) -> Tensor:
    # XLA cannot compile a slice of bfloat16 with two strides for TPUs, so it is taken axis by axis
    # there. On GPUs that would be a kernel an axis, where one kernel serves all variables.
    if target != "tpu":
        return default.gradient_sample(gradient, strides, target)
    for axis, stride in enumerate(strides):
        if stride > 1:
            x = jax.lax.slice_in_dim(gradient, 0, None, stride, axis)
            gradient = jax.lax.optimization_barrier(x)
    return gradient


def compute_if(pred: Tensor, compute: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
    if is_concrete(pred):
        return compute() if pred else otherwise
    return jax.lax.cond(pred, compute, lambda: otherwise)


def read(model: Any, variables: list[Variable], each: bool = False) -> list[Tensor]:
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


class _Pieces(NamedTuple):
    """What this process holds of an array that lies across processes, by place in the whole."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    by_place: dict[tuple, np.ndarray]


def _place(index: Any) -> tuple:
    return tuple((s.start, s.stop) for s in index)


def to_host(x: Tensor | Variable) -> Any:
    """A copy on the host; of an array across processes the pieces that this process holds."""
    x = ops.convert_to_tensor(x)
    if x.is_fully_addressable:
        return default.to_host(x)
    pieces = {_place(shard.index): shard.data for shard in x.addressable_shards}
    by_place = {place: np.array(piece) for place, piece in pieces.items()}
    return _Pieces(x.shape, x.sharding, by_place)


def from_host(variable: Variable, value: Any) -> None:
    """Assign what `to_host` returned for this variable, or for a value of it.

    Pieces are assigned without asking the other processes. A whole array would be compared with
    theirs, and JAX takes NaN for a difference.
    """
    if isinstance(value, _Pieces):
        shape, sharding, by_place = value
        value = jax.make_array_from_callback(shape, sharding, lambda i: by_place[_place(i)])
    variable.assign(value)


def writes_logs(model: Any) -> bool:
    """Whether this process writes for all that train one model together: process 0 does."""
    alone = keras.distribution.distribution() is None  # then each process has its own model
    return alone or jax.process_index() == 0


def around_train_step(
    model: Any,
    train_step: Callable[..., Any],
    before: Callable[[], Any],
    after: Callable[[Any, Any], Any],
) -> Callable[..., Any]:
    # In each of the two the variables have the values of the state that the step takes or returns,
    # and what `after` assigns becomes part of that.

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
    model.jax_state_sync()


SEES_LOSS = False  # the loss is scaled inside the differentiated function, which is pure


def inside_xla() -> bool:
    # JAX compiles each operation that it does not trace.
    return True


def is_concrete(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer)


def platform() -> str:
    return jax.default_backend()


def device() -> Device:
    first = jax.local_devices()[0]
    major, _, minor = str(getattr(first, "compute_capability", "")).partition(".")
    nvidia = major.isdigit() and minor.isdigit()  # AMD's are called gfx90a and the like
    return Device(platform(), first.device_kind, (int(major), int(minor)) if nvidia else None)


def device_memory() -> DeviceMemory | None:
    # JAX cannot forget a peak; `compiled_step_bytes` asks XLA instead.
    return None


def custom_gradient(
    forward: Callable[..., Sequence[Tensor]],
    backward: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor],
) -> Sequence[Tensor]:

    def run(*inputs):
        outputs = tuple(forward(*inputs))
        return outputs, (inputs, outputs[1:])

    function = jax.custom_vjp(lambda *inputs: run(*inputs)[0])
    function.defvjp(run, lambda kept, gradients: tuple(backward(*kept, gradients)))
    return function(*inputs)
