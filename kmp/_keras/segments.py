"""Segments of a graph: what lies between two of its tensors, computed again for the gradient.

A Functional or Sequential model is run node by node: a node is one call of an operation. A segment
is nodes that run one after another. It gets the tensors that come in from before, and hands on
those that are needed after it.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
from keras import KerasTensor, Layer, Sequential
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.models.functional import Functional

from kmp._keras import layers_of, parts_of
from kmp._keras.cutting import Part
from kmp._keras.recompute import call_again

Tensor: TypeAlias = Any
Node: TypeAlias = Any


class Segment:
    """Nodes of a graph that run one after another.

    Args:
        graph: the Functional model.
        nodes: those nodes.
        needed: the ids of the tensors that are needed after them.
    """

    def __init__(self, graph: Any, nodes: Sequence[Node], needed: set[int]):
        self.graph, self.nodes = graph, nodes
        made = [x for node in nodes for x in node.outputs]
        inside = {id(x) for x in made}
        given = {id(x): x for node in nodes for x in node.input_tensors if id(x) not in inside}
        self.inputs: list[KerasTensor] = list(given.values())
        self.outputs: list[KerasTensor] = [x for x in made if id(x) in needed]
        called = {id(each): each for node in nodes for each in layers_in(node)}
        self.layers: list[Layer] = list(called.values())

    @property
    def first(self) -> str:
        """The name of the operation that runs first."""
        return self.nodes[0].operation.name

    @property
    def last(self) -> str:
        """The name of the operation that runs last."""
        return self.nodes[-1].operation.name

    @property
    def weights(self) -> list[Any]:
        """The weights of the layers, each once."""
        return list({id(v): v for layer in self.layers for v in layer.weights}.values())

    @property
    def saved(self) -> int:
        """Bytes for each sample that are not kept if it is computed again, at least 1."""
        kept = sum(_kept_by(node) for node in self.nodes)
        return max(kept - sum(map(_bytes_of, self.outputs)), 1)

    def run(self, tensors: Sequence[Tensor], wrap: Callable[[Any], Any]) -> list[Tensor]:
        """Call the nodes.

        Args:
            tensors: the values of `inputs`.
            wrap: takes an operation, and returns the function to call in its place.

        Returns:
            The values of `outputs`.
        """
        values = dict(zip(map(id, self.inputs), tensors, strict=True))
        for node in self.nodes:
            args, kwargs = node.arguments.fill_in(values)
            found = keras.tree.flatten(wrap(node.operation)(*args, **kwargs))
            values.update(zip(map(id, node.outputs), found, strict=False))
        return [values[id(x)] for x in self.outputs]


def layers_in(node: Node) -> list[Layer]:
    """The layer that a node calls, and those inside; none if it calls another operation."""
    return layers_of(node.operation) if isinstance(node.operation, Layer) else []


def graph_in(model: Any) -> Any:
    """The Functional model that a built Sequential or Functional model runs; None for others.

    Private: `Functional`, whose `call` a class of one's own may have overridden; `_functional`.
    """
    if isinstance(model, Sequential):
        return model._functional if type(model).call is Sequential.call else None
    is_run = isinstance(model, Functional) and type(model).call is Functional.call
    return model if is_run else None


def nodes_of(graph: Any) -> list[Node]:
    """The nodes of a graph in the order in which Keras runs them. Private: `_nodes_by_depth`."""
    by_depth = graph._nodes_by_depth
    found = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node for node in found if node.operation and not node.is_input]


def parts_to_cut(graph: Any) -> list[Part]:
    """What each node of a graph would keep for the gradient, and when it is needed last."""
    nodes = nodes_of(graph)
    last_use = {id(x): i for i, node in enumerate(nodes) for x in node.input_tensors}
    last_use |= {id(x): len(nodes) for x in graph.outputs}
    names = [node.operation.name for node in nodes]
    found = []
    for node, name in zip(nodes, names, strict=True):
        sizes = [(_bytes_of(x), last_use.get(id(x), -1)) for x in node.outputs]
        found.append(Part(name, _kept_by(node), sizes, names.count(name) == 1))
    return found


def _kept_by(node: Node) -> int:
    """Bytes for each sample: those of its outputs, as often as there are layers inside."""
    inside = [x for x in layers_in(node)[1:] if not parts_of(x)]
    return sum(map(_bytes_of, node.outputs)) * max(1, len(inside))


def segments_of(graph: Any, ends: Sequence[str]) -> list[Segment]:
    """The segments of a graph: each ends with the operation of that name, and is not empty.

    What comes after the last of them is in no segment.
    """
    nodes = nodes_of(graph)
    names = [node.operation.name for node in nodes]
    places = [0, *sorted({names.index(end) + 1 for end in ends})]
    return [_segment(graph, nodes, i, j) for i, j in itertools.pairwise(places)]


def _segment(graph: Any, nodes: Sequence[Node], start: int, stop: int) -> Segment:
    later = {id(x) for node in nodes[stop:] for x in node.input_tensors}
    return Segment(graph, nodes[start:stop], later | {id(x) for x in graph.outputs})


def recomputed_segments(graph: Any) -> list[Segment]:
    """The segments of a graph that are computed again for the gradient."""
    return list(getattr(vars(graph).get("_run_through_graph"), "segments", ()))


def recompute_segments(segments: Sequence[Segment], backend: Any, policy: Any = None) -> None:
    """Let the first segments of a graph be computed again for the gradient.

    Private: `_run_through_graph`, which `Functional.call` gives the inputs as it has standardized
    them; nothing else of the graph changes.

    Args:
        segments: from the graph's inputs on, without gaps.
        backend: the `Backend`.
        policy: what of them is kept all the same, as `Backend.recompute` takes it.
    """
    graph = segments[0].graph
    run_through = graph._run_through_graph
    nodes = nodes_of(graph)
    rest = _segment(graph, nodes, sum(len(each.nodes) for each in segments), len(nodes))

    @backend.untraced
    @functools.wraps(run_through)
    def run(inputs: Any, operation_fn: Any = lambda x: x, call_fn: Any = None) -> Any:
        given = keras.tree.flatten(inputs)
        symbolic = any(isinstance(x, KerasTensor) for x in given)
        if symbolic or call_fn is not None or in_symbolic_scope():
            return run_through(inputs, operation_fn, call_fn)
        values = dict(zip(map(id, graph.inputs), given, strict=True))
        for each in (*segments, rest):
            inputs = [values[id(x)] for x in each.inputs]
            if each is rest:
                outputs = each.run(inputs, operation_fn)
            else:
                layers = [graph, *each.layers]
                arguments = inputs, operation_fn
                outputs = call_again(each.last, each.run, arguments, {}, layers, backend, policy)
            values.update(zip(map(id, each.outputs), outputs, strict=True))
        return keras.tree.pack_sequence_as(graph.output, [values[id(x)] for x in graph.outputs])

    run.segments, run.policy = segments, policy
    vars(graph)["_run_through_graph"] = run  # `setattr` would have Keras look into it


def run_plainly(graph: Any) -> None:
    """Undo `recompute_segments`."""
    vars(graph).pop("_run_through_graph", None)


def _bytes_of(tensor: KerasTensor) -> int:
    """Of one sample; sizes that are not known count as 1."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    bits = re.search(r"\d+", dtype)
    return math.prod(n or 1 for n in tensor.shape) * (int(bits[0]) // 8 if bits else 1)
