"""Which layers round what must not be rounded: indices, positions, and raw inputs.

An `Embedding` takes ids that come as floats, and so do one-hot vectors, gathers and tables. float32
holds every whole number up to 2**24, float16 up to 2**11 and bfloat16 up to 2**8. So a layer that
only hands ids on, such as a `Reshape`, must not cast them. Nor must raw inputs be rounded before a
normalization subtracts their mean: in bfloat16 the years 2021 to 2025 are one number.

What is computed with numbers tells whether they are ids: the model is traced, without numbers, and
followed back from where floats become integers. A value that depends on trainable weights is not an
id, and is not followed.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras
from keras.layers import Wrapper

from kmp._backend.types import KEEPING, Operation, Value
from kmp._keras import is_graph, is_preprocessing
from kmp._keras.calls import Call
from kmp.models.programs import (
    FLOATS,
    INPUT,
    WEIGHT,
    Program,
    call_of,
    labelled,
    reached,
    received,
    whose,
)
from kmp.precision.float_formats import formats
from kmp.precision.trees import HALF_DTYPES

INDICES = "carries indices"
ANGLES = "carries angles or times: their sine is taken"
DISTANCES = "carries positions: their differences are taken"
RAW_INPUTS = "hands raw inputs to preprocessing layers"
NORMALIZED = "carries raw inputs that are normalized"
DIFFERENCES = "carries raw inputs that something is subtracted from"
EQUALS = "compares raw inputs with a number"
ORDERED = "compares raw inputs with a threshold or each other"
INSIDE = "mixes indices with what the layers in it return"
NEEDS_INTEGERS = "rounds float indices: pass integers"  # its code mixes what it gets with half
# Under these half precision rounds numbers, and may keep enough of them.
LESS_GRAVE = (NORMALIZED, DIFFERENCES)
REASONS = (INDICES, ANGLES, DISTANCES, RAW_INPUTS, EQUALS, ORDERED, *LESS_GRAVE, NEEDS_INTEGERS)
# These count only for layers without weights: the code of others would mix float32 with weights.
_OF_PLAIN_CODE = (EQUALS, ORDERED, DIFFERENCES)

_LOOKUPS = (
    keras.layers.CategoryEncoding,
    keras.layers.Discretization,
    keras.layers.HashedCrossing,
    keras.layers.Hashing,
    keras.layers.IntegerLookup,
    keras.layers.StringLookup,
)
# They subtract a mean, after which numbers that lie close together differ by rounding errors alone.
_NORMALIZATIONS = (
    keras.layers.BatchNormalization,
    keras.layers.GroupNormalization,
    keras.layers.LayerNormalization,
)
# Half precision holds each of their numbers, and quantized layers multiply them.
_SMALL = {"int8", "uint8", "int4", "uint4"}


class Rounding(NamedTuple):
    """A layer that rounds what must not be rounded.

    Attributes:
        layer: the layer.
        why: one of the reasons above.
        by_itself: whether its own code casts; otherwise Keras casts its inputs when it is called.
    """

    layer: keras.Layer
    why: str
    by_itself: bool


def roundings(program: Program, certain: bool = False) -> list[Rounding] | None:
    """The layers that round indices or raw inputs to half precision, under their present policies.

    Layers whose own code casts are looked for where Keras casts no inputs any more.

    Args:
        program: of the model.
        certain: leave out what may be right: angles of positions that are few; indices of a table
            so small that half precision holds them all; and inputs that are right if they come as
            integers. A Functional model says whether they do; of another model nobody knows.

    Returns:
        One for each layer; None if Keras cannot call the model symbolically.
    """
    found: dict[int, Rounding] = {}
    for part, operations in zip(program.parts, program.operations, strict=True):
        if operations is None:
            return None
        unknown: list[Value] = []
        if certain and not is_graph(part):
            inputs = labelled(operations, INPUT)
            unknown = [x for x in inputs if not _is_a_number(operations, x)]
        for rounding in _roundings(operations, unknown, certain):
            if rounding.why not in _OF_PLAIN_CODE or not rounding.layer.weights:
                found.setdefault(id(rounding.layer), rounding)
    return list(found.values())


def of_activations(program: Program) -> set[int]:
    """The ids of preprocessing layers that get nothing but what trained layers have made."""
    raw: set[int] = set()
    made: set[int] = set()
    for operations in program.operations:
        weighted = reached(operations or [], labelled(operations or [], WEIGHT))
        for each in operations or ():
            if (call := call_of(each)) and received(each) and is_preprocessing(call.layer):
                (made if weighted.issuperset(each.inputs) else raw).add(id(call.layer))
    return made - raw


def whole_numbers(dtype: str) -> int:
    """The number up to which a half precision holds every whole number."""
    return round(2 / formats[dtype].eps)


def normalizes(layer: Any) -> bool:
    """Whether a layer, or the one that it wraps, is a normalization that subtracts a mean."""
    inner = layer.layer if isinstance(layer, Wrapper) else layer
    return isinstance(inner, _NORMALIZATIONS)


# Following


def _roundings(operations: list[Operation], unknown: list[Value], certain: bool) -> list[Rounding]:
    weighted = reached(operations, labelled(operations, WEIGHT))
    known = {x for each in operations for x in (*each.inputs, *each.outputs)} - weighted
    known -= reached(operations, unknown)
    by_keras, by_themselves = [], []
    needed: dict[str, set[Value]] = {}
    for why, consumer, value in _consumed(operations, known):
        path = _leading_to(operations, [value], known)
        if why == DISTANCES and _counts_at_most(operations, path, 1):
            continue  # half precision holds them all
        if not (certain and _may_be_right(operations, path, consumer, why)):
            needed.setdefault(why, set()).update(path)
    for why in sorted(needed, key=lambda why: why in LESS_GRAVE):
        halves = {x for x in needed[why] if x.dtype in HALF_DTYPES}
        inside: Call | None = None
        for each in operations:
            rounds = not halves.isdisjoint(each.outputs)
            if call := call_of(each):
                inside = call if received(each) else call.parent
                if rounds and received(each) and _casts_inputs(call.layer):
                    by_keras.append(Rounding(call.layer, why, False))
            elif rounds and halves.isdisjoint(each.inputs) and (layer := whose(inside)):
                by_themselves.append(Rounding(layer, why, True))
    # What Keras casts shows twice, for it casts in the code of the layer that calls.
    return by_keras or by_themselves


def _consumed(
    operations: list[Operation], known: set[Value]
) -> Iterator[tuple[str, Operation, Value]]:
    """The floats that must be exact, why, and what is done with them.

    Args:
        operations: of the program.
        known: the values that depend neither on weights nor on inputs whose kind nobody knows.
    """
    inputs = reached(operations, labelled(operations, INPUT))
    sequences = [x for each in operations if each.kind == "sequence" for x in each.outputs]
    several = (reached(operations, sequences) | inputs) & known
    counted = reached(operations, filter(_is_index, sequences))
    numbers = _other_than_0(operations)
    for each in operations:
        for x in {x for x in each.inputs if x in known and x.dtype in FLOATS}:
            becomes_index = each.kind == "cast" and any(map(_is_index, each.outputs))
            # With each of several numbers, as a one-hot vector does.
            compared = each.kind == "equal" and several.intersection(each.inputs) - {x}
            if becomes_index or (compared and x in several):
                yield INDICES, each, x
            elif each.kind == "equal" and x in inputs and numbers.intersection(each.inputs):
                yield EQUALS, each, x
            elif each.kind == "order" and x in inputs and _is_order(each, x, numbers | several):
                yield ORDERED, each, x
            elif each.kind == "wave":
                yield ANGLES, each, x
            elif each.kind == "subtract" and x in counted and x not in inputs:
                yield DISTANCES, each, x
            elif each.kind in ("subtract", "remainder") and x in inputs:
                yield DIFFERENCES, each, x
            elif x not in inputs:
                continue
            elif (call := call_of(each)) and received(each):
                if is_preprocessing(call.layer):
                    yield INDICES if isinstance(call.layer, _LOOKUPS) else RAW_INPUTS, each, x
                elif normalizes(call.layer):
                    yield NORMALIZED, each, each.outputs[0]  # which Keras has cast


def _is_order(operation: Operation, value: Value, compared: set[Value]) -> bool:
    """Whether the order of a value and any of these is asked for, or of the operation's own."""
    others = {x for x in operation.inputs if x is not value}
    return not others or not compared.isdisjoint(others)


