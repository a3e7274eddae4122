"""Aliases that say what an argument is; tensors of the three backends share no base class."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Tensor: TypeAlias = Any  # tf.Tensor, jax.Array or torch.Tensor: what keras.ops takes and returns
Variable: TypeAlias = Any  # keras.Variable (tf.Variable too, where TensorFlow's trainer unwraps it)
Gradient: TypeAlias = Any  # Tensor, tf.IndexedSlices, or None for a variable that the loss misses
Tree: TypeAlias = Any  # nested lists, tuples and dicts of tensors
TwoLists: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor]]
DType: TypeAlias = str  # "float32", "bfloat16", "float16", ...
ON_HOST = (np.generic, np.ndarray)  # what the host has read (`torch.compile` knows no union type)


class Device(NamedTuple):
    """What the training runs on."""

    platform: str  # "cpu", "gpu" or "tpu"
    name: str  # as the maker calls it
    compute_capability: tuple[int, int] | None  # NVIDIA's (major, minor)


class DeviceMemory(NamedTuple):
    """Bytes of the first device."""

    in_use: int  # now
    peak: int  # the most since the last look


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A tensor in a list of operations: one place in a program, whatever it holds.

    Attributes:
        dtype: such as "float32", "int64", "bool" or "string".
        shape: None if even the rank is not known.
        number: of a constant that is one number, as its dtype holds it.
    """

    dtype: str
    shape: tuple[int | None, ...] | None
    number: float | None = None

    @property
    def is_one_number(self) -> bool:
        """Whether it holds one number."""
        return self.shape is not None and all(n == 1 for n in self.shape)

    @property
    def size(self) -> int:
        """How many numbers it holds, for each of a batch of unknown size."""
        return math.prod(n for n in self.shape or () if n is not None)


class PlannedProgram(NamedTuple):
    """What the compiler says of a program."""

    bytes: int  # the most that arguments, results and working memory take at once
    operations: float  # floating-point operations, as the program was before it was optimized


class ByIndex(NamedTuple):
    """How numbers that have the same index are added up, one after the other.

    Attributes:
        indices: the shape of the indices, without the axes along which each sample has its own.
            Any of these indices may be the same.
        dtype: what the sum is rounded to.
        is_cast_back_first: whether it is a gradient whose slices go back through a cast before they
            are added up.
    """

    indices: tuple[int | None, ...]
    dtype: DType
    is_cast_back_first: bool = False


class Operation(NamedTuple):
    """One operation of a program that a backend has traced.

    Attributes:
        kind: one of these, or empty.
            "note": a mark that `operations` was asked to set;
            "number": a constant that is one number; the same may be listed twice;
            "sequence": several numbers that come from nowhere (a range, an array in the code);
            "cast": numbers become those of another dtype;
            "bound": the larger or the smaller of each two is taken;
            "decompose": matrices are factored or inverted, or Fourier transforms taken, which not
                each backend can in half precision;
            "equal": they are compared for being the same;
            "order": they are compared for which is larger;
            "wave": their sine or cosine;
            "add": their sums;
            "subtract": their differences;
            "remainder": what a division leaves of them;
            "square": the square of each;
            "sum": their sums along axes;
            "sum by index": the sums of those that have the same index, one added after the other;
            "look up": those that have an index; its gradient is a sum by index;
            "move": the same numbers in other places, or chosen among them.
        inputs: what it computes with; empty where only the shape matters. Of a look up the table,
            then the indices.
        outputs: what it computes.
        label: what was given to `note`.
        by_index: how a sum by index, or the gradient of a look up, is added up.
    """

    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    label: Any = None
    by_index: ByIndex | None = None


# Kinds that have a `by_index`.
BY_INDEX = ("look up", "sum by index")
# Kinds whose outputs are their inputs, in another dtype or place, or bounded.
KEEPING = ("bound", "cast", "look up", "move", "note")


def shared_axes(axes: Sequence[int | None], parts: int | None) -> tuple[int | None, ...]:
    """The axes of indices of several parts along which they may be the same.

    Along an axis of unknown size, that of the batch, one of the parts tells the sample.
    """
    return tuple(n for n in axes if n is not None or parts == 1)
