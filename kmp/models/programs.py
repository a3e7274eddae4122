"""What a model computes, as the operations of a symbolic call, with marks for calls and weights."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import Layer

from kmp._backend import backend
from kmp._backend.types import Operation, Value
from kmp._keras import (
    call_in_training,
    is_graph,
    layers_of,
    own_state,
    own_weights,
    symbolic_outputs,
    with_mask_of,
)
from kmp._keras.calls import Call, SymbolicRecorder, recording
from kmp._keras.effects import Effect, watching_effects
from kmp.models.output_layers import called_models
from kmp.precision.temporary import under
from kmp.precision.trees import HALF_DTYPES

FLOATS = {"float16", "bfloat16", "float32", "float64"}
INPUT, WEIGHT = "input of the model", "weight"  # labels; a pair of call and role is one too


class Program:
    """What a built model computes, traced when it is first asked for, and once.

    Args:
        model: built; its policies stay as they are while this is used.

    Attributes:
        model: the same.
    """

    def __init__(self, model: Any):
        self.model = model

    @functools.cached_property
    def parts(self) -> list[Any]:
        """The models whose programs these are: a model without `call` has several."""
        return list(called_models(self.model))

    @functools.cached_property
    def operations(self) -> list[list[Operation] | None]:
        """What each part computes; None if Keras cannot call it symbolically."""
        return [_traced(part) for part in self.parts]

    @functools.cached_property
    def operations_in_float32(self) -> list[list[Operation] | None]:
        """The same with all layers in float32."""
        with under(self.model, "float32"):
            return [_traced(part) for part in self.parts]

    @functools.cached_property
    def effects(self) -> list[Effect]:
        """What the layers do in training beside their outputs; of parts that Keras can call."""
        found: list[Effect] = []
        for part in self.parts:
            symbolic_outputs(part, functools.partial(_trained, part, found))
        return [*dict.fromkeys(found)]


def _trained(model: Any, found: list[Effect], *inputs: Any) -> Any:
    # On PyTorch a variable in a symbolic call is only cast if a scope holds its value.
    variables = [v for x in layers_of(model) for v in (*own_weights(x), *own_state(x))]
    values = [(v, v.value) for v in variables]
    with keras.StatelessScope(state_mapping=values), watching_effects(found):
        return call_in_training(model, *inputs)


def _traced(model: Any) -> list[Operation] | None:
    """What a model computes, with marks; None if it cannot be called symbolically."""
    found: list[Operation] = []

    def run(note, *inputs):
        def mark(time, call, role, tree):
            return keras.tree.map_structure(lambda x: with_mask_of(x, note(x, (call, role))), tree)

        inputs = keras.tree.map_structure(lambda x: note(x, INPUT), inputs)
        variables = [v for layer in layers_of(model) for v in own_weights(layer)]
        weights = [(v, note(v.value, WEIGHT)) for v in variables]
        with keras.StatelessScope(state_mapping=weights), recording(SymbolicRecorder(mark)):
            model(*inputs)

    def call(*inputs):
        nonlocal found
        found = found or backend.operations(run, inputs)  # PyTorch is called twice
        return inputs

    with np.errstate(over="ignore"):  # a constant of the code may become inf
        return found if symbolic_outputs(model, call) is not None else None


def labelled(operations: list[Operation], label: str) -> list[Value]:
    """The values with a label."""
    return [x for each in operations if each.label == label for x in each.outputs]


def reached(
    operations: list[Operation], sources: Iterable[Value], floats_only: bool = False
) -> set[Value]:
    """The values that depend on `sources`."""
    found = set(sources)
    for each in operations:
        if not found.isdisjoint(each.inputs):
            found.update(x for x in each.outputs if not floats_only or x.dtype in FLOATS)
    return found


def call_of(operation: Operation) -> Call | None:
    """The call whose inputs or outputs a mark is on."""
    return operation.label[0] if isinstance(operation.label, tuple) else None


def received(operation: Operation) -> bool:
    """Whether a mark is on the inputs of a call."""
    return operation.label[1] == "input"


def with_callers(
    operations: Iterable[Operation],
) -> Iterator[tuple[Operation, Call | None]]:
    """Each operation, and the call in whose code it is."""
    inside: Call | None = None
    for each in operations:
        if call := call_of(each):
            inside = call if received(each) else call.parent
        yield each, inside


def code_of(call: Call | None) -> Any:
    """Whose code an operation is in: a layer, an operation of a Functional model, or None.

    For a layer that does not compute in half precision it is None.
    """
    if layer := whose(call):
        return layer
    return None if call is None or isinstance(call.layer, Layer) else call.layer


def whose(call: Call | None) -> Layer | None:
    """The layer in whose code an operation is, if its policy decides about half precision there."""
    while call and not getattr(call.layer, "autocast", False):  # an operation, or an Embedding
        call = call.parent
    if call is None or is_graph(call.layer) or call.layer.compute_dtype not in HALF_DTYPES:
        return None
    return call.layer
