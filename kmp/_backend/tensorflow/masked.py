"""Assignments to TensorFlow variables that hold only if a flag is True."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kmp._backend.base import replacing
from kmp._backend.types import Tensor, Variable

# All that Keras's optimizers change a variable with.
_METHODS = ("assign", "assign_add", "assign_sub", "scatter_update", "scatter_add", "scatter_sub")


@contextlib.contextmanager
def masked_assignments(keep: Tensor, variables: list[Variable]) -> Iterator[None]:
    """While open, each change of one of `variables` keeps the old value where `keep` is False.

    XLA fuses the select into the update that it guards. A select after the whole update would have
    it keep, and read again, the old value of every variable.
    """
    native = [v.value for v in variables]
    with replacing:
        for variable in native:
            # All of them first: what is masked already would be masked twice.
            masked = {name: _masked(variable, name, keep) for name in _METHODS}
            vars(variable).update(masked)
        try:
            yield
        finally:
            for variable in native:
                for name in _METHODS:
                    delattr(variable, name)


def _masked(variable: Any, name: str, keep: Tensor) -> Callable:
    change, assign = getattr(variable, name), variable.assign

    def dense(value, *args, **kwargs):
        old = variable.value()  # `read_value` is a node more
        value = tf.cast(value, variable.dtype)
        if name == "assign_add":
            value = old + value
        elif name == "assign_sub":
            value = old - value
        return assign(tf.where(keep, value, old), *args, **kwargs)

    def sparse(slices, *args, **kwargs):
        if name == "scatter_update":
            kept = tf.gather(variable, slices.indices)
        else:  # a zero that changes no number, not even the sign of another zero
            kept = tf.constant(-0.0 if name == "scatter_add" else 0.0, variable.dtype)
        values = tf.where(keep, slices.values, kept)
        slices = tf.IndexedSlices(values, slices.indices, slices.dense_shape)
        return change(slices, *args, **kwargs)

    return sparse if name.startswith("scatter") else dense
