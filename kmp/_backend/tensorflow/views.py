"""The base class of objects that stand in for a Keras variable in an optimizer on TensorFlow."""

from typing import Any

import tensorflow as tf
from keras.src.backend.common import KerasVariable

from kmp._backend.types import Tensor


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
