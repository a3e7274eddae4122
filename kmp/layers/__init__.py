"""Layers that compute in float32 what half precision gets wrong."""

from kmp.layers.dense import Float32OutputDense
from kmp.layers.normalization import Float32BatchNormalization

__all__ = ["Float32BatchNormalization", "Float32OutputDense"]
