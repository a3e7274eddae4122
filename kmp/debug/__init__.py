"""Which layer, and why: tools that look at one batch and change nothing."""

from kmp.debug.budget import MemoryPlan, PlannedStep, memory_plan
from kmp.debug.diagnosis import Diagnosis, diagnose
from kmp.debug.memory import BlockUse, MemoryReport, MemoryUse, memory_report
from kmp.debug.nonfinite import NonfiniteReport, locate_nonfinite
from kmp.debug.precisions import LayerPrecision, PrecisionReport, compare_precisions
from kmp.debug.ranges import LayerRange, Share
from kmp.debug.stats import TensorStats, sqnr, tensor_stats
from kmp.debug.unusual import Growth, SpikeExplanation, explain_spike

__all__ = [
    "BlockUse",
    "Diagnosis",
    "Growth",
    "LayerPrecision",
    "LayerRange",
    "MemoryPlan",
    "MemoryReport",
    "MemoryUse",
    "NonfiniteReport",
    "PlannedStep",
    "PrecisionReport",
    "Share",
    "SpikeExplanation",
    "TensorStats",
    "compare_precisions",
    "diagnose",
    "explain_spike",
    "locate_nonfinite",
    "memory_plan",
    "memory_report",
    "sqnr",
    "tensor_stats",
]
