"""Constants that half precision rounds to what they are not, found by what a model computes with.

The model is traced twice, without numbers: under its own policies, and with its half layers in
float32. A number that a layer's code has in float32 only, where half precision has inf or 0, is
such a constant, however it is spelled: as a literal, an attribute, a default, or in the config.
So is a bound such as 1 - 1e-4, in whose place half precision has 1.
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
from kmp.models.programs import Program, with_callers
from kmp.precision.float_formats import formats
from kmp.precision.trees import HALF_DTYPES

HAS_A_CONSTANT = "has a constant that half precision loses"


class LostConstant(NamedTuple):
    """A constant that becomes inf or 0, or a bound that becomes 1.

    Attributes:
        layer: the layer, or the operation of a Functional model, whose code holds it.
        number: as it is written.
        dtype: the half precision that it is rounded to.
        instead: what it becomes.
        is_of_kerass_code: whether the code that holds it is Keras's own, and was not given it.
    """

    layer: Any
    number: float
    dtype: str
    instead: float
    is_of_kerass_code: bool

    @property
    def is_cheap_in_float32(self) -> bool:
        """Whether float32 costs the layer little: it has no weights, and is no model."""
        return is_inner_layer(self.layer) and not self.layer.weights


def lost_constants(program: Program) -> list[LostConstant]:
    """The constants that the half layers of a model lose.

    None are found in a model that Keras cannot call symbolically.
    """
    found: dict[tuple[int, float], LostConstant] = {}
    both = zip(program.operations, program.operations_in_float32, strict=True)
    for half, full in both:
        exact = {key: constants for key, (_, constants) in _constants_by_call(full).items()}
        for key, (call, constants) in _constants_by_call(half).items():
            for number, dtype, instead in _lost(constants, exact.get(key, [])):
                of_keras = is_kerass_own(call.layer) and not _is_given(call, number)
                lost = LostConstant(call.layer, number, dtype, instead, of_keras)
                found.setdefault((id(call.layer), number), lost)
    return list(found.values())


def _is_given(call: Call, number: float) -> bool:
    """Whether a layer or an operation was given a number, or the code that has it."""
    layer = call.layer
    if isinstance(layer, Activation | Lambda):
        return True
    given = layer.get_config() if isinstance(layer, Layer) else (vars(layer), call.passed)
    return float(np.float32(number)) in _numbers_of(given)


def _numbers_of(given: Any) -> list[float]:
    """The numbers in a structure, as float32 has them."""
    return [float(np.float32(x)) for x in keras.tree.flatten(given) if isinstance(x, int | float)]


class Constant(NamedTuple):
    """A constant as a program computes with it.

    Attributes:
        dtype: what it is computed with in; empty for an argument of an operation of a graph.
        number: as it is in that dtype.
        is_bound: whether the larger or the smaller of it and something else is taken.
    """

    dtype: str
    number: float
    is_bound: bool = False


def _lost(constants: list[Constant], exact: list[Constant]) -> Iterator[tuple[float, str, float]]:
    """The numbers that are in `exact` alone, the half precision, and what it has in their place."""
    present = {x.number for x in constants if x.dtype}
    count = collections.Counter(x.number for x in constants)
    before = collections.Counter(x.number for x in exact if x.dtype not in HALF_DTYPES)
    bounds = {x.number for x in exact if x.is_bound}
    for dtype in HALF_DTYPES:
        rounded = {x.number for x in constants if x.dtype == dtype}
        for number in dict.fromkeys(x.number for x in exact):
            if number in present or not math.isfinite(number):
                continue
            instead = _instead(number, dtype, number in bounds)
            # It is new: a maximum begins with -inf in any dtype.
            if instead != number and instead in rounded and count[instead] > before[instead]:
                yield number, dtype, instead


def _instead(number: float, dtype: str, is_bound: bool) -> float:
    """What half precision has in the place of a number, if it loses it."""
    size = abs(number)
    if size > formats[dtype].largest:
        return math.copysign(math.inf, number)
    if size < formats[dtype].smallest_subnormal / 2:
        return 0.0
    eps = formats[dtype].eps
    if is_bound and 1 - eps / 4 <= size <= 1 + eps / 2:
        return math.copysign(1, number)
    return number


def _constants_by_call(
    operations: list[Operation] | None,
) -> dict[str, tuple[Call, list[Constant]]]:
    """The constants in the code of each call, by the call's key."""
    found: dict[str, tuple[Call, list[Constant]]] = {}
    takers: dict[Value, list[Operation]] = {}
    halves: dict[Value, str] = {}  # the half precision that values are in, or were until a cast
    for each in operations or ():
        for value in each.inputs:
            takers.setdefault(value, []).append(each)
            if each.kind == "cast" and value.dtype in HALF_DTYPES:
                halves |= dict.fromkeys(each.outputs, value.dtype)
        halves |= {x: x.dtype for x in (*each.inputs, *each.outputs) if x.dtype in HALF_DTYPES}
    for each, inside in with_callers(operations or ()):
        if each.kind == "number" and inside is not None:
            _, constants = found.setdefault(inside.key, (inside, _passed(inside)))
            constants.append(_computed_with(each.outputs[0], takers, halves))
    return found


def _computed_with(
    value: Value, takers: dict[Value, list[Operation]], halves: dict[Value, str]
) -> Constant:
    """A constant as the operations compute with it, which may round it to their own dtype.

    What was once in half precision never equals a number that half precision cannot hold.
    """
    dtype, number, is_bound = value.dtype, value.number or 0.0, False
    reached = [value]
    for each in reached:
        for taker in takers.get(each, ()):
            is_bound = is_bound or taker.kind == "bound"
            for made in taker.outputs:
                others = taker.inputs if made.dtype == "bool" else ()
                half = [halves[x] for x in (made, *others) if x in halves]
                if half and dtype not in HALF_DTYPES:
                    dtype = half[0]
                if taker.kind in KEEPING and made.is_one_number and made not in reached:
                    reached.append(made)
    if dtype != value.dtype:
        number = _instead(number, dtype, is_bound)
    return Constant(dtype, number, is_bound)


def _passed(call: Call) -> list[Constant]:
    """The numbers that an operation of a Functional model is called with.

    What the code of a layer is passed is not looked at: it shows in what that code computes.
    """
    if isinstance(call.layer, Layer):
        return []
    return [Constant("", x) for x in _numbers_of(call.passed)]
