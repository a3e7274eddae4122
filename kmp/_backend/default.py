"""What most backends have in common; each backend's own files replace what differs."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from keras import ops

from kmp._backend.types import Gradient, Tensor, Tree, Variable


class OneReplica:
    """How the parts of a step run where its gradients are already the sum over all devices.

    Args:
        update_if: the backend's way to update variables under a condition; see the method.
    """

    def __init__(self, update_if: Callable[[Tensor, Any, list[Gradient], list[Variable]], None]):
        self._update_if = update_if

    def on_each(self, function: Callable, *args: Any) -> Any:
        """Call a function of gradients on each replica."""
        return function(*args)

    def local(self, gradients: list[Gradient]) -> list[Gradient]:
        """The gradients of the first replica in this process."""
        return gradients

    def update_if(
        self, keep: Tensor, inner: Any, gradients: list[Gradient], variables: list[Variable]
    ) -> None:
        """Let a Keras optimizer update the variables on each replica, or leave all as it is.

        Args:
            keep: bool[], whether the update happens.
            inner: the optimizer. Its own variables stay too unless `keep`.
            gradients: what it is given; from `on_each`.
            variables: the variables to update.
        """
        self._update_if(keep, inner, gradients, variables)


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


def per_target(
    function: Callable[..., Sequence[Tensor]], shapes: Sequence[tuple[int, ...]], *tensors: Any
) -> Sequence[Tensor]:
    """Call `function` with the name of the target that it is compiled for, and with `tensors`.

    Args:
        function: takes "cpu", "gpu" or "tpu", or "host" where XLA compiles nothing, and the
            tensors. All that it reads of the step must be among these. It may be called later,
            when the step is lowered.
        shapes: the shapes of the float32 tensors that it returns.
        *tensors: handed to it.
    """
    return function("host", *tensors)


def to_host(x: Tensor | Variable) -> Any:
    """A copy of a tensor or variable on the host, for `from_host`."""
    # A copy: the next step may write into the buffer that NumPy would look at.
    return np.array(ops.convert_to_numpy(x))


def from_host(variable: Variable, value: Any) -> None:
    """Assign what `to_host` returned for this variable, or for a value of it."""
    variable.assign(value)


def writes_logs(model: Any) -> bool:
    """True: nobody else writes for this model."""
    return True


def all_reduce_sum(x: Tensor) -> Tensor:
    """`x` itself: on JAX one program spans the devices; on torch Keras refuses such statistics."""
    return x


def after(finite: Tensor, sample: Tensor) -> Tensor:
    """`finite`: things happen in the order of the calls."""
    return finite


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


def gradient_sample(gradient: Gradient, strides: Sequence[int], target: str) -> Tensor:
    """A strided slice of a gradient, one stride per axis."""
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


def read(model: Any, variables: list[Variable]) -> list[Tensor]:
    """The present values of variables of `model`, its optimizer or its metrics."""
    return [v.value for v in variables]


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
