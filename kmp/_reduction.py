"""Every gradient reduced to a few numbers, in as few kernels as all of them together allow.

The compile time and the number of kernels would else grow with the number of variables: XLA starts
one reduction or two for each.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops

from kmp import _backend
from kmp._types import Gradient, Tensor

Columns = tuple[Tensor, ...]  # two or more: the second is reduced by its maximum, others by sums

_SMALL = 4096  # numbers: variables up to here that are of one size go together everywhere
_OPERANDS = 64  # at most: XLA fuses no more than some 90 of them into one kernel


def reduce_by_variable(
    look: Callable[[Tensor], Columns],
    gradients: Sequence[Gradient],
    sizes: Sequence[int],
    together: bool,
) -> Columns:
    """Reduce what `look` sees of each gradient.

    Args:
        look: elementwise; columns of the shape of its argument, 0 where that is 0.
        gradients: for each variable its gradient, or None.
        sizes: for each variable its number of elements.
        together: whether large gradients go together too. XLA fuses their stack into the reduction
            on accelerators; on CPUs it would write it to memory.

    Returns:
        [num_variables] each, in the dtype of `look`; 0 for None.
    """
    groups: dict[Any, list[int]] = {}
    values = [None if g is None else _backend.gradient_rows(g) for g in gradients]
    for i, (x, gradient, size) in enumerate(zip(values, gradients, sizes, strict=True)):
        groups.setdefault(_group(i, x, x is gradient, size, together), []).append(i)
    parts, order = [], []
    for (kind, *_), everyone in groups.items():
        for members in (everyone[i : i + _OPERANDS] for i in range(0, len(everyone), _OPERANDS)):
            order += members
            parts.append(_reduced(kind, look, [values[i] for i in members]))
    found = [ops.concatenate(x) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True)]
    if order == sorted(order):
        return tuple(found)
    return tuple(ops.take(x, np.argsort(order), axis=0) for x in found)


def _group(i: int, values: Any, dense: bool, size: int, together: bool) -> tuple:
    """What gradient `i` goes together with: all that have the same."""
    if values is None or size == 0:
        return ("absent",)
    if not dense or not (together or size <= _SMALL):
        return ("alone", i)  # a sparse one has rows of a number that is known at run time
    shape, dtype = tuple(values.shape), str(values.dtype)
    if size <= _SMALL:
        return ("flat", dtype, size)
    # Those of convolutions come in layouts of their own, which a stack would have to undo.
    return ("channels", dtype, shape[-1]) if len(shape) > 3 else ("shaped", dtype, shape)


def _reduced(kind: str, look: Callable[[Tensor], Columns], members: list) -> Columns:
    """The columns of gradients that go together, a number for each of them."""
    if kind == "channels":
        vectors = [
            _backend.reduce_columns(look(x), tuple(range(len(x.shape) - 1))) for x in members
        ]
        return _backend.reduce_columns(
            tuple(ops.stack(x) for x in zip(*vectors, strict=True)), (1,)
        )
    if kind == "absent":
        members = [ops.zeros((1,))] * len(members)
    elif kind == "flat":
        members = [ops.reshape(x, (-1,)) for x in members]
    stacked = ops.stack(members)
    return _backend.reduce_columns(look(stacked), tuple(range(1, len(stacked.shape))))
