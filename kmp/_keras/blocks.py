"""What of a model is computed again: its blocks, or segments of its graph."""

import functools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from keras import Layer, Model
from keras.layers import InputLayer

from kmp._keras import forget_functions, layers_of, parts_of, path_of
from kmp._keras.cutting import best_cut
from kmp._keras.recompute import call_again
from kmp._keras.segments import (
    Segment,
    graph_in,
    layers_in,
    nodes_of,
    parts_to_cut,
    recompute_segments,
    recomputed_segments,
    run_plainly,
    segments_of,
)

Pieces: TypeAlias = Sequence[Layer] | Sequence[Segment]  # which are computed again


def recompute_only(pieces: Pieces, model: Model, backend: Any, policy: Any = None) -> None:
    """Let these pieces of a model be computed again by a `Backend`, and nothing else in it.

    Args:
        pieces: blocks, or the first segments of a graph in the model, in their order.
        model: the model.
        backend: the `Backend`.
        policy: what of them is kept all the same, as `Backend.recompute` takes it.
    """
    for layer in layers_of(model):
        if is_recomputed(layer):
            call_plainly(layer)
    for graph in _graphs_of(model):
        run_plainly(graph)
    segments = [each for each in pieces if isinstance(each, Segment)]
    if segments:
        recompute_segments(segments, backend, policy)
    for block in pieces:
        if isinstance(block, Layer):
            recompute_calls(block, backend, policy)
    forget_functions(model)


def recomputed_in(model: Model) -> Pieces:
    """What of a model is computed again now."""
    segments = [each for graph in _graphs_of(model) for each in recomputed_segments(graph)]
    return segments or [layer for layer in layers_of(model) if is_recomputed(layer)]


def policy_in(model: Model) -> Any:
    """The policy with which pieces of a model are computed again now."""
    calls = [vars(layer).get("call") for layer in layers_of(model)]
    calls += [vars(graph).get("_run_through_graph") for graph in _graphs_of(model)]
    return next((x for call in calls if (x := getattr(call, "policy", None)) is not None), None)


def chosen_pieces(model: Model, filter_fn: Any, segments: Any, owner: str = "recompute") -> Pieces:
    """What of a model is to be computed again, by the arguments of a user.

    Args:
        model: built.
        filter_fn: which layers are blocks, or None.
        segments: how many segments at most, or the names with which they end, or None.
        owner: name of the function that the user called.

    Raises:
        TypeError: if `filter_fn` cannot be called.
        ValueError: if `segments` are none, or cannot be had in this model.
    """
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            f"`filter_fn` of {owner} must be a function of a layer and its path. Received: "
            f"{filter_fn!r}. Write lambda layer, path: 'encoder' in path, for example."
        )
    if segments is None:
        return _pieces_of(model) if filter_fn is None else chosen_by(filter_fn, model)
    if filter_fn is not None:
        raise ValueError(
            f"{owner} takes `filter_fn` or `segments`, not both. Received: segments={segments!r} "
            "and a filter_fn, which chooses blocks."
        )
    graph = _largest_graph(model)
    if graph is None:
        raise ValueError(
            f"`segments` of {owner} needs a Functional or Sequential model, whose layers Keras "
            f"calls itself. Received: {type(model).__name__} {model.name!r}, which calls its "
            "layers in code of its own. Choose layers by filter_fn."
        )
    if isinstance(segments, Integral) and int(segments) >= 2:
        return _cut(graph, int(segments))
    names = isinstance(segments, Sequence) and not isinstance(segments, str)
    found = _ending(segments, model) if names else None
    if found is None:
        raise ValueError(
            f"`segments` of {owner} must be a whole number of at least 2, or names of layers that "
            "the model calls once, without the last. Received: "
            f"segments={segments!r}. kmp.recompute(model, segments=4).paths has such names."
        )
    return found


def _pieces_of(model: Model) -> Pieces:
    """The blocks of a model, or the segments of its graph where its blocks are the smaller part.

    Where a model in the model is the only block, the segments of that.
    """
    blocks = blocks_of(model)
    if len(blocks) == 1 and graph_in(blocks[0]) is not None:
        return _cut(graph_in(blocks[0])) or blocks
    graph = graph_in(model)
    if graph is None or _are_most_of(graph, blocks):
        return blocks
    return _cut(graph) or blocks


