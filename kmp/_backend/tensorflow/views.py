"""What stands behind a Keras variable on TensorFlow, or in its place in an optimizer."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.common import KerasVariable

from kmp._backend.types import Tensor, Variable


class BaseView(KerasVariable):
    """Keras's variable without its TensorFlow part, whose `value` is a `tf.Variable`.

    Keras's optimizers for TensorFlow assign to that `tf.Variable`, and know it by its `_unique_id`.
    A view is assigned to itself, its value is a tensor, and TensorFlow's checkpoints leave it out.
    """

    variable: Any

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Tensor:
        return tf.convert_to_tensor(self.value, dtype=dtype, name=name)

    @property
    def _unique_id(self) -> str:
        return f"view of {self.variable.value._unique_id}"


def retype(variable: Variable, value: Tensor) -> Callable[[], None]:
    # A `tf.Variable` has one dtype: another takes its place, on the same replicas.
    before, old = variable._dtype, variable._value
    variable._dtype = value.dtype.name
    with getattr(old, "distribute_strategy", tf.distribute.get_strategy()).scope():
        variable._initialize(value)

    def undo() -> None:
        variable._dtype, variable._value = before, old

    return undo
