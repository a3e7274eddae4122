"""Weights and slots in half precision, whose updates are computed in float32."""

from kmp.half_memory.codes import decoded
from kmp.half_memory.slots import SCALES
from kmp.half_memory.split import join
from kmp.half_memory.updates import (
    MASTER,
    REMAINDER,
    SHORT_REMAINDER,
    HalfMemory,
    Stored,
    build_inner,
    exact_weights,
    gradient_dtypes,
    numbers_of,
)
from kmp.half_memory.views import Float32View

__all__ = [
    "MASTER",
    "REMAINDER",
    "SCALES",
    "SHORT_REMAINDER",
    "Float32View",
    "HalfMemory",
    "Stored",
    "build_inner",
    "decoded",
    "exact_weights",
    "gradient_dtypes",
    "join",
    "numbers_of",
]