def other_pieces(model: Model, pieces: Pieces) -> Pieces:
    """The segments of a model whose blocks `chosen_pieces` has chosen; none if it cannot be cut."""
    graph = None if pieces and isinstance(pieces[0], Segment) else _largest_graph(model)
    return [] if graph is None else _cut(graph)


def _are_most_of(graph: Any, blocks: Sequence[Layer]) -> bool:
    """Whether blocks keep at least half of what all layers of a graph keep for the gradient."""
    within = {id(block) for block in blocks}
    pairs = list(zip(nodes_of(graph), parts_to_cut(graph), strict=True))
    in_blocks = sum(part.kept for node, part in pairs if within & set(map(id, layers_in(node))))
    return 2 * in_blocks >= sum(part.kept for _, part in pairs)


def _cut(graph: Any, most: int | None = None) -> list[Segment]:
    """The best segments of a graph but for the last.

    What the last keeps is needed as soon as the backward pass begins.
    """
    parts = parts_to_cut(graph)
    return segments_of(graph, [parts[end].name for end in best_cut(parts, most).ends[:-1]])


def _largest_graph(model: Model) -> Any:
    """The graph, of a model or of a model inside it, that calls most; None if there is none."""
    return max(_graphs_of(model), key=lambda graph: len(nodes_of(graph)), default=None)


def _ending(ends: Sequence[str], model: Model) -> list[Segment] | None:
    """The segments that end with operations of these names; None if no graph has them all.

    Only an operation that is called once can end one, and not the last.
    """
    for graph in _graphs_of(model):
        if set(ends) <= {part.name for part in parts_to_cut(graph)[:-1] if part.may_end}:
            return segments_of(graph, ends)
    return None


def _graphs_of(model: Model) -> list[Any]:
    """The graphs in a model."""
    return [graph for layer in layers_of(model) if (graph := graph_in(layer)) is not None]


def blocks_of(model: Layer) -> list[Layer]:
    """The outermost layers with weights and layers inside; models only if they have no blocks."""
    found: list[Layer] = []
    for part in parts_of(model):
        inside = blocks_of(part) if isinstance(part, Model) else []
        if inside:
            found += inside
        elif part.weights and parts_of(part):
            found.append(part)
    return _each_once(found)


def chosen_by(filter_fn: Callable[[Layer, str], bool], layer: Layer) -> list[Layer]:
    """The outermost layers in a layer for which `filter_fn` returns True."""
    found: list[Layer] = []
    for part in parts_of(layer):
        if not isinstance(part, InputLayer):
            chosen = filter_fn(part, path_of(part))
            found += [part] if chosen else chosen_by(filter_fn, part)
    return _each_once(found)


def _each_once(layers: list[Layer]) -> list[Layer]:
    return list({id(layer): layer for layer in layers}.values())


def is_recomputed(layer: Any) -> bool:
    """Whether the calls of a layer are computed again for the gradient."""
    return hasattr(vars(layer).get("call"), "plain_call")


def recompute_calls(layer: Any, backend: Any, policy: Any = None) -> None:
    """Let the calls of a built layer be computed again for the gradient.

    Args:
        layer: a layer. Nothing of it changes but the attribute `call`.
        backend: the `Backend`.
        policy: what of it is kept all the same, as `Backend.recompute` takes it.
    """
    plain_call = layer.call

    @backend.untraced
    @functools.wraps(plain_call)
    def call(*args: Any, **kwargs: Any) -> Any:
        inside = layers_of(layer)
        return call_again(path_of(layer), plain_call, args, kwargs, inside, backend, policy)

    call.plain_call, call.policy = plain_call, policy
    vars(layer)["call"] = call  # `setattr` would have Keras look for layers and variables in it


def call_plainly(layer: Any) -> None:
    """Undo `recompute_calls`."""
    plain_call = vars(layer).pop("call").plain_call
    if getattr(plain_call, "__func__", None) is not type(layer).call:
        vars(layer)["call"] = plain_call  # the user had put it there
