"""Every gradient reduced to a few numbers, in as few kernels as all of them together allow.

The compile time and the number of kernels would else grow with the number of variables: XLA starts
one reduction or two for each.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from kmp import _backend
from kmp._backend.types import Gradient, Tensor

Columns = tuple[Tensor, ...]  # the second is reduced by its maximum, others by sums

SMALL = 4096  # numbers: gradients up to here that are of one size go together everywhere
_OPERANDS = 64  # at most: XLA fuses no more than some 90 of them into one kernel


class Part(NamedTuple):
    """Some of the gradients: small ones that are alike, or a large one.

    Attributes:
        values: [num_members, size] of small gradients; else the gradient itself.
        members: the rows of the variables that they belong to.
        stacked: whether they are small ones.
        kind: what `gather` was told of them.
        is_dense: whether `values` is a tensor, and no `tf.IndexedSlices`.
    """

    values: Gradient
    members: tuple[int, ...]
    stacked: bool
    kind: Hashable = None
    is_dense: bool = True


def values_of(part: Part) -> Tensor:
    """The numbers of a part; rows of a sparse gradient that share an index are summed."""
    return part.values if part.is_dense else _backend.gradient_rows(part.values)


def gather(
    gradients: Sequence[Gradient],
    sizes: Sequence[int],
    kinds: Sequence[Hashable] = (),
    alone: Sequence[bool] = (),
) -> list[Part]:
    """Stack the small gradients that are of one size, dtype and kind; leave the others as they are.

    Args:
        gradients: for each variable its gradient, or None, which is in no part.
        sizes: for each variable its number of elements.
        kinds: for each variable what it must have in common with others; nothing if left out.
        alone: for each variable whether it is kept out of the stacks; none is if left out.

    Returns:
        The stacks, then the rest in the order of the variables.
    """
    small: dict[Any, list[int]] = {}
    parts, large = [], []
    kinds, alone = kinds or [None] * len(sizes), alone or [False] * len(sizes)
    dense = _backend.are_dense(gradients)
    for i, (x, size, kind) in enumerate(zip(gradients, sizes, kinds, strict=True)):
        if x is None or size == 0:
            continue
        # How many rows a sparse one has is known at run time.
        if size <= SMALL and not alone[i] and dense[i]:
            small.setdefault((size, str(x.dtype), kind), []).append(i)
        else:
            large.append(Part(x, (i,), False, kind, dense[i]))
    for (size, _, kind), everyone in small.items():
        for members in (everyone[i : i + _OPERANDS] for i in range(0, len(everyone), _OPERANDS)):
            rows = [ops.reshape(gradients[i], (size,)) for i in members]
            parts.append(Part(ops.stack(rows), tuple(members), True, kind))
    return parts + large


def reduce_parts(
    look: Callable[[Tensor], Columns],
    join: Callable[[Columns], Tensor],
    parts: Sequence[Part],
    number: int,
    together: bool,
) -> Tensor:
    """Reduce each gradient to one row.

    Args:
        look: maps a tensor to a tuple of tensors of the same shape; must map 0 to 0 (padding). The
            second of them is reduced by its maximum, the others are summed.
        join: maps the reduced tensors, `[n]` each, to the rows, `[n, ...]`.
        parts: from `gather`.
        number: of variables.
        together: whether large gradients of one shape go together too, as a stack.

    Returns:
        `[number, ...]`: the rows that `join` returns, and zeros for a variable without a gradient.
    """
    groups: dict[Any, list[Part]] = {}
    for part in parts:
        groups.setdefault(_group(part, together), []).append(part)
    found, order = [], []
    for (kind, *_), everyone in groups.items():
        for some in (everyone[i : i + _OPERANDS] for i in range(0, len(everyone), _OPERANDS)):
            order += [i for part in some for i in part.members]
            found.append(_reduced(kind, look, some))
    if not found:
        found.append(look(ops.zeros((1,))))
    columns = [ops.concatenate(x) if len(found) > 1 else x[0] for x in zip(*found, strict=True)]
    return in_rows(join(tuple(columns)), order, number)


def in_rows(found: Tensor, order: Sequence[int], number: int) -> Tensor:
    """[number, ...]: `found`, a row for each of `order`, in those rows; zeros in the others."""
    if list(order) == list(range(number)):
        return found
    if len(order) < number:
        zero = ops.zeros((1, *found.shape[1:]), found.dtype)
        found = ops.concatenate([found[: len(order)], zero])
    places = np.full(number, len(order), "int32")  # of the zero, unless there is a gradient
    places[list(order)] = np.arange(len(order))
    return ops.take(found, places, axis=0)


def _group(part: Part, together: bool) -> tuple:
    """What a part goes together with: all that have the same."""
    if part.stacked and not together:
        return ("rows", str(part.values.dtype), part.values.shape[1])
    if part.stacked or not together or not part.is_dense:
        return ("alone", part.members)
    shape, dtype = tuple(part.values.shape), str(part.values.dtype)
    # Those of convolutions come in layouts of their own, which a stack would have to undo.
    return ("channels", dtype, shape[-1]) if len(shape) > 3 else ("shaped", dtype, shape)


def _reduced(kind: str, look: Callable[[Tensor], Columns], parts: Sequence[Part]) -> Columns:
    """The columns of gradients that go together, a number for each of them."""
    values = [values_of(part) for part in parts]
    if kind == "channels":
        vectors = [_backend.reduce_columns(look(x), tuple(range(len(x.shape) - 1))) for x in values]
        return _backend.reduce_columns(
            tuple(ops.stack(x) for x in zip(*vectors, strict=True)), (1,)
        )
    if not parts[0].stacked:
        stacked = ops.stack(values)
    else:
        stacked = ops.concatenate(values) if len(values) > 1 else values[0]
    return _backend.reduce_columns(look(stacked), tuple(range(1, len(stacked.shape))))
