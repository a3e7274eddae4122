"""Reductions of several columns, as Keras has them: one after another."""

from keras import ops

from kmp._types import Tensor


def reduce_apart(columns: tuple[Tensor, ...], axes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The maximum of the second column and the sums of the others."""
    return tuple(
        ops.max(x, axes, initial=0) if i == 1 else ops.sum(x, axes) for i, x in enumerate(columns)
    )
