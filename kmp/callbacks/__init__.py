"""Callbacks for `model.fit`."""

from kmp.callbacks.divergence_guard import DivergenceGuard
from kmp.callbacks.gradient_health import GradientHealth
from kmp.callbacks.learning_rate_finder import LearningRateFinder
from kmp.callbacks.protection import Protection, protect
from kmp.callbacks.spike_detector import SpikeDetector, SpikeState
from kmp.callbacks.terminate_on_nan import TerminateOnNaN
from kmp.callbacks.verdict.states import Limits, Verdict

__all__ = [
    "DivergenceGuard",
    "GradientHealth",
    "LearningRateFinder",
    "Limits",
    "Protection",
    "SpikeDetector",
    "SpikeState",
    "TerminateOnNaN",
    "Verdict",
    "protect",
]
