"""Gradients of backends on which Keras has dense ones alone: JAX and PyTorch."""

from collections.abc import Callable, Sequence

from kmp._types import Gradient, Tensor


def gradient_values(gradient: Gradient) -> Tensor:
    """The numbers of a gradient."""
    return gradient


gradient_rows = gradient_values


def gradient_sample(gradient: Gradient, strides: Sequence[int]) -> Tensor:
    """The numbers of a gradient at each so many places along each axis."""
    if set(strides) <= {1}:
        return gradient  # without indexing, which takes its time to trace
    return gradient[tuple(slice(None, None, stride) for stride in strides)]


def map_gradient_values(function: Callable[[Tensor], Tensor], gradient: Gradient) -> Gradient:
    """Apply an elementwise function to the numbers of a gradient."""
    return function(gradient)
