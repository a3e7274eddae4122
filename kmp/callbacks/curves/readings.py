"""What `GradientHealth` tells of a look: in the logs of an epoch, and to `on_report`."""

import math
from typing import Any

import numpy as np

from kmp.callbacks.verdict.states import Grade, Verdict
from kmp.health.report import GradientReport

ALWAYS = ("loss_scale", "skipped_steps", "grad_norm", "verdict")
MORE = ("headroom_bits", "degraded_share", "lost_share", "update_ratio")
OF_SPIKES = ("skipped_spikes", "spike_score")  # only if the optimizer leaves out spikes


def numbers(
    report: GradientReport, verdict: Verdict | None, update_ratio: float
) -> dict[str, float]:
    """All that can go into the logs, by its name there.

    Example:

    >>> report = GradientReport(("a",), np.ones((1, 5), "float32"), 1024.0, 10, 0, 0)
    >>> numbers(report, Verdict("HEALTHY"), math.nan)["verdict"]
    HEALTHY
    """
    spikes = report.skipped_spikes
    of_spikes = () if spikes is None else (spikes, spikes / max(report.step, 1))
    return {
        "loss_scale": report.loss_scale,
        "skipped_steps": report.skipped_steps,
        "grad_norm": report.grad_norm,
        "verdict": Grade(verdict.code if verdict else 0),
        "headroom_bits": report.headroom_bits,
        "degraded_share": _mean(report.degraded_share),
        "lost_share": _mean(report.lost_share),
        "update_ratio": update_ratio,
        **dict(zip(OF_SPIKES, of_spikes, strict=False)),
    }


def flat(report: GradientReport, verdict: Verdict, update_ratio: float) -> dict[str, Any]:
    """A look as a flat dict of Python's own numbers, without what was not measured.

    Example:

    >>> report = GradientReport(("a",), np.ones((1, 5), "float32"), 1024.0, 10, 0, 0)
    >>> list(flat(report, Verdict("HEALTHY"), math.nan))[:4]
    ['step', 'loss_scale', 'skipped_steps', 'grad_norm']
    """
    known = numbers(report, verdict, update_ratio)
    known = {name: x for name, x in known.items() if name in ALWAYS or not math.isnan(x)}
    found: dict[str, Any] = {"step": report.step, **known}
    found["consecutive_skips"] = report.consecutive_skips
    found["grad_max_abs"] = report.max_abs
    # As in TensorBoard. A tracker that keeps each name in a file cannot have both `grad_norm` and
    # a folder of that name.
    for column, name in (("l2_norm", "grad_norm"), ("overflow_steps", "overflow_steps")):
        found |= {f"variable_{name}/{path}": x for path, x in report.column(column).items()}
    found |= {f"variable_update_ratio/{path}": x for path, x in report.update_ratio.items()}
    return found


def _mean(shares: dict[str, float]) -> float:
    return float(np.mean(list(shares.values()))) if shares else math.nan
