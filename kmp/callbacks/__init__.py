"""Callbacks for `model.fit`."""

from kmp.callbacks.divergence_guard import DivergenceGuard
from kmp.callbacks.gradient_health import GradientHealth
from kmp.callbacks.learning_rate_finder import LearningRateFinder
from kmp.callbacks.spike_detector import SpikeDetector
from kmp.callbacks.terminate_on_nan import TerminateOnNaN

__all__ = [
    "DivergenceGuard",
    "GradientHealth",
    "LearningRateFinder",
    "SpikeDetector",
    "TerminateOnNaN",
]