def _other_than_0(operations: list[Operation]) -> set[Value]:
    """The constants that are one number, and not 0: half precision rounds hardly anything to 0."""
    found: set[Value] = set()
    for each in operations:
        given = [x for x in each.inputs if x in found or x.number]
        found.update(given)
        if given and each.kind in KEEPING and len(each.inputs) == 1:
            found.update(each.outputs)
    return found


def _leading_to(
    operations: list[Operation], wanted: Iterable[Value], raw: set[Value]
) -> set[Value]:
    """The raw values that `wanted` is made of.

    A comparison, or the place of a maximum, does not need the exact numbers that it looks at.
    """
    found = set(wanted)
    for each in reversed(operations):
        for made in found.intersection(each.outputs):
            for given in raw.intersection(each.inputs) - found:
                ordered = _is_index(made) and given.dtype in FLOATS and each.kind != "cast"
                if given.dtype != "bool" and not ordered:
                    found.add(given)
    return found


def _may_be_right(
    operations: list[Operation], path: set[Value], consumer: Operation, why: str
) -> bool:
    """Whether half precision may hold what it must hold, as far as one can know.

    Angles of positions that are counted are wrong by up to a quarter where these go beyond a
    quarter of the whole numbers that half precision holds. Those of raw inputs may have any size.
    """
    if why == DIFFERENCES:
        if consumer.kind == "remainder":
            return False
        # 1 - x, where x is a mask
        return len(consumer.inputs) < 2 or any(x.is_one_number for x in consumer.inputs)
    if why == ORDERED:
        return not any(_beyond_whole_numbers(x, path) for x in consumer.inputs)
    if why == ANGLES:
        raw = path.intersection(labelled(operations, INPUT))
        return not raw and _counts_at_most(operations, path, 0.25)
    return why not in (EQUALS, DISTANCES) and _holds_all(operations, path, consumer)


