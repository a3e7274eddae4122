"""Aliases that say what an argument is; the backends share no common base class."""

from typing import Any, TypeAlias

Tensor: TypeAlias = Any  # tf.Tensor, jax.Array or torch.Tensor: what keras.ops takes and returns
Variable: TypeAlias = Any  # keras.Variable (tf.Variable too, where TensorFlow's trainer unwraps it)
Gradient: TypeAlias = Any  # Tensor, tf.IndexedSlices, or None for a variable that the loss misses
Tree: TypeAlias = Any  # nested lists, tuples and dicts of tensors
DType: TypeAlias = str  # "float32", "bfloat16", "float16", ...
