"""kmp: mixed precision for Keras 3 that never loses a run."""

from kmp import callbacks, debug, layers
from kmp._version import __version__
from kmp.amax import AmaxLossScale
from kmp.audit import audit
from kmp.autocasting import autocast
from kmp.convert import to_mixed_precision
from kmp.dtypes import cast_to_full, cast_to_half, half_dtype
from kmp.formats import formats
from kmp.optimizer import LossScaleOptimizer, scaled
from kmp.policy import Policy, get_policy, set_policy
from kmp.quantization import freeze_observers, quantize_aware, to_int8
from kmp.report import GradientReport
from kmp.scaling import DynamicLossScale, NoOpLossScale, ScaleState, StaticLossScale
from kmp.trees import all_finite, max_abs, select_tree

__all__ = [
    "AmaxLossScale",
    "DynamicLossScale",
    "GradientReport",
    "LossScaleOptimizer",
    "NoOpLossScale",
    "Policy",
    "ScaleState",
    "StaticLossScale",
    "__version__",
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
    "quantize_aware",
    "scaled",
    "select_tree",
    "set_policy",
    "to_int8",
    "to_mixed_precision",
]