def _beyond_whole_numbers(constant: Value, path: set[Value]) -> bool:
    """Whether half precision rounds whole numbers as large as a constant."""
    halves = {x.dtype for x in path} & set(HALF_DTYPES)
    number = abs(constant.number or 0)
    return any(number > whole_numbers(half) for half in halves)


def _counts_at_most(operations: list[Operation], path: set[Value], share: float) -> bool:
    """Whether positions, where a layer counts them, go up to a share of the whole numbers at most.

    Of those that half precision holds. What is not counted, or of a length that is not known, is
    not looked at.
    """
    counted = [
        x for each in operations if each.kind == "sequence" for x in each.outputs if _is_index(x)
    ]
    sizes = [n for x in path.intersection(counted) for n in x.shape or () if n is not None]
    halves = {x.dtype for x in path} & set(HALF_DTYPES)
    return all(max(sizes, default=0) <= whole_numbers(half) * share for half in halves)


def _holds_all(operations: list[Operation], path: set[Value], consumer: Operation) -> bool:
    """Whether indices are those of a table so small that half precision holds each of them.

    Only if nothing was computed on the way: a table says nothing about the size of divided ids.
    """
    for each in operations:
        makes = not path.isdisjoint(each.outputs) and not path.isdisjoint(each.inputs)
        if makes and each.kind not in (*KEEPING, "sequence"):
            return False
    indices = set(consumer.outputs) if consumer.kind == "cast" else set()
    tables = list(consumer.inputs) if consumer.kind == "equal" else []
    for each in operations:
        if indices.isdisjoint(each.inputs):
            continue
        made = set(map(_is_index, each.outputs))
        if made == {True} and each.kind in ("add", *KEEPING):
            indices.update(each.outputs)
        elif made == {True}:
            return False
        elif each.kind == "equal" or {x.dtype for x in each.outputs} != {"bool"}:
            tables += [x for x in (*each.inputs, *each.outputs) if x not in indices]
    sizes = [n for x in tables for n in x.shape or () if n is not None]
    halves = {x.dtype for x in path} & set(HALF_DTYPES)
    return bool(sizes) and all(max(sizes) <= whole_numbers(half) for half in halves)


def _is_a_number(operations: list[Operation], value: Value) -> bool:
    """Whether an input is also computed with, together with weights, as integers seldom are."""
    weighted = reached(operations, labelled(operations, WEIGHT))
    return not weighted.isdisjoint(reached(operations, [value], floats_only=True))


def _is_index(value: Value) -> bool:
    return value.dtype.startswith(("int", "string", "uint")) and value.dtype not in _SMALL


# Layers


def _casts_inputs(layer: Any) -> bool:
    """Whether Keras casts the inputs of a layer to its compute dtype."""
    return getattr(layer, "autocast", False) and not is_graph(layer) and not is_preprocessing(layer)
