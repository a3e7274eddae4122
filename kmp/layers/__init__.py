"""Layers that keep in float32 what half precision loses."""

from kmp.layers.dense import Float32OutputDense
from kmp.layers.normalization import Float32BatchNormalization

__all__ = ["Float32BatchNormalization", "Float32OutputDense"]
