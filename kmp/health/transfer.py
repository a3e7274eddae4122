"""Bringing the measurements to the host: everything at once, in one transfer."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp import _backend
from kmp._backend.types import Tensor
from kmp.health.report import GradientReport, read_events


def read_report(optimizer: Any, model: Any = None) -> GradientReport:
    """Read what `optimizer`, built and measuring, has counted; inside `fit` that of `model`."""
    variables = [
        optimizer.scale_variable,
        optimizer.steps,
        optimizer.skipped_steps,
        optimizer.consecutive_skips,
        optimizer.sampling,
        optimizer.gradient_health,
        optimizer.overflow_events,
        optimizer.gradient_details,
    ]
    values = transfer(_backend.read(model, variables))
    scale, step, skipped, in_a_row, sampling, matrix, events, details = values
    measured_step, details_step = sampling.tolist()[2:]
    paths = optimizer.variable_paths
    return GradientReport(
        paths=paths,
        matrix=matrix,
        loss_scale=float(scale),
        step=int(step),
        skipped_steps=int(skipped),
        consecutive_skips=int(in_a_row),
        events=read_events(events, paths),
        measured_step=measured_step,
        details=details if details_step else None,
        loss_is_scaled=optimizer.scale_was_read or not optimizer.loss_scale_matters,
    )


def transfer(values: Sequence[Tensor]) -> list[np.ndarray]:
    """Copy tensors of float32 and int32 to the host together, bit for bit.

    Floats travel as their bits: the counters are integers and stay exact beside them.
    """
    tensors = [ops.convert_to_tensor(x) for x in values]
    packed = ops.convert_to_numpy(_packed(tensors))
    ends = np.cumsum([int(np.prod(x.shape)) for x in tensors])
    return [
        (part.view("float32") if _is_float(x) else part).reshape(tuple(x.shape))
        for part, x in zip(np.split(packed, ends[:-1]), tensors, strict=True)
    ]


@_backend.compiled
def _packed(tensors: Sequence[Tensor]) -> Tensor:
    bits = [ops.view(x, "int32") if _is_float(x) else ops.cast(x, "int32") for x in tensors]
    return ops.concatenate([ops.reshape(x, (-1,)) for x in bits])


def _is_float(x: Tensor) -> bool:
    return keras.backend.standardize_dtype(x.dtype) == "float32"
