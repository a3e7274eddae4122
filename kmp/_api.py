"""Every public name of kmp."""

from kmp import callbacks, debug, layers
from kmp._common import PrecisionWarning
from kmp.callbacks import protect
from kmp.health import GradientReport
from kmp.models import audit, freeze_observers, quantize_aware, to_int8, to_mixed_precision
from kmp.precision import (
    Policy,
    autocast,
    cast_to_full,
    cast_to_half,
    formats,
    get_policy,
    half_dtype,
    set_policy,
)
from kmp.scaling import (
    AmaxLossScale,
    DynamicLossScale,
    LossScale,
    LossScaleOptimizer,
    NoOpLossScale,
    ScaleState,
    StaticLossScale,
    all_finite,
    max_abs,
    scaled,
    select_tree,
)

__all__ = [
    "AmaxLossScale",
    "DynamicLossScale",
    "GradientReport",
    "LossScale",
    "LossScaleOptimizer",
    "NoOpLossScale",
    "Policy",
    "PrecisionWarning",
    "ScaleState",
    "StaticLossScale",
    "all_finite",
    "audit",
    "autocast",
    "callbacks",
    "cast_to_full",
    "cast_to_half",
    "debug",
    "formats",
    "freeze_observers",
    "get_policy",
    "half_dtype",
    "layers",
    "max_abs",
    "protect",
    "quantize_aware",
    "scaled",
    "select_tree",
    "set_policy",
    "to_int8",
    "to_mixed_precision",
]
