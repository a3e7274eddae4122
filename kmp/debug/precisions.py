"""What a lower precision changes, layer by layer, with the same weights."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import Model

from kmp._backend import backend
from kmp._backend.types import Gradient, Tree
from kmp._common import table
from kmp._keras.calls import Call, Recorder
from kmp.debug.policies import Unit, policy_for, units_of
from kmp.debug.preserved import Preserved
from kmp.debug.ranges import advised_scale, max_abs
from kmp.debug.replay import (
    Batch,
    as_batch,
    backward,
    call_model,
    check_replayable,
    forward,
    loss_scale_of,
)
from kmp.debug.stats import as_float64, floats, sqnr, sqnr_of
from kmp.precision.temporary import under


@dataclasses.dataclass(frozen=True)
class LayerPrecision:
    """A call of a layer in lower precision, against float32.

    Attributes:
        path: `layer.path`, with the number of the call if it is not the name's first.
        dtype: what it computes in under the lower policy.
        max_abs: the largest finite absolute value of its float32 output.
        nonfinite: how many values of the lower output are inf or NaN.
        max_error: the largest absolute error that is finite.
        max_relative_error: the largest error relative to a float32 value that is not zero.
        cumulative_sqnr: dB of its output when all layers are lower: its own noise and that of all
            layers before it.
        local_sqnr: dB of its output when it runs alone on the float32 inputs; NaN for what cannot
            be run alone (a layer inside another, an operation).
        output_sqnr: dB of the model's output when only this layer (with the layers in it) is lower:
            what keeping it in float32 would gain. NaN as above, or if the model does not run so.
    """

    path: str
    dtype: str
    max_abs: float
    nonfinite: int
    max_error: float
    max_relative_error: float
    cumulative_sqnr: float
    local_sqnr: float
    output_sqnr: float


@dataclasses.dataclass(frozen=True, eq=False)
class PrecisionReport:
    """A model under a lower policy, against float32; see `compare_precisions`.

    Attributes:
        policy: the lower policy.
        rows: one for each call of a layer, in the order of execution.
        output_sqnr: dB of the model's output.
        gradient_sqnr: dB of each variable's gradient by its path; empty without targets.

    Example:

    >>> row = LayerPrecision("dense", "bfloat16", 4.0, 0, 0.01, 0.1, 52.0, 52.0, 55.0)
    >>> PrecisionReport("mixed_bfloat16", (row,), 52.0, {}).worst()
    ['dense']
    """

    policy: str
    rows: tuple[LayerPrecision, ...]
    output_sqnr: float
    gradient_sqnr: dict[str, float]

    def worst(self, n: int = 3) -> list[str]:
        """The paths of the `n` layers that cost the output most, the worst first."""
        order = sorted(
            (row for row in self.rows if not math.isnan(row.output_sqnr)),
            key=lambda row: row.output_sqnr,
        )
        return list(dict.fromkeys(row.path.split(" (call ")[0] for row in order))[:n]

    def __str__(self) -> str:
        header = ["layer", "dtype", "max |y|", "inf/NaN", "max err", "rel err", "SQNR dB"]
        rows = [[*header, "local", "only it"]]
        for row in self.rows:
            sizes = f"{row.max_abs:.3g}", str(row.nonfinite)
            errors = f"{row.max_error:.2g}", f"{row.max_relative_error:.2g}"
            quality = map(_dB, (row.cumulative_sqnr, row.local_sqnr, row.output_sqnr))
            rows.append([row.path, row.dtype, *sizes, *errors, *quality])
        lines = [f"{self.policy} against float32: output SQNR {_dB(self.output_sqnr)} dB"]
        if math.isnan(self.output_sqnr):
            lines = [
                f"{self.policy} against float32: no output SQNR, because the float32 output holds "
                "NaN or no finite float"
            ]
        lines.append(table(rows))
        if self.gradient_sqnr:
            gradients = [[path, _dB(value)] for path, value in self.gradient_sqnr.items()]
            lines.append(table([["gradient", "SQNR dB"], *gradients]))
        if self.worst():
            lines.append(f"Costs the output most: {', '.join(self.worst())}")
        return "\n".join(lines)


def _dB(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def compare_precisions(
    model: Model,
    x: Tree,
    y: Tree = None,
    policy: str | None = None,
    verbose: int = 0,
) -> PrecisionReport:
    """Run a model in float32 and in lower precision with the same weights, and compare.

    The cumulative SQNR of a layer includes the noise of all layers before it: it tells where noise
    shows, not where it comes from. The local SQNR tells where it comes from, and the output SQNR
    with only this layer lower tells what the layer costs. The layers' dtype policies are swapped
    and put back, nothing is cloned, and everything else is put back too. All runs are eager and in
    inference mode, and the activations of both runs are held in memory. Each layer takes one more
    run.

    Args:
        model: a built model; compiled, if `y` is given.
        x: one batch, as `predict` takes it.
        y: its targets, for the gradients of the compiled loss. The loss is multiplied by the loss
            scale that the optimizer has now, or by a smaller one if float16 could not hold the
            result, and the gradients are divided by it.
        policy: what to compare with, "mixed_float16" or "mixed_bfloat16". By default the half
            precision that the model computes in, and "mixed_float16" for a float32 model.
        verbose: 1 shows a progress bar.

    Returns:
        A `PrecisionReport`; print it.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: the model is not built, has no `call`, or is not compiled although `y` is given;
            `policy` does not compute in half precision, or the model does not run under it.

    Example:

    >>> model = keras.Sequential([
    ...     keras.Input((4,)),
    ...     keras.layers.Dense(4, name="a"),
    ...     keras.layers.Lambda(lambda x: (x + 3000) - 3000, name="rough"),
    ...     keras.layers.Dense(2, name="b"),
    ... ])
    >>> report = compare_precisions(model, np.ones((2, 4)), policy="mixed_bfloat16")
    >>> [row.dtype for row in report.rows], report.worst(1)
    (['bfloat16', 'bfloat16', 'bfloat16'], ['sequential.../rough'])
    """
    check_replayable(model, "compare_precisions", with_loss=y is not None)
    policy = policy_for(model, policy)
    batch = (as_batch(x), as_batch(y), None)
    with Preserved(model) as preserved:
        with under(model, "float32"):
            reference, outputs, _ = forward(model, batch, training=False)
        preserved.restore()
        with _all_under(model, policy):
            lower, lower_outputs, _ = forward(model, batch, training=False)
        units = {unit.head: unit for unit in units_of(model)}
        alone = {}
        progress = keras.utils.Progbar(len(units), verbose=verbose, unit_name="layer")
        for head, unit in units.items():
            alone[head] = output_sqnr(model, batch[0], outputs, policy, unit, preserved)
            progress.add(1)
        found = {call.key: call for call in lower.calls}
        rows = tuple(
            _row(call, found[call.key], _local_sqnr(call, policy, units, preserved), alone)
            for call in reference.calls
            if call.key in found and floats(call.outputs) and _is_shown(call, alone)
        )
        gradients = {} if y is None else _gradient_sqnr(model, batch, policy, reference, preserved)
    return PrecisionReport(policy, rows, sqnr_of(outputs, lower_outputs), gradients)


@contextlib.contextmanager
def _all_under(model: Model, policy: str) -> Iterator[None]:
    """Within, all layers compute under `policy`; raises ValueError if the model cannot run so."""
    try:
        with under(model, policy):
            yield
    except Exception as error:
        raise ValueError(
            f"`model` of compare_precisions must run under `policy`. Received: {model.name!r}, "
            f"which raises {type(error).__name__} where all its layers compute under {policy!r}. "
            "kmp.debug.diagnose names the layers to keep in float32."
        ) from error


def output_sqnr(
    model: Model, x: Tree, outputs: Tree, policy: str, unit: Unit, preserved: Preserved
) -> float:
    """The output SQNR in dB with only `unit` under `policy`; NaN where that does not run."""
    return quality_of(model, x, outputs, lambda: under(model, policy, unit.layers), preserved)


def quality_of(
    model: Model, x: Tree, outputs: Tree, policies: Callable, preserved: Preserved
) -> float:
    """The output SQNR in dB within `policies()`; NaN where the model does not run so.

    A model's own code may not mix dtypes: TensorFlow adds no float16 to float32.
    """
    preserved.restore()
    try:
        with policies():
            return sqnr_of(outputs, call_model(model, x, training=False))
    except Exception:
        return math.nan


def _is_shown(call: Call, alone: dict) -> bool:
    """Whether a call has a row; models that only call layers would repeat the last row."""
    return not isinstance(call.layer, Model) or call.layer in alone


def _local_sqnr(call: Call, policy: str, units: dict, preserved: Preserved) -> float:
    layer: Any = call.layer
    if layer not in units or isinstance(layer, Model):
        return math.nan
    preserved.restore()
    args, kwargs = call.passed
    try:
        with under(layer, policy):
            return sqnr_of(call.outputs, layer(*args, **kwargs))
    except Exception:
        return math.nan


def _row(call: Call, lower: Call, local: float, alone: dict) -> LayerPrecision:
    pairs = list(zip(floats(call.outputs), floats(lower.outputs), strict=True))
    right = np.concatenate([as_float64(a).ravel() for a, _ in pairs])
    given = np.concatenate([as_float64(b).ravel() for _, b in pairs])
    known = np.isfinite(right) & np.isfinite(given)
    error = np.abs(np.subtract(right, given, where=known, out=np.zeros_like(right)))
    comparable = known & (right != 0)
    relative = error[comparable] / np.abs(right[comparable])
    return LayerPrecision(
        path=call.path,
        dtype=lower.dtype,
        max_abs=float(np.abs(right[np.isfinite(right)]).max(initial=0.0)),
        nonfinite=int((~np.isfinite(given)).sum()),
        max_error=float(error.max(initial=0.0)),
        max_relative_error=float(relative.max(initial=0.0)),
        cumulative_sqnr=sqnr(right, given),
        local_sqnr=local,
        output_sqnr=alone.get(call.layer, math.nan),
    )


def _gradient_sqnr(
    model: Model, batch: Batch, policy: str, reference: Recorder, preserved: Preserved
) -> dict[str, float]:
    peak = 0.0

    def record(time, call, role, gradient):
        nonlocal peak
        peak = max(peak, max_abs([as_float64(gradient)]))

    preserved.restore()
    with under(model, "float32"):
        keys = {call.key for call in reference.calls}
        right = _numbers(backward(model, batch, 1.0, keys, record, training=False)[1])
    peak = max(peak, max_abs([g for g in right if g is not None]))
    scale = min(loss_scale_of(model), advised_scale(peak))
    preserved.restore()
    with _all_under(model, policy):
        given = _numbers(backward(model, batch, scale, set(), record, training=False)[1])
    pairs = zip(model.trainable_variables, right, given, strict=True)
    return {
        variable.path: sqnr(a, b / scale)
        for variable, a, b in pairs
        if a is not None and b is not None
    }


def _numbers(gradients: list[Gradient]) -> list[Any]:
    return [None if g is None else as_float64(backend.gradient_rows(g)) for g in gradients]
