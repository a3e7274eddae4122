"""Aliases that say what an argument is; tensors of the three backends share no base class."""

import dataclasses
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


class PlannedProgram(NamedTuple):
    """What the compiler says of a program."""

    bytes: int  # the most that arguments, results and working memory take at once
    operations: float  # floating-point operations, as the program was before it was optimized


class Operation(NamedTuple):
    """One operation of a program that a backend has traced.

    Attributes:
        kind: one of these, or empty.
            "note": a mark that `operations` was asked to set;
            "number": a constant that is one number; the same may be listed twice;
            "sequence": several numbers that come from nowhere (a range, an array in the code);
            "cast": numbers become those of another dtype;
            "equal": they are compared for being the same;
            "wave": their sine or cosine;
            "add": their sums;
            "subtract": their differences;
            "square": the square of each;
            "sum": their sums along axes;
            "move": the same numbers in other places, or chosen among them.
        inputs: what it computes with; empty where only the shape matters.
        outputs: what it computes.
        label: what was given to `note`.
    """

    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    label: Any = None
