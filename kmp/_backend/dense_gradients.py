"""Gradients of backends on which Keras has dense ones alone: JAX and PyTorch."""

from collections.abc import Callable

from kmp._types import Gradient, Tensor


def gradient_values(gradient: Gradient) -> Tensor:
    """The numbers of a gradient."""
    return gradient


gradient_rows = gradient_values


def map_gradient_values(function: Callable[[Tensor], Tensor], gradient: Gradient) -> Gradient:
    """Apply an elementwise function to the numbers of a gradient."""
    return function(gradient)
