"""What most backends have in common; each backend's own files replace what differs."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras import ops

from kmp._backend.types import Gradient, Tensor, Tree, Variable


def compiled(function: Callable) -> Callable:
    """`function` itself: its operations are there already."""
    return function


def without_functions() -> contextlib.AbstractContextManager[None]:
    """A context that changes nothing: no function is compiled and kept behind a model's back."""
    return contextlib.nullcontext()


def inside_xla() -> bool:
    """False: every operation runs by itself."""
    return False


def preserved(variable: Variable) -> Callable[[], None]:
    """Keep the value of a variable as stored; call the result to put it back."""
    value = ops.copy(variable._value)  # `value` may be autocast
    return lambda: variable.assign(value)


def compiled_for() -> str | None:
    """None: XLA compiles nothing here."""
    return None


def all_reduce_sum(x: Tensor) -> Tensor:
    """`x` itself: on JAX one program spans the devices; on torch Keras refuses such statistics."""
    return x


def after(finite: Tensor, sample: Tensor) -> Tensor:
    """`finite`: things happen in the order of the calls."""
    return finite


def apply(optimizer: Any, gradients: list[Gradient], variables: list[Variable]) -> None:
    """Let a Keras optimizer update the variables."""
    optimizer.apply(gradients, variables)


@contextlib.contextmanager
def applying_by(optimizer: Any, apply_gradients: Callable[..., None]) -> Iterator[None]:
    """Within, a Keras optimizer's `apply` calls this with gradients and variables to update by."""
    optimizer._backend_apply_gradients = apply_gradients
    try:
        yield
    finally:
        del optimizer._backend_apply_gradients


def gradient_values(gradient: Gradient) -> Tensor:
    """The numbers of a gradient, which is dense."""
    return gradient


gradient_rows = gradient_values


def gradient_sample(gradient: Gradient, strides: Sequence[int]) -> Tensor:
    """The numbers of a gradient at each so many places along each axis."""
    if set(strides) <= {1}:
        return gradient  # without indexing, which takes its time to trace
    return gradient[tuple(slice(None, None, stride) for stride in strides)]


def map_gradient_values(function: Callable[[Tensor], Tensor], gradient: Gradient) -> Gradient:
    """Apply an elementwise function to the numbers of a gradient."""
    return function(gradient)


def reduce_columns(columns: tuple[Tensor, ...], axes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The maximum of the second column and the sums of the others, one after another."""
    pairs = enumerate(columns)
    return tuple(ops.max(x, axes, initial=0) if i == 1 else ops.sum(x, axes) for i, x in pairs)


def are_finite(tensors: Sequence[Tensor], by_row: Sequence[bool]) -> Tensor:
    """Whether all numbers of each tensor, or of each of its rows, are finite.

    Args:
        tensors: of floats; at least one.
        by_row: for each, whether it is a matrix whose rows are asked for one by one.

    Returns:
        bool[n], one for each tensor or row, in their order.
    """
    pairs = zip(tensors, by_row, strict=True)
    flags = [ops.all(ops.isfinite(x), axis=1 if rows else None) for x, rows in pairs]
    return ops.concatenate([ops.reshape(x, (-1,)) for x in flags])


def multiply(gradients: Sequence[Gradient], factor: Tensor) -> Sequence[Gradient]:
    """Each gradient, of float32 or wider, times a scalar."""
    return [ops.multiply(x, factor) for x in gradients]


def step_on_replicas(optimizer: Any, gradients: list[Gradient], variables: list[Variable]) -> bool:
    """False: the gradients are the reduced ones, on JAX and under DistributedDataParallel."""
    return False


def read(model: Any, variables: list[Variable]) -> list[Tensor]:
    """The present values of variables of `model`, its optimizer or its metrics."""
    return [v.value for v in variables]


def around_train_step(
    model: Any,
    train_step: Callable[..., Any],
    before: Callable[[], Any],
    after: Callable[[Any, Any], Any],
) -> Callable[..., Any]:
    """Run two functions around Keras's train step, in the same compiled program.

    Both read and assign the variables of the model, its optimizer and its metrics, as ordinary
    Keras code does.

    Args:
        model: `keras.Model`, compiled.
        train_step: its train step, with the signature that the backend's trainer calls.
        before: called first; what it returns is handed to `after`.
        after: called with that and with the logs of the train step; returns the logs.

    Returns:
        A train step with the same signature.
    """

    def step(data: Any) -> Any:
        kept = before()
        return after(kept, train_step(data))

    return step


def kept_values(variables: Sequence[Variable]) -> list[Tensor]:
    """The present values of variables, which later assignments do not change."""
    return [v.value for v in variables]


def keep_old_unless(applied: Tensor, variables: Sequence[Variable], old: Sequence[Tensor]) -> None:
    """Give each variable its old value back unless `applied`, a bool[]."""
    for variable, value in zip(variables, old, strict=True):
        variable.assign(ops.where(applied, variable.value, value))


def settle(model: Any) -> None:
    """Nothing: the variables of a model that trains hold its state."""


END_OF_DATA: tuple[type[Exception], ...] = (StopIteration,)  # raised by a train function
SEES_LOSS = True  # whether the optimizer is told of a loss that is not finite before it steps


def fused_batch_norm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    axis: int,
    epsilon: float,
    otherwise: Callable[[], Sequence[Tensor]],
) -> Sequence[Tensor]:
    """`otherwise()`: only TensorFlow has a kernel outside XLA that reads half precision alone."""
    return otherwise()


def compiled_bytes(model: Any, specs: list, loss: Callable[[list[Tensor]], Tensor]) -> int | None:
    """None: this backend has no compiler that says."""
    return None


def compiled_step_bytes(model: Any, x: Tree, y: Tree) -> int | None:
    """None: this backend has no compiler that says."""
    return None
