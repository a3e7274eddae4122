"""What may stand in the place of a Keras variable in an optimizer on TensorFlow."""

from typing import Any

import keras
import tensorflow as tf

from kmp._backend.types import Tensor


class BaseView(keras.Variable.__mro__[1]):
    """Keras's variable without its TensorFlow part, whose `value` is a `tf.Variable`.

    Keras's optimizers for TensorFlow assign to that `tf.Variable`, and know it by its `_unique_id`.
    A view is assigned to itself, and its value is a tensor.
    """

    variable: Any

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Tensor:
        return tf.convert_to_tensor(self.value, dtype=dtype, name=name)

    @property
    def _unique_id(self) -> str:
        return f"view of {self.variable.value._unique_id}"
