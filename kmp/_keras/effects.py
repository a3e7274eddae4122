"""What the layers of a model do in training beside their outputs: add losses, change variables."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
from keras import Layer
from keras.src.backend.common import KerasVariable

from kmp._keras.calls import Recorder, recording


class Effect(NamedTuple):
    """What the code of a layer did in a call.

    Attributes:
        layer: whose code it was.
        kind: `"loss"` for `add_loss`; `"update"` for an assignment to a variable that the same call
            has read in another dtype than its own.
        name: of the variable; empty for a loss.
        dtype: of the loss, or of what was read of the variable.
    """

    layer: Any
    kind: str
    name: str
    dtype: str


@contextlib.contextmanager
def _watched(watch_read: Callable, watch_assign: Callable, watch_loss: Callable) -> Iterator[None]:
    """Within, each read of a variable, each assignment and each `add_loss` is reported.

    Private: `KerasVariable._maybe_autocast`, through which Keras hands out what a variable holds,
    and `_dtype`; `dtype` is that of what it hands out.
    """
    read, assign, add_loss = KerasVariable._maybe_autocast, KerasVariable.assign, Layer.add_loss

    def watched_read(self, value):
        seen = read(self, value)
        watch_read(self, seen)
        return seen

    def watched_assign(self, value):
        watch_assign(self)
        return assign(self, value)

    def watched_add_loss(self, loss):
        watch_loss(self, loss)
        return add_loss(self, loss)

    KerasVariable._maybe_autocast, KerasVariable.assign = watched_read, watched_assign
    Layer.add_loss = watched_add_loss
    try:
        yield
    finally:
        KerasVariable._maybe_autocast, KerasVariable.assign = read, assign
        Layer.add_loss = add_loss


@contextlib.contextmanager
def watching_effects(found: list[Effect]) -> Iterator[None]:
    """Within, what the layers do that are called in this thread is added to `found`.

    Example:

    >>> layer = keras.layers.SpectralNormalization(keras.layers.Dense(2), dtype="mixed_bfloat16")
    >>> layer.build((None, 2))
    >>> found = []
    >>> with watching_effects(found):
    ...     y = layer(keras.ops.ones((1, 2)), training=True)
    >>> [(each.name, each.dtype) for each in found]
    [('vector_u', 'bfloat16'), ('kernel', 'bfloat16')]
    """
    recorder = Recorder()
    reads: dict[tuple[int, int], str] = {}  # by call and variable, the dtype of what it read

    def watch_read(variable, value):
        if call := recorder.innermost:
            reads[id(call), id(variable)] = keras.backend.standardize_dtype(value.dtype)

    def watch_assign(variable):
        call = recorder.innermost
        dtype = reads.get((id(call), id(variable))) if call else None
        if call and dtype and dtype != variable._dtype:
            found.append(Effect(call.layer, "update", variable.name, dtype))

    def watch_loss(layer, loss):
        losses = keras.tree.flatten(loss) if recorder.is_on() else ()
        dtypes = [keras.backend.standardize_dtype(each.dtype) for each in losses]
        found.extend(Effect(layer, "loss", "", dtype) for dtype in dtypes)

    with recording(recorder), _watched(watch_read, watch_assign, watch_loss):
        yield
