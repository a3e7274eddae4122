"""What training goes on from beside the weights, and whether a bad batch has spoiled it.

A batch that is finite and huge has finite gradients, and its step is applied. It can leave inf in a
moving variance or in a slot for ever, or a number that thousands of good batches do not wash out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from kmp import _backend
from kmp._backend.types import Tensor
from kmp._keras.optimizer import inner_optimizer_of
from kmp._keras.training import state_of
from kmp.health.telemetry import FIRST_STEPS
from kmp.precision.trees import is_float

# How many times as large a moving variance may be as at the last look. One batch, with a momentum
# of 0.99, has to be a thousand times as large as the others.
_GROWTH = 1e4


class Spoiled(NamedTuple):
    """A variable that nothing trains, and what is wrong with it."""

    path: str
    seen: str
    of_layer: bool  # whether it is a layer's, not the optimizer's


def lost_state(model: Any, layers: Sequence[keras.Layer], optimizer: Any) -> list[Spoiled]:
    """The state of the layers, and of the optimizer, that is not finite.

    Slots, averaged weights, moving statistics. The inf of another layer's variable may be meant, as
    a mask's is, and does not count; NaN does.
    """
    pairs = [(v, layer) for layer in layers for v in state_of(layer)]
    pairs += [(v, None) for v in inner_optimizer_of(optimizer).variables]
    pairs = [(v, layer) for v, layer in pairs if is_float(v) and 0 not in v.shape]
    values, found = _backend.read(model, [v for v, _ in pairs]), []
    flags = ops.convert_to_numpy(_backend.are_finite(values)) if values else ()
    for (v, layer), x, is_finite in zip(pairs, values, flags, strict=True):
        may_hold_inf = layer and not isinstance(layer, keras.layers.BatchNormalization)
        if not is_finite and (not may_hold_inf or bool(ops.any(ops.isnan(x)))):
            found.append(Spoiled(v.path, "holds inf or NaN", of_layer=layer is not None))
    return found


class Variances:
    """The moving variances of batch normalizations, and which have grown too fast between looks."""

    def __init__(self):
        self._sound: dict[tuple[int, str], float] = {}  # the largest, by place and path

    def look(self, model: Any, layers: Sequence[keras.Layer], step: int) -> list[Spoiled]:
        """Look after a step of this number. What has grown is compared with before from now on."""
        norms = (x for x in layers if isinstance(x, keras.layers.BatchNormalization))
        pairs = [(layer.moving_variance, layer.epsilon) for layer in norms if layer.built]
        if not pairs:
            return []
        values = _backend.read(model, [v for v, _ in pairs])
        found = []
        largest = ops.convert_to_numpy(_maxima(values)).tolist()
        for i, ((v, epsilon), now) in enumerate(zip(pairs, largest, strict=True)):
            before = self._sound.get((i, v.path), now)
            if now + epsilon > _GROWTH * (before + epsilon):
                seen = f"has grown from {before:.3g} to {now:.3g} at its largest"
                found.append(Spoiled(v.path, seen, of_layer=True))
            elif step >= FIRST_STEPS and np.isfinite(now):  # it begins at 1, whatever the data
                self._sound[i, v.path] = now
        return found


@_backend.compiled
def _maxima(values: Sequence[Tensor]) -> Tensor:
    return ops.stack([ops.cast(ops.max(x), "float32") for x in values])
