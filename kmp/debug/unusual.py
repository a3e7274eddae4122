"""What is unusual about a batch: its columns, its rows, the first layer, the gradients."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import keras
import numpy as np
from keras import Model

from kmp._backend import backend
from kmp._backend.types import Tree
from kmp._keras.calls import Call
from kmp.debug.preserved import Preserved
from kmp.debug.replay import Batch, Loss, as_batch, backward, check_replayable, forward
from kmp.debug.stats import as_float64, floats
from kmp.precision.trees import as_number

_FAR = 3.0  # times as large as in the ordinary batch. Two sound batches hardly differ by that
_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Growth:
    """A number of a batch beside the same of an ordinary one.

    Attributes:
        name: what it is of: a column of the data, a row of the batch, a layer or a variable.
        value: in this batch.
        usual: in the ordinary batch.

    Example:

    >>> growth = Growth("dense/kernel", 60.0, 2.0)
    >>> growth.ratio, str(growth)
    (30.0, 'dense/kernel: 60, 30 times the ordinary 2')
    """

    name: str
    value: float
    usual: float

    @property
    def ratio(self) -> float:
        """How many times the ordinary one it is; inf if only that is zero, and 1 if both are."""
        if self.usual > 0:
            return self.value / self.usual
        return math.inf if self.value > 0 else 1.0

    def __str__(self) -> str:
        if math.isinf(self.ratio) and self.usual == 0:
            return f"{self.name}: {self.value:.3g}, 0 in the ordinary batch"
        return (
            f"{self.name}: {self.value:.3g}, {self.ratio:.3g} times the ordinary {self.usual:.3g}"
        )


@dataclasses.dataclass(frozen=True)
class SpikeExplanation:
    """What is unusual about a batch, against an ordinary one; see `explain_spike`.

    Only what is at least 3 times as large is listed, the furthest first.

    Attributes:
        norm: the l2 norms of all gradients.
        columns: the largest absolute value of each column of `x` and `y`.
        rows: the loss of each row of the batch, against the largest of the ordinary batch.
        layers: the largest absolute output of each call of a layer; in the order of execution.
        gradients: the l2 norm of each variable's gradient.

    Example:

    >>> print(SpikeExplanation(norm=Growth("gradients", 2.0, 2.0)))
    The norm of the gradients is 2, 1 times the ordinary 2.
    Nothing about this batch is 3 times as large as in the ordinary one.
    """

    norm: Growth
    columns: tuple[Growth, ...] = ()
    rows: tuple[Growth, ...] = ()
    layers: tuple[Growth, ...] = ()
    gradients: tuple[Growth, ...] = ()

    def __str__(self) -> str:
        norm = self.norm
        lines = [
            f"The norm of the gradients is {norm.value:.3g}, {norm.ratio:.3g} times the ordinary "
            f"{norm.usual:.3g}."
        ]
        parts = {
            "data, largest |value|": self.columns,
            "rows, loss": self.rows,
            "first layer, largest |output|": self.layers[:1],
            "gradients, norm": self.gradients,
        }
        for title, found in parts.items():
            more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            if found:
                lines.append(f"  {title}: {'; '.join(map(str, found[:_NAMED]))}{more}")
        return "\n".join([*lines, self._advice()])

    def _advice(self) -> str:
        if self.columns:
            return (
                "Its data are far larger than the ordinary ones. Look at these columns, and at "
                "their unit."
            )
        if self.rows:
            return (
                "Its data are as large as the ordinary ones, and the loss of these rows is not. "
                "Look at their labels: they are wrong, or rare and important."
            )
        if self.layers or self.gradients:
            return "Its data and its losses are as large as the ordinary ones; the layer is not."
        return f"Nothing about this batch is {_FAR:g} times as large as in the ordinary one."


def explain_spike(
    model: Model, x: Tree, y: Tree, ordinary: Sequence[Tree], sample_weight: Tree = None
) -> SpikeExplanation:
    """Tell what is unusual about a batch that was left out as a spike, against an ordinary one.

    Runs both, whole and row by row, eagerly and with the weights as they are now, and compares the
    columns of the data, the losses of the rows, the outputs of the layers, and the gradients.
    Everything is put back, as `locate_nonfinite` does.

    Args:
        model: a built and compiled model.
        x: the batch, as `fit` takes it: an array or a nested structure of arrays. The warning of
            `GradientHealth` has its number; `health.report.spikes` has the step.
        y: its targets.
        ordinary: `(x, y)` or `(x, y, sample_weight)`, a batch that was not left out, such as the
            one before.
        sample_weight: the weights of the batch, if there are any.

    Returns:
        A `SpikeExplanation`; print it.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: the model is not built, has no `call`, or is not compiled; `ordinary` is not a
            batch with targets.

    Example:

    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="head")])
    >>> model.compile(kmp.scaled("sgd", spikes="skip"), "mse")
    >>> x, y = np.ones((4, 3)), np.ones((4, 1))
    >>> bad = x.copy()
    >>> bad[2, 1] = 5000.0
    >>> found = explain_spike(model, bad, y, (x, y))
    >>> [column.name for column in found.columns], [row.name for row in found.rows]
    (['x[..., 1]'], ['row 2'])
    """
    check_replayable(model, "explain_spike", with_loss=True)
    if not isinstance(ordinary, tuple | list) or len(ordinary) not in (2, 3):
        raise ValueError(
            "`ordinary` of explain_spike must be a batch with its targets, (x, y) or "
            f"(x, y, sample_weight). Received: {type(ordinary).__name__}. Write "
            "kmp.debug.explain_spike(model, x, y, (other_x, other_y))."
        )
    ordinary = (*ordinary, None)[:3]
    batch, other = (tuple(map(as_batch, each)) for each in ((x, y, sample_weight), ordinary))
    with Preserved(model) as preserved:
        mine, usual = (_measured(model, each, preserved) for each in (batch, other))
    largest = max(map(abs, usual.rows.values()), default=math.nan)
    return SpikeExplanation(
        norm=Growth("gradients", _norm(mine.gradients), _norm(usual.gradients)),
        columns=_far(_pairs(_columns(batch), _columns(other, empty_as_others=True))),
        rows=_far(Growth(name, loss, largest) for name, loss in mine.rows.items()),
        layers=_far(_pairs(mine.layers, usual.layers), ranked=False),
        gradients=_far(_pairs(mine.gradients, usual.gradients)),
    )


@dataclasses.dataclass(frozen=True)
class _Measured:
    """The numbers of a batch, by the names of what they are of."""

    rows: dict[str, float]
    layers: dict[str, float]
    gradients: dict[str, float]


def _measured(model: Model, batch: Batch, preserved: Preserved) -> _Measured:
    preserved.restore()
    recorder, _, _ = forward(model, batch, training=True, with_loss=True)
    layers = {call.path: _largest(call.outputs) for call in recorder.calls if _is_shown(call)}
    preserved.restore()
    _, gradients = backward(model, batch, 1.0, set(), _ignore)
    norms = {
        v.path: float(np.linalg.norm(as_float64(backend.gradient_rows(g))))
        for v, g in zip(model.trainable_variables, gradients, strict=True)
        if g is not None
    }
    return _Measured(_row_losses(model, batch, preserved), layers, norms)


def _row_losses(model: Model, batch: Batch, preserved: Preserved) -> dict[str, float]:
    """The loss of each row as a batch of its own, in inference mode."""
    sizes = {x.shape[0] for x in keras.tree.flatten(batch) if x is not None and len(x.shape)}
    if len(sizes) != 1:
        return {}
    losses = {}
    for i in range(*sizes):
        preserved.restore()
        row = keras.tree.map_structure(lambda x, i=i: x if x is None else x[i : i + 1], batch)
        try:
            _, _, loss = forward(model, row, training=False, with_loss=True)
        except Exception:  # the model, or its loss, wants batches of one size
            return {}
        losses[f"row {i}"] = math.nan if loss is None else as_number(loss)
    return losses


def _columns(batch: Batch, empty_as_others: bool = False) -> dict[str, float]:
    """The largest absolute value of each column, the last axis, of the floats of x and y.

    Args:
        batch: x, y and sample_weight.
        empty_as_others: whether a column of zeros is as large as the largest of its array: a word
            or a category that one batch lacks is nothing unusual in another.
    """
    found = {}
    for path, x in keras.tree.flatten_with_path({"x": batch[0], "y": batch[1]}):
        if x is None or not floats(x):
            continue
        values = np.abs(as_float64(x))
        name = path[0] + "".join(f"[{part!r}]" for part in path[1:])
        if values.ndim < 2:
            found[name] = float(values.max(initial=0.0))
            continue
        largest = values.reshape(-1, values.shape[-1]).max(axis=0, initial=0.0)
        if empty_as_others:
            largest = np.where(largest > 0, largest, largest.max(initial=0.0))
        found |= {f"{name}[..., {i}]": float(value) for i, value in enumerate(largest)}
    return found


def _largest(tree: Tree) -> float:
    return max((float(np.abs(as_float64(x)).max(initial=0.0)) for x in floats(tree)), default=0.0)


def _is_shown(call: Call) -> bool:
    return not isinstance(call.layer, Model | Loss) and bool(floats(call.outputs))


def _ignore(*_: object) -> None:
    """No call is watched."""


def _norm(norms: Mapping[str, float]) -> float:
    return math.hypot(*norms.values())


def _pairs(mine: Mapping[str, float], usual: Mapping[str, float]) -> list[Growth]:
    return [Growth(name, value, usual[name]) for name, value in mine.items() if name in usual]


def _far(found: Iterable[Growth], ranked: bool = True) -> tuple[Growth, ...]:
    """Those that are far from the ordinary, the furthest first if they are `ranked`."""
    far = [growth for growth in found if not growth.ratio < _FAR]
    return tuple(sorted(far, key=lambda growth: -growth.ratio) if ranked else far)
