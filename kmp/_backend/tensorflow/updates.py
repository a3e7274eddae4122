"""Updates of a step that XLA compiles, which leave the variables as they are if it is skipped."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kmp._backend.base import replacing
from kmp._backend.types import Gradient, Tensor, Variable

# The methods by which Keras's optimizers change a variable.
_METHODS = ("assign", "assign_add", "assign_sub", "scatter_update", "scatter_add", "scatter_sub")


def update_by_mask(
    applies: Tensor, inner: Any, gradients: list[Gradient], variables: list[Variable]
) -> None:
    """Let a Keras optimizer update the variables; all keep their values unless `applies`, a bool[].

    XLA fuses the selects into the updates that they guard. A select after the whole update would
    have it keep, and read again, the old value of every variable.
    """
    with masked(applies, [*variables, *inner.variables]):
        inner.apply(gradients, variables)


@contextlib.contextmanager
def masked(applies: Tensor, variables: list[Variable]) -> Iterator[None]:
    """Within, assignments leave `variables` as they are unless `applies`, a bool[]."""
    native = [v.value for v in variables]
    with replacing:
        for variable in native:
            # Look up all methods before one is replaced, or some would be masked twice.
            methods = {name: _masked(variable, name, applies) for name in _METHODS}
            vars(variable).update(methods)
        try:
            yield
        finally:
            for variable in native:
                for name in _METHODS:
                    delattr(variable, name)


def _masked(variable: Any, name: str, applies: Tensor) -> Callable:
    change, assign = getattr(variable, name), variable.assign

    def dense(value, *args, **kwargs):
        old = variable.value()  # `read_value` would be one more node of the graph
        value = tf.cast(value, variable.dtype)
        if name == "assign_add":
            value = old + value
        elif name == "assign_sub":
            value = old - value
        return assign(tf.where(applies, value, old), *args, **kwargs)

    def sparse(slices, *args, **kwargs):
        if name == "scatter_update":
            kept = tf.gather(variable, slices.indices)
        else:  # a zero that changes no number, not even the sign of another zero
            kept = tf.constant(-0.0 if name == "scatter_add" else 0.0, variable.dtype)
        values = tf.where(applies, slices.values, kept)
        slices = tf.IndexedSlices(values, slices.indices, slices.dense_shape)
        return change(slices, *args, **kwargs)

    return sparse if name.startswith("scatter") else dense
