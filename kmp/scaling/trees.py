"""Verbs over nested structures of tensors and gradients, inside and outside compiled code."""

from collections.abc import Callable
from typing import TypeVar

import keras
from keras import ops

from kmp import _backend
from kmp._backend.types import Tensor, Tree
from kmp.precision.casts import at_least_float32, is_complex, is_float

T = TypeVar("T")


def all_finite(tree: Tree) -> Tensor:
    """Tell whether no number in a structure of tensors is inf or NaN.

    Args:
        tree: nested structure of tensors of any shape; integers, bools and None count as finite,
            `tf.IndexedSlices` are looked at by their values, complex numbers by both parts.

    Returns:
        bool[], True for an empty structure.

    Example:

    >>> bool(all_finite({"a": [1.0, 2.0], "b": None}))
    True
    """
    leaves = [_backend.gradient_values(x) for x in keras.tree.flatten(tree) if x is not None]
    leaves += [part(x) for x in leaves if is_complex(x) for part in (ops.real, ops.imag)]
    floats = [ops.convert_to_tensor(x) for x in leaves if is_float(x)]
    floats = [x for x in floats if 0 not in x.shape]
    if not floats:
        return ops.convert_to_tensor(True, "bool")
    return ops.all(_backend.are_finite(floats, [False] * len(floats)))


def max_abs(tree: Tree) -> Tensor:
    """Return the largest absolute value in a structure of gradients, over finite numbers.

    Args:
        tree: nested structure of tensors of any shape; integers, bools and None do not count, the
            rows of `tf.IndexedSlices` that meet in one index are summed.

    Returns:
        float32[], 0 for an empty structure.

    Example:

    >>> float(max_abs({"a": [1.0, -2.0], "b": None}))
    2.0
    """

    def largest(x: Tensor) -> Tensor:
        x = ops.cast(_backend.gradient_rows(x), "float32")
        return ops.max(ops.where(ops.isfinite(x), ops.abs(x), 0.0), initial=0.0)

    leaves = [largest(x) for x in keras.tree.flatten(tree) if x is not None and is_float(x)]
    return ops.max(ops.stack(leaves)) if leaves else ops.zeros((), "float32")


def select_tree(pred: Tensor, on_true: T, on_false: T) -> T:
    """Choose between two structures of tensors, leaf by leaf, without branching.

    Args:
        pred: bool[].
        on_true: nested structure of tensors; None may stand where both have it.
        on_false: the same structure with the same shapes and dtypes.

    Returns:
        The chosen structure. NaN in the leaf that is not chosen does no harm.

    Raises:
        ValueError: if `pred` is not a scalar or the structures differ.

    Example:

    >>> [int(x) for x in select_tree(False, (1, 2), (3, 4))]
    [3, 4]

    Source: JMP, `select_tree`.
    """
    pred = ops.cast(ops.convert_to_tensor(pred), "bool")
    if len(pred.shape) != 0:
        raise ValueError(
            f"`pred` must be a boolean scalar. Received: shape={tuple(pred.shape)}. Reduce it "
            "first, for example with keras.ops.all(pred)."
        )
    keras.tree.assert_same_structure(on_true, on_false)

    def choose(a, b):
        if (a is None) != (b is None):
            raise ValueError(
                "`on_true` and `on_false` must have the same structure. Received: None in one of "
                f"them where the other has {a if b is None else b}. Put None, or a tensor such as "
                "keras.ops.zeros_like of the other, in both."
            )
        return None if a is None else ops.where(pred, a, b)

    return keras.tree.map_structure(choose, on_true, on_false)


def map_gradients(function: Callable[[Tensor], Tensor], gradients: Tree) -> Tree:
    """Apply `function` to every float leaf; None stays None, sparse gradients stay sparse."""

    def leaf(g):
        return _backend.map_gradient_values(function, g) if is_float(g) else g

    return keras.tree.map_structure(leaf, gradients)


def multiply(tree: Tree, factor: Tensor) -> Tree:
    """Return every float or complex leaf times a scalar, in at least float32; others unchanged."""
    leaves = keras.tree.flatten(tree)
    leaves = [ops.multiply(x, ops.cast(factor, x.dtype)) if is_complex(x) else x for x in leaves]
    places = [i for i, x in enumerate(leaves) if is_float(x)]
    wide = [_backend.map_gradient_values(at_least_float32, leaves[i]) for i in places]
    products = _backend.multiply(wide, factor)
    for i, product in zip(places, products, strict=True):
        leaves[i] = product
    return keras.tree.pack_sequence_as(tree, leaves)
