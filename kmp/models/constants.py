"""Constants that half precision rounds to inf or to 0, found by what the model computes with.

The model is traced twice, without numbers: under its own policies, and with its half layers in
float32. A number that a layer's code has in float32 only, where half precision has inf or 0, is
such a constant, however it is spelled: as a literal, an attribute, a default, or in the config.
"""

import collections
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import Layer
from keras.layers import Activation, Lambda

from kmp._backend.types import KEEPING, Operation, Value
from kmp._keras import is_inner_layer, is_kerass_own
from kmp._keras.calls import Call
from kmp.models.programs import Program, call_of, received
from kmp.precision.float_formats import formats
from kmp.precision.trees import HALF_DTYPES

HAS_A_CONSTANT = "has a constant that half precision loses"


class LostConstant(NamedTuple):
    """A constant that becomes inf or 0.

    Attributes:
        layer: the layer, or the operation of a Functional model, whose code holds it.
        number: as it is written.
        dtype: the half precision that it is rounded to.
    """

    layer: Any
    number: float
    dtype: str

    @property
    def is_cheap_in_float32(self) -> bool:
        """Whether float32 costs the layer little: it has no weights, and is no model."""
        return is_inner_layer(self.layer) and not self.layer.weights

    @property
    def is_of_kerass_code(self) -> bool:
        """Whether Keras's own code of a layer has it, and the layer was not given it."""
        runs_given_code = isinstance(self.layer, Activation | Lambda)
        if runs_given_code or not (isinstance(self.layer, Layer) and is_kerass_own(self.layer)):
            return False
        given = keras.tree.flatten(self.layer.get_config())
        numbers = [float(np.float32(x)) for x in given if isinstance(x, int | float)]
        return self.number not in numbers


def lost_constants(program: Program) -> list[LostConstant]:
    """The constants that the half layers of a model round to inf or to 0.

    None are found in a model that Keras cannot call symbolically.
    """
    found: dict[tuple[int, float], LostConstant] = {}
    both = zip(program.operations, program.operations_in_float32, strict=True)
    for half, full in both:
        exact = {key: numbers for key, (_, numbers) in _numbers_by_call(full).items()}
        for key, (call, numbers) in _numbers_by_call(half).items():
            for number, dtype in _lost(numbers, exact.get(key, [])):
                lost = LostConstant(call.layer, number, dtype)
                found.setdefault((id(call.layer), number), lost)
    return list(found.values())


Numbers = list[tuple[str, float]]  # dtype, and the number as it is in it


def _lost(numbers: Numbers, exact: Numbers) -> Iterator[tuple[float, str]]:
    """The numbers that are in `exact` alone, with the dtype that has inf or 0 in their place."""
    present = {n for dtype, n in numbers if dtype}
    count = collections.Counter(n for _, n in numbers)
    before = collections.Counter(n for d, n in exact if d not in HALF_DTYPES)
    for dtype in HALF_DTYPES:
        rounded = {n for d, n in numbers if d == dtype}
        for number in dict.fromkeys(n for _, n in exact):
            if number in present or not math.isfinite(number):
                continue
            overflows = abs(number) > formats[dtype].largest
            vanishes = abs(number) < formats[dtype].smallest_subnormal
            instead = math.copysign(math.inf, number) if overflows else 0.0
            is_new = count[instead] > before[instead]  # a maximum begins with -inf in any dtype
            if (overflows or vanishes) and instead in rounded and is_new:
                yield number, dtype


def _numbers_by_call(operations: list[Operation] | None) -> dict[str, tuple[Call, Numbers]]:
    """The constants in the code of each call, by the call's key."""
    found: dict[str, tuple[Call, Numbers]] = {}
    inside: Call | None = None
    takers: dict[Value, list[Operation]] = {}
    halves: dict[Value, str] = {}  # the half precision that values are in, or were until a cast
    for each in operations or ():
        for value in each.inputs:
            takers.setdefault(value, []).append(each)
            if each.kind == "cast" and value.dtype in HALF_DTYPES:
                halves |= dict.fromkeys(each.outputs, value.dtype)
        halves |= {x: x.dtype for x in (*each.inputs, *each.outputs) if x.dtype in HALF_DTYPES}
    for each in operations or ():
        if call := call_of(each):
            inside = call if received(each) else call.parent
        elif each.kind == "number" and inside is not None:
            _, numbers = found.setdefault(inside.key, (inside, _passed(inside)))
            numbers.append(_computed_with(each.outputs[0], takers, halves))
    return found


def _computed_with(
    constant: Value, takers: dict[Value, list[Operation]], halves: dict[Value, str]
) -> tuple[str, float]:
    """A constant as the operations compute with it, which may round it to their own dtype.

    A value that was once in half precision never equals a number that half precision cannot hold.
    """
    number = 0.0 if constant.number is None else constant.number
    reached = [constant]
    for value in reached:
        for each in takers.get(value, ()):
            for made in each.outputs:
                others = each.inputs if made.dtype == "bool" else ()
                half = [halves[x] for x in (made, *others) if x in halves]
                if half and constant.dtype not in HALF_DTYPES:
                    return half[0], _rounded(number, half[0])
                if each.kind in KEEPING and made.is_one_number and made not in reached:
                    reached.append(made)
    return constant.dtype, number


def _rounded(number: float, dtype: str) -> float:
    """What becomes of a number in half precision, if that is inf or 0."""
    if abs(number) > formats[dtype].largest:
        return math.copysign(math.inf, number)
    return 0.0 if abs(number) < formats[dtype].smallest_subnormal / 2 else number


def _passed(call: Call) -> Numbers:
    """The numbers that an operation of a Functional model is called with.

    What the code of a layer is passed is not looked at: it shows in what that code computes.
    """
    if isinstance(call.layer, Layer):
        return []
    numbers = [x for x in keras.tree.flatten(call.passed) if isinstance(x, int | float)]
    return [("", float(np.float32(x))) for x in numbers]
