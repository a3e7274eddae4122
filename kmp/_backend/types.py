"""Aliases that say what an argument is; tensors of the three backends share no base class."""

from typing import Any, NamedTuple, TypeAlias

Tensor: TypeAlias = Any  # tf.Tensor, jax.Array or torch.Tensor: what keras.ops takes and returns
Variable: TypeAlias = Any  # keras.Variable (tf.Variable too, where TensorFlow's trainer unwraps it)
Gradient: TypeAlias = Any  # Tensor, tf.IndexedSlices, or None for a variable that the loss misses
Tree: TypeAlias = Any  # nested lists, tuples and dicts of tensors
DType: TypeAlias = str  # "float32", "bfloat16", "float16", ...


class Device(NamedTuple):
    """What the training runs on."""

    platform: str  # "cpu", "gpu" or "tpu"
    name: str  # as the maker calls it
    compute_capability: tuple[int, int] | None  # NVIDIA's (major, minor)


class DeviceMemory(NamedTuple):
    """Bytes of the first device."""

    in_use: int  # now
    peak: int  # the most since the last look
