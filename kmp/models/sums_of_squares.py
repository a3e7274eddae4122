"""Sums of squares in float16, such as a norm makes: beyond 65504 they are inf.

What is divided by the root of such a sum becomes 0, and so do its gradients: nothing is inf or NaN
any more, and the model goes on without these numbers.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kmp._backend.types import KEEPING, Operation, Value
from kmp._keras import is_inner_layer
from kmp.models.programs import Program, code_of, with_callers

ADDS_UP_SQUARES = "adds up squares beyond 65504"
# The sum of fewer squares is within float16 up to a root mean square of 16.
_FEWEST = 256


class SumOfSquares(NamedTuple):
    """A sum of squares in float16.

    Attributes:
        layer: the layer, or the operation of a Functional model, whose code has it.
        number: how many squares it has.
    """

    layer: Any
    number: int

    @property
    def is_of_a_layer(self) -> bool:
        """Whether a layer has it, whose own dtype decides; not a model or an operation."""
        return is_inner_layer(self.layer)

    @property
    def is_cheap_in_float32(self) -> bool:
        """Whether float32 costs the layer little: it has no more weights than numbers to square."""
        return self.is_of_a_layer and self.layer.count_params() <= self.number


def sums_of_squares(program: Program) -> list[SumOfSquares]:
    """The sums of 256 squares or more in float16, the largest of each layer.

    None are found in a model that Keras cannot call symbolically.
    """
    found: dict[int, SumOfSquares] = {}
    for operations in program.operations:
        for each in _sums(operations or ()):
            known = found.get(id(each.layer))
            if known is None or each.number > known.number:
                found[id(each.layer)] = each
    return list(found.values())


def _sums(operations: Iterable[Operation]) -> Iterator[SumOfSquares]:
    squares: set[Value] = set()
    sums: dict[Value, int] = {}  # how many squares are in each
    for each, inside in with_callers(operations):
        if each.kind == "square":
            squares.update(x for x in each.outputs if x.dtype == "float16")
        elif each.kind in KEEPING and not squares.isdisjoint(each.inputs):
            squares.update(each.outputs)  # XLA adds up in float32
        elif each.kind == "sum" and not squares.isdisjoint(each.inputs):
            number = each.inputs[0].size // max(each.outputs[0].size, 1)
            sums |= dict.fromkeys(each.outputs, number)
        elif each.kind in KEEPING:
            sums |= {x: sums[y] for y in each.inputs if y in sums for x in each.outputs}
        for x in each.outputs:
            if x.dtype == "float16" and sums.get(x, 0) >= _FEWEST and (code := code_of(inside)):
                yield SumOfSquares(code, sums[x])
