"""kmp: mixed precision for Keras 3 that never loses a run."""

from kmp import callbacks, layers
from kmp._version import __version__
from kmp.optimizer import LossScaleOptimizer, scaled
from kmp.report import GradientReport
from kmp.scaling import DynamicLossScale, NoOpLossScale, ScaleState, StaticLossScale
from kmp.trees import all_finite, select_tree

__all__ = [
    "DynamicLossScale",
    "GradientReport",
    "LossScaleOptimizer",
    "NoOpLossScale",
    "ScaleState",
    "StaticLossScale",
    "__version__",
    "all_finite",
    "callbacks",
    "layers",
    "scaled",
    "select_tree",
]
