"""Sums by index in half precision, and look-ups, whose gradients are sums by index.

`keras.ops.segment_sum` makes such a sum of the nodes of a graph, and the gradient of
`keras.ops.take` is such a sum. Each number is added to the sum so far, which is rounded: in
bfloat16 a sum of ones stays at 256, in float16 at 2048, however many more come. Nothing is inf or
NaN.
"""

import functools
import math
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from keras.layers import Embedding

from kmp._backend import backend
from kmp._backend.types import ByIndex, Operation, Value
from kmp._keras import is_inner_layer
from kmp._keras.calls import Call
from kmp.models.indices import whole_numbers
from kmp.models.programs import (
    FLOATS,
    INPUT,
    WEIGHT,
    Program,
    code_of,
    labelled,
    reached,
    with_callers,
)
from kmp.precision.trees import HALF_DTYPES

ADDS_UP_BY_INDEX = "adds up by index"


class SumByIndex(NamedTuple):
    """A sum by index in half precision.

    Attributes:
        layer: the layer, or the operation of a Functional model, whose code has it.
        dtype: the half precision.
        is_gradient: whether it is the gradient of what the layer looks up.
        is_cast_back_first: whether that is added up after it was cast back to half precision, even
            if the layer looks up in float32.
    """

    layer: Any
    dtype: str
    is_gradient: bool
    is_cast_back_first: bool

    @property
    def is_cheap_in_float32(self) -> bool:
        """Whether float32 helps, and costs little: the layer has no weights, and is no model."""
        is_plain = is_inner_layer(self.layer) and not self.layer.weights
        return is_plain and not self.is_cast_back_first


def sums_by_index(program: Program) -> list[SumByIndex]:
    """The sums by index that this machine rounds after each number, one of each layer and kind.

    It leaves out sums that have too few numbers to stop growing, where the model says how many
    there are; look-ups in what depends on no weight; and look-ups of an `Embedding`, which have a
    rule of their own. It finds none in a model that Keras cannot call symbolically.
    """
    found: dict[Any, SumByIndex] = {}
    for operations in program.operations:
        inputs = reached(operations or [], labelled(operations or [], INPUT))
        trained = reached(operations or [], labelled(operations or [], WEIGHT))
        for each, inside in with_callers(operations or ()):
            is_gradient = each.kind == "look up"
            if is_gradient and (_is_of_an_embedding(inside) or each.inputs[0] not in trained):
                continue
            how = each.by_index
            if how and (code := _code_of(inside, how)) and _stops(each, how, inputs):
                made = SumByIndex(code, how.dtype, is_gradient, how.is_cast_back_first)
                found.setdefault((id(code), *made[1:]), made)
    return list(found.values())


def _is_of_an_embedding(call: Call | None) -> bool:
    return call is not None and isinstance(call.layer, Embedding)


def _code_of(call: Call | None, sum_by_index: ByIndex) -> Any:
    """In whose code it is; a float32 layer, too, that does not decide about the dtype."""
    if call and sum_by_index.is_cast_back_first:
        return call.layer
    return code_of(call)


def _stops(operation: Operation, sum_by_index: ByIndex, inputs: set[Value]) -> bool:
    """Whether a sum may have more numbers than it takes to stop, and stops on this machine.

    Args:
        operation: a sum by index or a look-up.
        sum_by_index: how it is added up.
        inputs: what depends on the inputs of the model. Other indices are taken to come equally
            often.
    """
    dtype = sum_by_index.dtype
    if dtype not in HALF_DTYPES:
        return False
    most = whole_numbers(dtype)
    if not inputs.isdisjoint(x for x in operation.inputs if x.dtype.startswith(("int", "uint"))):
        sizes = [most + 1 if n is None else n for n in sum_by_index.indices]
        may_stop = math.prod(sizes) > most
    else:
        taken = max(x.size for x in operation.inputs if x.dtype in FLOATS)
        made = operation.outputs[0].size
        many, few = (made, taken) if operation.kind == "look up" else (taken, made)
        may_stop = many > most * few
    return may_stop and _rounds_each(dtype)


@functools.cache
def _rounds_each(dtype: str) -> bool:
    """Whether the gradient of a look-up is rounded after each number here: it is tried."""
    number = 2 * whole_numbers(dtype)
    weight = keras.Variable(np.zeros(1, "float32"), dtype="float32")

    def total():
        table = ops.reshape(ops.cast(weight, dtype), (1, 1))
        rows = ops.take(table, np.zeros(number, "int32"), axis=0)
        return ops.sum(ops.cast(rows, "float32"))

    _, (gradient,) = backend.gradients(total, [weight])
    return float(ops.convert_to_numpy(gradient)[0]) != number
