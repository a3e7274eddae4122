"""The JAX side of `kmp._backend`."""

from jax import numpy as jnp

from kmp._types import Tensor


def matmul_float32(x: Tensor, kernel: Tensor) -> Tensor:
    """`x @ kernel` with half operands and a float32 accumulator and result."""
    return jnp.matmul(x, kernel, preferred_element_type="float32")
