"""One float32 pass: what its numbers would become in half precision."""

import dataclasses
import math

import numpy as np
from keras import Model, ops

from kmp._backend import backend
from kmp._backend.types import Tree
from kmp._keras.calls import Call
from kmp.debug.preserved import Preserved
from kmp.debug.replay import Batch, Loss, backward, forward
from kmp.debug.stats import as_float64, floats
from kmp.precision.float_formats import formats
from kmp.precision.trees import HALF_DTYPES
from kmp.scaling.rules import DynamicLossScale

LARGEST_SCALE = DynamicLossScale.max_scale  # by default


@dataclasses.dataclass(frozen=True)
class Share:
    """What becomes of numbers in a half format, as shares of those that are not zero.

    Attributes:
        overflow: becomes inf.
        lost: becomes zero.
        degraded: is subnormal there, with fewer bits.
    """

    overflow: float
    lost: float
    degraded: float

    @classmethod
    def of(cls, values: np.ndarray, dtype: str, scale: float = 1.0) -> "Share":
        """What becomes of float32 numbers in `dtype`, after multiplication by `scale`."""
        limits = formats[dtype]
        magnitudes = np.abs(values[values != 0].astype("float64")) * scale
        if not magnitudes.size:
            return cls(0.0, 0.0, 0.0)
        # A tie rounds to even: half of the smallest subnormal becomes zero, and half a unit beyond
        # the largest number overflows. NaN counts as an overflow.
        below = float(np.nextafter(np.array(limits.largest, dtype), np.array(0, dtype)))
        overflow = ~(magnitudes < limits.largest + (limits.largest - below) / 2)
        lost = magnitudes <= limits.smallest_subnormal / 2
        degraded = ~lost & (magnitudes < limits.smallest_normal)
        return cls(float(overflow.mean()), float(lost.mean()), float(degraded.mean()))


@dataclasses.dataclass(frozen=True)
class LayerRange:
    """The numbers of a call of a layer in float32.

    Attributes:
        path: `layer.path`, with the number of the call if it is not the name's first.
        max_abs: the largest absolute value of its output.
        activations: what becomes of its output, by half dtype.
        max_gradient: the largest absolute gradient that arrives at its output or goes to its
            variables, unscaled; NaN without targets.
        gradients: what becomes of those gradients times the advised loss scale, by half dtype.
            Empty without targets.
    """

    path: str
    max_abs: float
    activations: dict[str, Share]
    max_gradient: float
    gradients: dict[str, Share]


def ranges_of(
    model: Model, batch: Batch, with_gradients: bool, preserved: Preserved
) -> tuple[list[LayerRange], float | None]:
    """Run the model as in training, with the dtype policies that it has.

    Returns:
        A `LayerRange` for each call of a layer, and the advised loss scale: the largest power of
        two with which the largest gradient can still double within float16, at most 2**24. The
        scale is None without gradients.
    """
    preserved.restore()
    recorder, *_ = forward(model, batch, training=True, with_loss=with_gradients)
    calls = [c for c in recorder.calls if not isinstance(c.layer, (Model, Loss))]
    gradients: dict[str, list[np.ndarray]] = {}
    if with_gradients:
        gradients = _gradients(model, batch, {c.key for c in recorder.calls}, preserved)
    peaks = {key: max_abs(values) for key, values in gradients.items()}
    scale = advised_scale(max(peaks.values(), default=0.0)) if with_gradients else None
    rows = [
        LayerRange(
            path=call.path,
            max_abs=max_abs([as_float64(x) for x in floats(call.outputs)]),
            activations=_shares([as_float64(x) for x in floats(call.outputs)]),
            max_gradient=peaks.get(call.key, math.nan),
            gradients=_shares(gradients[call.key], scale or 1.0) if call.key in gradients else {},
        )
        for call in calls
        if floats(call.outputs)
    ]
    return rows, scale


def _gradients(
    model: Model, batch: Batch, keys: set[str], preserved: Preserved
) -> dict[str, list[np.ndarray]]:
    """By the key of a call the gradients at its output, and of the variables that it owns."""
    found: dict[str, list[np.ndarray]] = {}
    owners: dict[int, str] = {}

    def record(time: int, call: Call, role: str, gradient: Tree) -> None:
        if role == "output":
            found.setdefault(call.key, []).append(as_float64(gradient))
            for variable in getattr(call.layer, "trainable_variables", []):
                # The backward pass comes to the outer layer first, and its children are to own.
                owners[id(variable)] = call.key

    preserved.restore()
    _, gradients = backward(model, batch, 1.0, keys, record)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        if gradient is not None and id(variable) in owners:
            values = as_float64(ops.cast(backend.gradient_rows(gradient), "float32"))
            found[owners[id(variable)]].append(values)
    return found


def max_abs(arrays: list[np.ndarray]) -> float:
    """The largest absolute value in any of them; 0 without numbers."""
    return max((float(np.abs(a).max(initial=0.0)) for a in arrays), default=0.0)


def advised_scale(peak: float) -> float:
    """The largest power of two that leaves `peak` a doubling away from the end of float16."""
    if not 0 < peak < math.inf:
        return LARGEST_SCALE
    return min(2.0 ** (math.floor(math.log2(formats["float16"].largest / peak)) - 1), LARGEST_SCALE)


def _shares(arrays: list[np.ndarray], scale: float = 1.0) -> dict[str, Share]:
    values = np.concatenate([a.ravel() for a in arrays])
    return {dtype: Share.of(values, dtype, scale) for dtype in HALF_DTYPES}
