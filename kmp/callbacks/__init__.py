"""Callbacks for `model.fit`."""

from kmp.callbacks.gradient_health import GradientHealth
from kmp.callbacks.spike_detector import SpikeDetector

__all__ = ["GradientHealth", "SpikeDetector"]
