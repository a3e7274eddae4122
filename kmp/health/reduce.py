"""Reduce every gradient to a few numbers, in as few kernels as possible.

XLA runs one or two reductions per gradient, so compile time and number of kernels would otherwise
grow with the number of variables.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from keras import ops

from kmp import _backend
from kmp._backend.types import Gradient, Tensor

Columns = tuple[Tensor, ...]  # the second is reduced by its maximum, the others are summed

SMALL = 4096  # gradients of at most this many values are stacked with others of their size
_OPERANDS = 64  # the most that are stacked; XLA fuses no more than about 90 into one kernel


class Part(NamedTuple):
    """A stack of small gradients of one size, or a single gradient.

    Attributes:
        values: `[num_members, size]` if stacked; else the gradient itself.
        members: the indices of the variables that the gradients belong to.
        stacked: whether it is a stack.
        kind: their entry in the `kinds` of `gather`.
        is_dense: whether `values` is a tensor rather than `tf.IndexedSlices`.
    """

    values: Gradient
    members: tuple[int, ...]
    stacked: bool
    kind: Hashable = None
    is_dense: bool = True


def values_of(part: Part) -> Tensor:
    """The values of a part; rows of a sparse gradient with the same index are summed."""
    return part.values if part.is_dense else _backend.gradient_rows(part.values)


def unstacked(part: Part) -> list[Tensor]:
    """The values of each gradient in a part."""
    return ops.unstack(part.values) if part.stacked else [values_of(part)]


def gather(
    gradients: Sequence[Gradient],
    sizes: Sequence[int],
    kinds: Sequence[Hashable] = (),
    alone: Sequence[bool] = (),
) -> list[Part]:
    """Stack small gradients of the same size, dtype and kind; leave the others as they are.

    Args:
        gradients: one for each variable; None is left out.
        sizes: each variable's number of elements.
        kinds: a label for each variable; only gradients with equal labels are stacked.
        alone: for each variable, whether it must not be stacked.

    Returns:
        The stacks, then the single gradients in the order of the variables.
    """
    small: dict[Any, list[int]] = {}
    parts, large = [], []
    kinds, alone = kinds or [None] * len(sizes), alone or [False] * len(sizes)
    dense = _backend.are_dense(gradients)
    for i, (x, size, kind) in enumerate(zip(gradients, sizes, kinds, strict=True)):
        if x is None or size == 0:
            continue
        # A sparse gradient's number of rows is only known at run time.
        if size <= SMALL and not alone[i] and dense[i]:
            small.setdefault((size, str(x.dtype), kind), []).append(i)
        else:
            large.append(Part(x, (i,), False, kind, dense[i]))
    for (size, _, kind), everyone in small.items():
        for members in (everyone[i : i + _OPERANDS] for i in range(0, len(everyone), _OPERANDS)):
            rows = _as_rows(size, [gradients[i] for i in members])
            parts.append(Part(rows, tuple(members), True, kind))
    return parts + large


@functools.partial(_backend.compiled, static=(0,))
def _as_rows(size: int, tensors: Sequence[Tensor]) -> Tensor:
    # TensorFlow does not know the size of every gradient while it traces.
    return ops.stack([x if x.shape == (size,) else ops.reshape(x, (size,)) for x in tensors])


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
        join: maps the reduced tensors, `[n]` each, to rows, `[n, ...]`.
        parts: from `gather`.
        number: the number of variables.
        together: whether to stack large gradients of one shape too.

    Returns:
        `[number, ...]`: the rows that `join` returns; zeros for variables without a gradient.
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
    return in_rows(join(_joined(found) if len(found) > 1 else found[0]), order, number)


@_backend.compiled
def _joined(found: Sequence[Columns]) -> Columns:
    return tuple(ops.concatenate(x) for x in zip(*found, strict=True))


def in_rows(found: Tensor, order: Sequence[int], number: int) -> Tensor:
    """`[number, ...]`: the rows of `found` at the indices in `order`, zeros elsewhere."""
    if list(order) == list(range(number)):
        return found
    if len(order) < number:
        zero = ops.zeros((1, *found.shape[1:]), found.dtype)
        found = ops.concatenate([found[: len(order)], zero])
    places = [len(order)] * number  # that of the row of zeros, at first
    for i, place in enumerate(order):
        places[place] = i
    return ops.take(found, ops.convert_to_tensor(places, "int32"), axis=0)


def _group(part: Part, together: bool) -> tuple:
    """The key of the parts that are reduced together with this one."""
    if part.stacked and not together:
        return ("rows", str(part.values.dtype), part.values.shape[1])
    if part.stacked or not together or not part.is_dense:
        return ("alone", part.members)
    shape, dtype = tuple(part.values.shape), str(part.values.dtype)
    # XLA lays out gradients of convolutions in its own way, which a stack would have to undo.
    return ("channels", dtype, shape[-1]) if len(shape) > 3 else ("shaped", dtype, shape)


def _reduced(kind: str, look: Callable[[Tensor], Columns], parts: Sequence[Part]) -> Columns:
    """The columns of parts that are reduced together: one value for each gradient."""
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
    return _reduced_rows(look, stacked)


@functools.partial(_backend.compiled, static=(0,))
def _reduced_rows(look: Callable[[Tensor], Columns], stacked: Tensor) -> Columns:
    """The columns of each row, which JAX traces and lowers once for all gradients of one shape."""
    return _backend.reduce_columns(look(stacked), tuple(range(1, len(stacked.shape))))
