"""What most backends have in common; each backend's own files replace what differs."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp._backend.one_device import WHOLE, Pieces
from kmp._backend.types import Gradient, Tensor, Tree, Variable

# Factor and shift of each round of `hash_bits`: 0x85EBCA6B and 0xC2B2AE35 as int32.
MURMUR3 = ((0x85EBCA6B - 2**32, 13), (0xC2B2AE35 - 2**32, 16))


def pieces(layouts: Sequence[Any]) -> Pieces:
    return WHOLE


def compiled(function: Callable, static: Sequence[int] = ()) -> Callable:
    return function


def without_functions() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def inside_xla() -> bool:
    return False


def preserved(variable: Variable) -> Callable[[], None]:
    value = ops.copy(variable._value)  # `value` may be autocast
    return lambda: variable.assign(value)


def retype(variable: Variable, value: Tensor) -> Callable[[], None]:
    before, old = variable._dtype, variable._value

    def assign(dtype: str, value: Tensor) -> None:
        variable._dtype = dtype
        variable._direct_assign(value)

    assign(keras.backend.standardize_dtype(value.dtype), value)
    return lambda: assign(before, old)


def per_target(
    function: Callable[..., Sequence[Tensor]], shapes: Sequence[tuple[int, ...]], *tensors: Any
) -> Sequence[Tensor]:
    return function("host", *tensors)


def to_host(x: Tensor | Variable) -> Any:
    # A copy: the next step may write into the buffer that NumPy would look at.
    return np.array(ops.convert_to_numpy(x))


def from_host(variable: Variable, value: Any) -> None:
    variable.assign(value)


def writes_logs(model: Any) -> bool:
    return True


def all_reduce_sum(x: Tensor) -> Tensor:
    # On JAX one program spans the devices; on torch Keras refuses such statistics.
    return x


def constant(values: Any) -> Tensor:
    return ops.convert_to_tensor(values)


def segment_sum(values: Tensor, keys: Tensor, number: int) -> Tensor:
    return ops.segment_sum(values, keys, num_segments=number)


def after(finite: Tensor, sample: Tensor) -> Tensor:
    # Things happen in the order of the calls.
    return finite


# Held while a method of a shared optimizer or variable is replaced: threads may trace at once.
replacing = threading.RLock()


@contextlib.contextmanager
def applying_by(optimizer: Any, apply_gradients: Callable[..., None]) -> Iterator[None]:
    """Within, a Keras optimizer's `apply` calls this with gradients and variables to update by."""
    with replacing:
        optimizer._backend_apply_gradients = apply_gradients
        try:
            yield
        finally:
            del optimizer._backend_apply_gradients


def update(optimizer: Any, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> None:
    """What a Keras optimizer does with gradients once they are accumulated."""
    clipped = optimizer._clip_gradients(list(gradients))
    optimizer._apply_weight_decay(variables)
    optimizer._backend_update_step(clipped, variables, optimizer.learning_rate)


def gradient_values(gradient: Gradient) -> Tensor:
    return gradient


gradient_rows = dense = gradient_values


def gradient_sample(gradient: Gradient, strides: Sequence[int], target: str) -> Tensor:
    if set(strides) <= {1}:
        return gradient  # without indexing, which takes its time to trace
    return gradient[tuple(slice(None, None, stride) for stride in strides)]


def map_gradient_values(function: Callable[[Tensor], Tensor], gradient: Gradient) -> Gradient:
    return function(gradient)


def reduce_columns(columns: tuple[Tensor, ...], axes: tuple[int, ...]) -> tuple[Tensor, ...]:
    # Outside XLA: one column after another.
    pairs = enumerate(columns)
    return tuple(ops.max(x, axes, initial=0) if i == 1 else ops.sum(x, axes) for i, x in pairs)


def hash_bits(x: Tensor) -> Tensor:
    x = ops.bitwise_xor(x, _shifted(x, 16))
    for factor, by in MURMUR3:
        x = x * factor
        x = ops.bitwise_xor(x, _shifted(x, by))
    return x


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift to the right, with zeros from the left."""
    return ops.bitwise_and(ops.right_shift(x, by), 2 ** (32 - by) - 1)


def are_finite(tensors: Sequence[Tensor]) -> Tensor:
    return ops.stack([ops.all(ops.isfinite(x)) for x in tensors])


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x`, in float32 if it was half precision or a Python number."""
    if not hasattr(x, "dtype"):
        return ops.convert_to_tensor(x, "float32")
    dtype = keras.backend.standardize_dtype(x.dtype)
    return x if dtype in ("float32", "float64") else ops.cast(x, "float32")


def multiply(leaves: Sequence[Any], factor: Tensor) -> Sequence[Any]:
    return [product(x, factor) for x in leaves]


def product(x: Any, factor: Tensor) -> Any:
    """One leaf of `multiply`."""
    if is_float(x):
        return ops.multiply(at_least_float32(x), factor)
    return ops.multiply(x, ops.cast(factor, x.dtype)) if is_complex(x) else x


def is_float(x: Any) -> bool:
    """Tell whether `x` is a float or a tensor, array or sparse gradient of floats."""
    if not hasattr(x, "dtype"):
        return isinstance(x, float)
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype))


def is_complex(x: Any) -> bool:
    """Tell whether `x` is a tensor or array of complex numbers."""
    return hasattr(x, "dtype") and keras.backend.standardize_dtype(x.dtype).startswith("complex")


def are_dense(gradients: Sequence[Gradient]) -> list[bool]:
    return [True] * len(gradients)


def read(model: Any, variables: list[Variable], each: bool = False) -> list[Tensor]:
    return [v.value for v in variables]


def around_train_step(
    model: Any,
    train_step: Callable[..., Any],
    before: Callable[[], Any],
    after: Callable[[Any, Any], Any],
) -> Callable[..., Any]:

    def step(data: Any) -> Any:
        kept = before()
        return after(kept, train_step(data))

    return step


def kept_values(variables: Sequence[Variable]) -> list[Tensor]:
    return [v.value for v in variables]


def keep_old_unless(applied: Tensor, variables: Sequence[Variable], old: Sequence[Tensor]) -> None:
    for variable, value in zip(variables, old, strict=True):
        variable.assign(ops.where(applied, variable.value, value))


def settle(model: Any) -> None:
    # The variables of a model that trains hold its state.
    return


END_OF_DATA: tuple[type[Exception], ...] = (StopIteration,)
SEES_LOSS = True
BaseView = keras.Variable


def fused_batch_norm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    axis: int,
    epsilon: float,
    otherwise: Callable[[], Sequence[Tensor]],
) -> Sequence[Tensor]:
    # Only TensorFlow has such a kernel, outside XLA.
    return otherwise()


def sum_along(x: Tensor, axis: int) -> Tensor:
    return ops.sum(x, [each for each in range(len(x.shape)) if each != axis], keepdims=True)


def compiled_bytes(model: Any, specs: list, loss: Callable[[list[Tensor]], Tensor]) -> int | None:
    return None


def compiled_step_bytes(model: Any, x: Tree, y: Tree) -> int | None:
    return None
