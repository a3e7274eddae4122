"""Gradient health: statistics that the compiled step measures, and their report on the host."""

from kmp.health.report import GradientReport, OverflowEvent

__all__ = ["GradientReport", "OverflowEvent"]
