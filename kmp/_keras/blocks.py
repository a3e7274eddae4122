"""The blocks of a model: which there are, and which of them are computed again."""

from collections.abc import Callable, Sequence
from typing import Any

from keras import Layer, Model
from keras.layers import InputLayer

from kmp._keras import forget_functions, layers_of, parts_of, path_of
from kmp._keras.recompute import call_plainly, is_recomputed, recompute_calls


def recompute_only(blocks: Sequence[Layer], model: Model, backend: Any) -> None:
    """Let these blocks of a model be computed again by a `Backend`, and nothing else in it."""
    for layer in layers_of(model):
        if is_recomputed(layer):
            call_plainly(layer)
    for block in blocks:
        recompute_calls(block, backend)
    forget_functions(model)


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
