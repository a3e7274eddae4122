"""Callbacks for `model.fit`."""

from kmp.callbacks.gradient_health import GradientHealth

__all__ = ["GradientHealth"]
