"""Which layers make a model's outputs: the part that is to stay in full precision."""

from collections.abc import Iterable
from typing import Any

import keras

from kmp._keras import layers_of


def output_layers(model: keras.Layer) -> list[keras.Layer]:
    """The last layers with weights on the way to each output, and all layers after them.

    A softmax behind a Dense layer is worth as much as the logits that it gets, so both count. In
    Functional and Sequential models the graph tells; other models are called once with symbolic
    inputs; if that cannot be done, the last layer with weights in order of creation counts.
    """
    if graph_of(model) is not None:
        found: dict[int, Any] = {}
        for tensor in graph_of(model).outputs:
            _walk_graph(tensor, found)
        return list(found.values())
    calls = _recorded_calls(model)
    if calls is None:
        inner = [layer for layer in layers_of(model)[1:] if _is_leaf(layer) and layer.weights]
        return inner[-1:]
    return _walk_calls(*calls)


def graph_of(model: keras.Layer) -> Any:
    """The model as a graph of operations, for Functional and built Sequential models, or None."""
    if isinstance(model, keras.Sequential):
        return model._functional
    return model if hasattr(model, "operations") and hasattr(model, "outputs") else None


def symbolic_outputs(model: keras.Layer, call: Any = None) -> Any:
    """What calling the model gives, as KerasTensors, or None if it cannot be called symbolically.

    No weight or random state is read or changed, and no node is added to any layer.
    """
    config: dict[str, Any] = model.get_build_config() or {}
    shapes = config.get("shapes_dict") or {"inputs": config.get("input_shape")}
    graph = graph_of(model)
    for dtype in ("float32", "int32"):  # the model knows its inputs' shapes, not their dtypes
        try:
            inputs = [_specs(shape, dtype) for shape in shapes.values()]
            inputs = inputs if graph is None else [graph._inputs_struct]
            return keras.src.backend.compute_output_spec(call or model.call, *inputs)
        except Exception:  # whatever the user's code raises
            continue
    return None


def _specs(shape: Any, dtype: str) -> Any:
    if isinstance(shape, dict):
        return {key: _specs(each, dtype) for key, each in shape.items()}
    if shape and isinstance(shape[0], (list, tuple, dict)):
        return [_specs(each, dtype) for each in shape]
    return keras.KerasTensor(shape, dtype=dtype)


def _walk_graph(tensor: Any, found: dict[int, Any]) -> None:
    operation, node_index, _ = tensor._keras_history
    if id(operation) in found:
        return
    if isinstance(operation, keras.Model):
        found.update((id(layer), layer) for layer in output_layers(operation))
        return
    if isinstance(operation, keras.layers.InputLayer):
        return
    if isinstance(operation, keras.Layer):
        found[id(operation)] = operation
        if operation.weights:
            return
    for each in operation._inbound_nodes[node_index].input_tensors:
        _walk_graph(each, found)


def _recorded_calls(model: keras.Layer) -> tuple[list[Any], list[Any]] | None:
    """The calls of `model`'s layers in order, and the tensors that the model returns."""
    calls: list[Any] = []
    returned: list[Any] = []
    original = keras.Layer.__call__

    def recording(layer, *args, **kwargs):
        outputs = original(layer, *args, **kwargs)
        calls.append((layer, keras.tree.flatten((args, kwargs)), keras.tree.flatten(outputs)))
        return outputs

    def call(*args):
        outputs = model.call(*args)
        returned.extend(keras.tree.flatten(outputs))
        return outputs

    keras.Layer.__call__ = recording
    try:
        done = symbolic_outputs(model, call)
    finally:
        keras.Layer.__call__ = original
    return None if done is None else (calls, returned)


def _walk_calls(calls: list[Any], returned: Iterable[Any]) -> list[keras.Layer]:
    found: dict[int, Any] = {}

    def maker(tensor, before):
        earlier = list(enumerate(calls[:before]))
        made = [i for i, (*_, outputs) in earlier if any(x is tensor for x in outputs)]
        # Raw operations hide who made a tensor: then the latest call did.
        return (made or [i for i, (x, *_) in earlier if _is_leaf(x) and x.weights])[-1:]

    def walk(tensor, before):
        for i in maker(tensor, before):
            layer, inputs, _ = calls[i]
            if id(layer) in found:
                continue
            if isinstance(layer, keras.Model):
                found.update((id(each), each) for each in output_layers(layer))
                continue
            found[id(layer)] = layer
            if not layer.weights:
                for each in inputs:
                    if hasattr(each, "dtype"):
                        walk(each, i)

    for tensor in returned:
        walk(tensor, len(calls))
    return list(found.values())


def _is_leaf(layer: keras.Layer) -> bool:
    return not layer._flatten_layers(include_self=False, recursive=False)
