"""Loss scaling: the rules, the optimizer that applies them, and its state in files."""

from kmp.scaling.amax import AmaxLossScale
from kmp.scaling.optimizer import LossScaleOptimizer, scaled
from kmp.scaling.rules import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    ScaleState,
    StaticLossScale,
)
from kmp.scaling.trees import all_finite, max_abs, select_tree

__all__ = [
    "AmaxLossScale",
    "DynamicLossScale",
    "LossScale",
    "LossScaleOptimizer",
    "NoOpLossScale",
    "ScaleState",
    "StaticLossScale",
    "all_finite",
    "max_abs",
    "scaled",
    "select_tree",
]
