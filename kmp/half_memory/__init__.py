"""Weights and slots in half precision, whose updates are computed in float32."""

from kmp.half_memory.updates import (
    HalfMemory,
    build_inner,
    exact_weights,
    gradient_dtypes,
    is_master,
    masters_of,
)

__all__ = [
    "HalfMemory",
    "build_inner",
    "exact_weights",
    "gradient_dtypes",
    "is_master",
    "masters_of",
]
