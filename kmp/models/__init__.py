"""A model that exists already: convert it, audit it, quantize it."""

from kmp.models.auditing import AuditReport, Finding, audit
from kmp.models.convert import to_mixed_precision
from kmp.models.quantization import freeze_observers, quantize_aware, to_int8
from kmp.models.recomputation import (
    RecomputedBlock,
    RecomputedSegment,
    RecomputeReport,
    recompute,
)
from kmp.models.report import ConversionReport, LayerConversion

__all__ = [
    "AuditReport",
    "ConversionReport",
    "Finding",
    "LayerConversion",
    "RecomputeReport",
    "RecomputedBlock",
    "RecomputedSegment",
    "audit",
    "freeze_observers",
    "quantize_aware",
    "recompute",
    "to_int8",
    "to_mixed_precision",
]
