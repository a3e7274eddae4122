"""What `kmp.LossScaleOptimizer.apply` takes: one gradient for each variable, of its shape."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from kmp import _backend
from kmp._backend.types import Gradient, Variable


def refuse_complex(variables: Sequence[Variable]) -> None:
    """Raise ValueError for complex variables, whose gradients Keras's optimizers get wrong.

    Adam, for one, squares them, where the square of the absolute value is meant.
    """
    for variable in variables:
        if "complex" in str(variable.dtype):
            raise ValueError(
                f"The variables of an optimizer must be real. Received: {_name(variable)!r} of "
                f"dtype {variable.dtype}. Write two float variables, for the real part and the "
                "imaginary part, and join them by keras.ops.view_as_complex in `call`."
            )


def refuse_unknown(variables: Sequence[Variable], known: Callable[[Variable], bool]) -> None:
    """Raise ValueError for a variable that the optimizer was not built with."""
    for variable in variables:
        if not known(variable):
            raise ValueError(
                "`apply` takes the variables that the optimizer was built with. Received: "
                f"{_name(variable)!r}, which is not one of them. Give each model an optimizer of "
                "its own, and build it after the last layer is there."
            )


def checked_gradients(grads: Sequence[Any], variables: Sequence[Variable]) -> list[Gradient]:
    """Return `grads` as tensors of floats, `tf.IndexedSlices` or None, one for each variable.

    Lists, NumPy arrays and integers, which are gradients too, become tensors of the dtype of their
    variable: loss scaling divides floats alone.

    Raises:
        ValueError: if there is not one for each variable, none at all, or one of another shape.
    """
    if len(grads) != len(variables):
        raise ValueError(
            "`grads` must hold one gradient (or None) for each variable. Received: "
            f"{len(grads)} gradients for {len(variables)} variables."
        )
    if all(g is None for g in grads):
        raise ValueError(
            "No gradients provided for any variable. Is the loss computed from the model's "
            "outputs, and does `compile` have a `loss`?"
        )
    return [_checked(g, v) for g, v in zip(grads, variables, strict=True)]


def _checked(gradient: Any, variable: Variable) -> Gradient:
    if gradient is None or _backend.gradient_values(gradient) is not gradient:  # sparse
        return gradient
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if not hasattr(gradient, "dtype"):
        gradient = ops.convert_to_tensor(gradient, dtype)
    elif not keras.backend.is_float_dtype(keras.backend.standardize_dtype(gradient.dtype)):
        gradient = ops.cast(gradient, dtype)
    if tuple(gradient.shape) != tuple(variable.shape) and None not in gradient.shape:
        raise ValueError(
            "A gradient must have the shape of its variable. Received: a gradient of shape "
            f"{tuple(gradient.shape)} for {_name(variable)!r} of shape {tuple(variable.shape)}. "
            "Are `grads` and `trainable_variables` in the same order?"
        )
    return gradient


def _name(variable: Variable) -> str:
    return getattr(variable, "path", variable.name)  # TensorFlow's own have no path
