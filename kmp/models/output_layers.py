"""Which layers make a model's outputs: the part that is to stay in full precision."""

from collections.abc import Iterable
from typing import Any

import keras
from keras import Layer, Model
from keras.layers import InputLayer

from kmp._keras import is_graph, layers_of, made_by, parts_of, symbolic_outputs
from kmp._keras.calls import Call, Recorder, recording


def called_models(model: Any) -> list[Model]:
    """The model, or the models inside it if it has no `call` and its train step calls these."""
    if type(model).call is not Model.call:
        return [model]
    return [part for part in parts_of(model) if isinstance(part, Model)]


def output_layers(model: Any) -> list[Layer]:
    """The last layers with weights on the way to each output, and all layers after them.

    A softmax in float32 is of no use behind logits in half precision, so both count. Functional and
    Sequential models are read as graphs; other models are called with symbolic inputs. A model
    without `call`, as of a GAN, has the output layers of the models inside it. If none of this is
    possible, the layer with weights that was created last counts.
    """
    if is_graph(model):
        found: dict[int, Any] = {}
        for tensor in model.outputs:
            _walk_graph(tensor, found)
        return list(found.values())
    calls = _recorded_calls(model)
    if calls is not None:
        return _walk_calls(*calls)
    inner = [each for each in called_models(model) if each is not model]
    if inner:
        return [layer for each in inner for layer in output_layers(each)]
    leaves = [layer for layer in layers_of(model)[1:] if not parts_of(layer) and layer.weights]
    return leaves[-1:]


def _walk_graph(tensor: Any, found: dict[int, Any]) -> None:
    operation, inputs = made_by(tensor)
    if id(operation) in found:
        return
    if isinstance(operation, Model):
        found.update((id(layer), layer) for layer in output_layers(operation))
        return
    if isinstance(operation, InputLayer):
        return
    if isinstance(operation, Layer):
        found[id(operation)] = operation
        if operation.weights:
            return
    for each in inputs:
        _walk_graph(each, found)


def _recorded_calls(model: Model) -> tuple[list[Call], list[Any]] | None:
    """The calls in `model.call`, in the order in which they end, and the tensors it returns."""
    recorder, returned = Recorder(), []

    def call(*args):
        nonlocal recorder, returned
        recorder = Recorder()  # a new one, since a model may be tried several times
        with recording(recorder):
            outputs = model.call(*args)
        returned = keras.tree.flatten(outputs)
        return outputs

    if symbolic_outputs(model, call) is None:
        return None
    layer_calls = [call for call in recorder.calls if isinstance(call.layer, Layer)]
    return sorted(layer_calls, key=_end), returned


def _end(call: Call) -> int:
    return call.span[1]


def _walk_calls(calls: list[Call], returned: Iterable[Any]) -> list[Layer]:
    found: dict[int, Any] = {}

    def maker(tensor, before):
        earlier = [call for call in calls if _end(call) < before]
        made = [call for call in earlier if _returned(call, tensor)]
        # A raw operation hides who made a tensor: then the latest call did.
        return (made or [x for x in earlier if not parts_of(x.layer) and x.layer.weights])[-1:]

    def walk(tensor, before):
        for call in maker(tensor, before):
            layer, (begin, _) = call.layer, call.span
            if id(layer) in found:
                continue
            if isinstance(layer, Model):
                found.update((id(each), each) for each in output_layers(layer))
                continue
            found[id(layer)] = layer
            if not layer.weights:
                for each in keras.tree.flatten(call.passed):
                    if hasattr(each, "dtype"):
                        walk(each, begin)

    for tensor in returned:
        walk(tensor, float("inf"))
    return list(found.values())


def _returned(call: Call, tensor: Any) -> bool:
    return any(x is tensor for x in keras.tree.flatten(call.outputs))
