"""Bringing the measurements to the host: everything at once, in one transfer."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp._types import Tensor, Variable
from kmp.report import GradientReport, read_events


def read_report(
    optimizer: Any, values_of: Callable[[Sequence[Variable]], Sequence[Tensor]]
) -> GradientReport:
    """Read what `optimizer` has counted and measured.

    Args:
        optimizer: `kmp.LossScaleOptimizer`, built, that measures.
        values_of: gives the present values of its variables.
    """
    variables = [
        optimizer.dynamic_scale,
        optimizer.steps,
        optimizer.skipped_steps,
        optimizer.consecutive_skips,
        optimizer.sampling,
        optimizer.gradient_health,
        optimizer.overflow_events,
        optimizer.gradient_details,
    ]
    scale, step, skipped, in_a_row, sampling, matrix, events, details = transfer(
        values_of(variables)
    )
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
    )


def transfer(values: Sequence[Tensor]) -> list[np.ndarray]:
    """Copy tensors of float32 and int32 to the host together, bit for bit.

    Floats travel as their bits: the counters are integers and stay exact beside them.
    """
    tensors = [ops.convert_to_tensor(x) for x in values]
    floats = [keras.backend.standardize_dtype(x.dtype) == "float32" for x in tensors]
    bits = [
        ops.view(x, "int32") if is_float else ops.cast(x, "int32")
        for x, is_float in zip(tensors, floats, strict=True)
    ]
    packed = ops.convert_to_numpy(ops.concatenate([ops.reshape(x, (-1,)) for x in bits]))
    ends = np.cumsum([int(np.prod(x.shape)) for x in tensors])
    return [
        (part.view("float32") if is_float else part).reshape(tuple(x.shape))
        for part, is_float, x in zip(np.split(packed, ends[:-1]), floats, tensors, strict=True)
    ]
