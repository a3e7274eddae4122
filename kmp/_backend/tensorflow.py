"""The TensorFlow side of `kmp._backend`."""

from keras import ops

from kmp._types import Tensor


def matmul_float32(x: Tensor, kernel: Tensor) -> Tensor:
    """`x @ kernel` with half operands and a float32 accumulator and result."""
    return ops.matmul(ops.cast(x, "float32"), ops.cast(kernel, "float32"))
