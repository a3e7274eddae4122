"""Measure gradients in the compiled step: each is reduced to a few numbers.

XLA runs one or two reductions per gradient, so compile time and number of kernels would grow with
the number of variables. Hence gradients are stacked where that pays, and all levels come from one
pass.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
from keras import ops

from kmp._backend import UNSHARDED, Sharding, backend
from kmp._backend.types import Gradient, Tensor

# Levels are in true units (after division by the loss scale) and over finite values only, so that
# one inf hides nothing.
LEVELS = ("l2_norm", "max_abs", "zero_share", "nonfinite")
L2_NORM, MAX_ABS, ZERO_SHARE, NONFINITE = range(len(LEVELS))

T = TypeVar("T")
Columns = tuple[Tensor, ...]  # the second is reduced by its maximum, the others are summed

SMALL = 4096  # gradients of at most this many values are stacked with others of their size
_OPERANDS = 64  # the most that are stacked; XLA fuses no more than about 90 into one kernel


class GradientGroup(NamedTuple):
    """A stack of small gradients of one size, or a single gradient."""

    values: Gradient  # `[num_members, size]` if stacked; else the gradient itself
    members: tuple[int, ...]  # the indices of the variables that the gradients belong to
    stacked: bool
    spec: Hashable = None  # their entry in the `specs` of `group_gradients`
    is_dense: bool = True  # whether `values` is a tensor rather than `tf.IndexedSlices`


def _values_of(group: GradientGroup) -> Tensor:
    """The values of a group; rows of a sparse gradient with the same index are summed."""
    return group.values if group.is_dense else backend.gradient_rows(group.values)


def group_gradients(
    gradients: Sequence[Gradient],
    sizes: Sequence[int],
    specs: Sequence[Hashable] = (),
    alone: Sequence[bool] = (),
) -> list[GradientGroup]:
    """Stack small gradients of the same size, dtype and spec; leave the others as they are.

    Each argument has an entry for each variable: its gradient or None, its number of elements, its
    spec, and whether its gradient must not be stacked. The stacks come first, then the single
    gradients in the order of the variables.
    """
    small: dict[Any, list[int]] = {}
    groups, large = [], []
    specs, alone = specs or [None] * len(sizes), alone or [False] * len(sizes)
    dense = backend.are_dense(gradients)
    for i, (x, size, spec) in enumerate(zip(gradients, sizes, specs, strict=True)):
        if x is None or size == 0:
            continue
        # A sparse gradient's number of rows is only known at run time.
        if size <= SMALL and not alone[i] and dense[i]:
            small.setdefault((size, str(x.dtype), spec), []).append(i)
        else:
            large.append(GradientGroup(x, (i,), False, spec, dense[i]))
    for (size, _, spec), everyone in small.items():
        for members in _chunks(everyone):
            rows = _as_rows(size, [gradients[i] for i in members])
            groups.append(GradientGroup(rows, tuple(members), True, spec))
    return groups + large


def _chunks(items: list[T]) -> list[list[T]]:
    """The items in lists of at most `_OPERANDS`."""
    return [items[i : i + _OPERANDS] for i in range(0, len(items), _OPERANDS)]


@functools.partial(backend.compiled, static=(0,))
def _as_rows(size: int, tensors: Sequence[Tensor]) -> Tensor:
    # TensorFlow does not know the size of every gradient while it traces.
    return ops.stack([x if x.shape == (size,) else ops.reshape(x, (size,)) for x in tensors])


def _reduce_groups(
    look: Callable[[Tensor], Columns],
    join: Callable[[Columns], Tensor],
    groups: Sequence[GradientGroup],
    number: int,
    together: bool,
) -> Tensor:
    """`[number, ...]`: each gradient reduced to a row; zeros for variables without a gradient.

    Args:
        look: maps a tensor to columns of the same shape; must map 0 to 0 (padding).
        join: maps the reduced columns, `[n]` each, to rows, `[n, ...]`.
        groups: from `group_gradients`.
        number: the number of variables.
        together: whether to stack large gradients of one shape too.
    """
    batches: dict[Any, list[GradientGroup]] = {}
    for group in groups:
        batches.setdefault(_batch_key(group, together), []).append(group)
    found, order = [], []
    for (kind, *_), everyone in batches.items():
        for some in _chunks(everyone):
            order += [i for group in some for i in group.members]
            found.append(_reduced(kind, look, some))
    if not found:
        found.append(look(ops.zeros((1,))))
    return _in_rows(join(_joined(found) if len(found) > 1 else found[0]), order, number)


@backend.compiled
def _joined(found: Sequence[Columns]) -> Columns:
    return tuple(ops.concatenate(x) for x in zip(*found, strict=True))


def _in_rows(found: Tensor, order: Sequence[int], number: int) -> Tensor:
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


def _batch_key(group: GradientGroup, together: bool) -> tuple[Any, ...]:
    """The key of the groups that are reduced together with this one."""
    if group.stacked and not together:
        return ("rows", str(group.values.dtype), group.values.shape[1])
    if group.stacked or not together or not group.is_dense:
        return ("alone", group.members)
    shape, dtype = tuple(group.values.shape), str(group.values.dtype)
    # XLA lays out gradients of convolutions in its own way, which a stack would have to undo.
    return ("channels", dtype, shape[-1]) if len(shape) > 3 else ("shaped", dtype, shape)


def _reduced(
    kind: str, look: Callable[[Tensor], Columns], groups: Sequence[GradientGroup]
) -> Columns:
    """The columns of groups that are reduced together: one value for each gradient."""
    values = [_values_of(group) for group in groups]
    if kind == "channels":
        vectors = [backend.reduce_columns(look(x), tuple(range(len(x.shape) - 1))) for x in values]
        return backend.reduce_columns(tuple(ops.stack(x) for x in zip(*vectors, strict=True)), (1,))
    if not groups[0].stacked:
        stacked = ops.stack(values)
    else:
        stacked = ops.concatenate(values) if len(values) > 1 else values[0]
    return _reduced_rows(look, stacked)


@functools.partial(backend.compiled, static=(0,))
def _reduced_rows(look: Callable[[Tensor], Columns], stacked: Tensor) -> Columns:
    """The columns of each row, which JAX traces and lowers once for all gradients of one shape."""
    return backend.reduce_columns(look(stacked), tuple(range(1, len(stacked.shape))))


def measure(
    groups: Sequence[GradientGroup],
    sizes: Sequence[int],
    *,
    together: bool = False,
    sharding: Sharding = UNSHARDED,
) -> Tensor:
    """float32[num_variables, 4]: `LEVELS` of true gradients; zeros where there is no gradient.

    A variable has `sizes` elements, of which a sparse gradient, or a shard, holds only some.

    Example:

    >>> groups = group_gradients([ops.array([3.0, 0.0, -4.0, 0.0])], [4])
    >>> [float(x) for x in measure(groups, [4])[0]]
    [5.0, 4.0, 0.5, 0.0]
    """
    table = _reduce_groups(_look_at_levels, _table, groups, len(sizes), together)
    present = {i for group in groups for i in group.members}
    whole = np.array([n if i in present else 0 for i, n in enumerate(sizes)], "float32")
    return _levels(*sharding.reduced(table), backend.constant(whole))


@backend.compiled
def _table(columns: Columns) -> Tensor:
    return ops.stack([ops.cast(x, "float32") for x in columns], axis=1)


@backend.compiled
def _levels(sums: Tensor, largest: Tensor, whole: Tensor) -> Tensor:
    # `sums` has the sum of squares at L2_NORM, and the number of non-zeros at ZERO_SHARE.
    squares, nonzero, nonfinite = (sums[:, i] for i in (L2_NORM, ZERO_SHARE, NONFINITE))
    zero_share = (whole - nonzero) / ops.maximum(whole, 1.0)
    return ops.stack([ops.sqrt(squares), largest[:, MAX_ABS], zero_share, nonfinite], axis=1)


@backend.compiled
def global_norm(levels: Tensor) -> Tensor:
    """float32[]: the l2 norm of all gradients together, at most the largest float32.

    Example:

    >>> float(global_norm(ops.array([[3.0, 2, 0, 0], [4.0, 4, 0, 0]])))
    5.0
    """
    norms = levels[:, L2_NORM]
    # Where the squares underflow, the largest of the norms is what is left of them.
    squares, largest = backend.reduce_columns((ops.square(norms), norms), (0,))
    norm = ops.maximum(ops.sqrt(squares), largest)
    return ops.minimum(norm, np.finfo("float32").max)


@backend.compiled
def nonfinite_of(levels: Tensor) -> Tensor:
    """float32[num_variables]: how many numbers of each gradient are not finite."""
    return levels[:, NONFINITE]


def _look_at_levels(values: Tensor) -> Columns:
    if keras.backend.standardize_dtype(values.dtype) != "float64":
        values = ops.cast(values, "float32")
    finite = ops.isfinite(values)  # before the cast: a finite float64 may be inf in float32
    clean = ops.cast(ops.where(finite, values, 0.0), "float32")
    nonzero, nonfinite = ops.not_equal(values, 0.0), ops.logical_not(finite)
    counted = (ops.cast(x, "int32") for x in (nonzero, nonfinite))
    return ops.square(clean), ops.abs(clean), *counted


def find_nonfinite(
    groups: Sequence[GradientGroup],
    number: int,
    *,
    together: bool = False,
    sharding: Sharding = UNSHARDED,
) -> Tensor:
    """float32[number]: above 0 for gradients with inf or NaN, 0 for sound or missing ones."""
    if not groups:
        return ops.zeros((number,), "float32")
    if not backend.inside_xla():
        values, order = _one_by_one(groups)
        found = ops.cast(~backend.are_finite(values), "float32")
        return sharding.reduced(_in_rows(found, order, number))[1]
    find = functools.partial(_reduce_groups, _look_for_nonfinite, lambda found: ops.maximum(*found))
    found = find(groups, number, together)
    return sharding.reduced(ops.cast(found, "float32"))[1]


def find_norms(
    groups: Sequence[GradientGroup], number: int, *, sharding: Sharding = UNSHARDED
) -> Tensor:
    """float32[number]: the l2 norm of each gradient, by a pass of its own outside XLA.

    Where a gradient is not finite, neither is its norm; 0 for missing ones.
    """
    if not groups:
        return ops.zeros((number,), "float32")
    values, order = _one_by_one(groups)
    norms = _in_rows(backend.norms(values), order, number)
    return norms if sharding is UNSHARDED else ops.sqrt(sharding.reduced(ops.square(norms))[0])


def _one_by_one(groups: Sequence[GradientGroup]) -> tuple[list[Tensor], list[int]]:
    """The gradients of the groups, and which variable each belongs to."""
    rows = (ops.unstack(group.values) if group.stacked else [_values_of(group)] for group in groups)
    return list(itertools.chain.from_iterable(rows)), [i for group in groups for i in group.members]


def _look_for_nonfinite(values: Tensor) -> Columns:
    # `backend.reduce_columns` needs two columns on CPUs, and both must be used.
    nonfinite = ops.cast(ops.logical_not(ops.isfinite(values)), "int32")
    return nonfinite, nonfinite


@backend.compiled
def blame(nonfinite: Tensor) -> tuple[Tensor, Tensor]:
    """int32[] and int32[]: how many gradients are not finite, and the index of the one to blame.

    That is the last of them in the model's order, or 0: the backward pass computes its gradient
    first, and inf and NaN spread from there to the variables before it.
    """
    bad = ops.cast(nonfinite > 0, "int32")
    return backend.reduce_columns((bad, bad * ops.arange(bad.shape[0], dtype="int32")), (0,))


@backend.compiled
def blame_for_spike(norms: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """int32[] and float32[]: whose gradient has grown most, and how many times as large it is.

    Args:
        norms: float32[num_variables], of the step's gradients.
        before: float32[num_variables], of the last step that was measured. A norm below a
            thousandth of the largest counts as that thousandth: any gradient is many times as large
            as one that was 0.
    """
    growth = norms / ops.maximum(before, ops.maximum(ops.max(before) * 1e-3, 1e-30))
    index = ops.argmax(growth)
    return ops.cast(index, "int32"), ops.max(growth)
