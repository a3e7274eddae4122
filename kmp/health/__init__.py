"""Gradient health: what the compiled step measures, and how the host reads it."""

from kmp.health.report import GradientReport, OverflowEvent

__all__ = ["GradientReport", "OverflowEvent"]
