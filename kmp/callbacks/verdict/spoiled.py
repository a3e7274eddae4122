"""Find state other than weights that a bad batch has ruined: slots, moving statistics.

A huge but finite batch can have finite gradients, so its step is applied. It can leave a moving
variance or a slot at inf for good, or at a value that thousands of good batches cannot correct.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from keras.layers import BatchNormalization

from kmp._backend import backend
from kmp._backend.types import Tensor
from kmp._keras.buffers import buffers_of
from kmp._keras.optimizer import inner_optimizer_of
from kmp._keras.training import state_of
from kmp.callbacks.verdict.pace import Pace
from kmp.callbacks.verdict.standstill import Weight
from kmp.health.report import GradientReport
from kmp.health.telemetry import FIRST_STEPS
from kmp.precision.trees import is_float

# How many times as large a moving variance may be as at the last look. One batch, with a momentum
# of 0.99, has to be a thousand times as large as the others.
_GROWTH = 1e4
_EPSILON_OF_TORCH = 1e-5  # of its batch normalizations, by default


class Spoiled(NamedTuple):
    """A ruined variable other than a weight, and what is wrong with it."""

    path: str
    reason: str
    of_layer: bool  # whether it is a layer's, not the optimizer's


class Spoilage:
    """Looks for spoiled state in the course of a run."""

    def __init__(self):
        self._variances, self._pace = Variances(), Pace()
        self._moved: GradientReport | None = None  # the last, in this epoch, of a step that updated

    def look(
        self,
        model: Any,
        layers: Sequence[keras.Layer],
        optimizer: Any,
        report: GradientReport,
        weights: Mapping[str, Weight],
        learning_rate: Callable[[Sequence[str]], float],
        at_epoch_end: bool,
    ) -> list[Spoiled]:
        """Look after a step: at the moving variances, and at the end of an epoch at all state.

        Args:
            model: the one that trains.
            layers: all of its layers.
            optimizer: `kmp.LossScaleOptimizer`.
            report: what its steps have measured.
            weights: the trainable variables by their paths.
            learning_rate: returns that of the variables with some paths.
            at_epoch_end: whether an epoch ends. Slots are too large to be read more often.
        """
        found = self._variances.look(model, layers, report.step)
        if at_epoch_end:
            found = lost_state(model, layers, optimizer) or found
        self._moved = report if report.update_ratio else self._moved
        is_first = report.step > FIRST_STEPS and not self._pace.is_known
        if (at_epoch_end or is_first) and not found and self._moved is not None:
            slow = self._pace.see(self._moved, weights, learning_rate)
            found = [Spoiled(*slow, of_layer=False)] if slow else []
        self._moved = None if at_epoch_end else self._moved
        return found


def lost_state(model: Any, layers: Sequence[keras.Layer], optimizer: Any) -> list[Spoiled]:
    """The state of the layers, and of the optimizer, that is not finite.

    That is slots, averaged weights and moving statistics. In layers other than BatchNormalization
    inf may be intended, as in a mask: there only NaN counts.
    """
    pairs = [(v, layer) for layer in layers for v in state_of(layer) if _has_floats(v)]
    slots = [v for v in inner_optimizer_of(optimizer).variables if _has_floats(v)]
    values = backend.read(model, [v for v, _ in pairs], each=True)
    values += backend.read(model, slots)  # which replicas have in common
    pairs += [(v, None) for v in slots]
    found = []
    flags = ops.convert_to_numpy(backend.are_finite(values)) if values else ()
    for (v, layer), x, is_finite in zip(pairs, values, flags, strict=True):
        is_statistic = isinstance(layer, BatchNormalization) or _is_torchs(v)
        may_hold_inf = layer and not is_statistic
        if not is_finite and (not may_hold_inf or bool(ops.any(ops.isnan(x)))):
            reason = f"{_name(v)} holds inf or NaN"
            found.append(Spoiled(v.path, reason, of_layer=layer is not None))
    return found


class Variances:
    """The moving variances of batch normalizations, and which have grown too fast between looks."""

    def __init__(self):
        self._sound: dict[tuple[int, str], float] = {}  # the largest, by place and path

    def look(self, model: Any, layers: Sequence[keras.Layer], step: int) -> list[Spoiled]:
        """Compare with the last sound values. A variance that has grown keeps its old reference."""
        norms = (x for x in layers if isinstance(x, BatchNormalization))
        pairs = [(layer.moving_variance, layer.epsilon) for layer in norms if layer.built]
        buffers = (x for layer in layers for x in buffers_of(layer))
        pairs += [(x, _EPSILON_OF_TORCH) for x in buffers if _is_torchs(x)]
        if not pairs:
            return []
        values = backend.read(model, [v for v, _ in pairs], each=True)
        found = []
        largest = ops.convert_to_numpy(_maxima(values)).tolist()
        for i, ((v, epsilon), now) in enumerate(zip(pairs, largest, strict=True)):
            before = self._sound.get((i, v.path), now)
            if now + epsilon > _GROWTH * (before + epsilon):
                reason = f"{_name(v)} has grown from {before:.3g} to {now:.3g} at its largest"
                found.append(Spoiled(v.path, reason, of_layer=True))
            elif step >= FIRST_STEPS and np.isfinite(now):  # it begins at 1, whatever the data
                self._sound[i, v.path] = now
        return found


@backend.compiled
def _maxima(values: Sequence[Tensor]) -> Tensor:
    return ops.stack([ops.cast(ops.max(x), "float32") for x in values])


def _has_floats(variable: Any) -> bool:
    return is_float(variable) and 0 not in variable.shape


def _is_torchs(variable: Any) -> bool:
    """Whether it is the moving variance of one of PyTorch's own batch normalizations."""
    return variable.path.endswith("/running_var")


def _name(variable: Any) -> str:
    return variable.path.split("/")[-1]
