"""What TensorBoard shows of a run: `GradientHealth`'s reports as curves, histograms and images."""

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kmp._keras.optimizer import is_several
from kmp.callbacks.curves.charts import DESCRIPTIONS, LAYOUT, SPIKES
from kmp.callbacks.curves.heat_map import History, heat_map
from kmp.callbacks.verdict.states import Verdict
from kmp.health import details as _sample
from kmp.health.report import GradientReport
from kmp.summaries import SummaryWriter

_COLUMNS = (
    ("l2_norm", "variable_grad_norm"),
    ("max_abs", "variable_grad_max_abs"),
    ("zero_share", "variable_grad_zero_share"),
    ("overflow_steps", "variable_overflow_steps"),
)
_EDGES = range(_sample.LOWEST, _sample.HIGHEST + 2)  # the same for all variables, steps and runs


class Dashboard:
    """Writes reports so that TensorBoard's tab Custom Scalars shows them on two pages.

    Histograms and the table of variables are written at the first ten looks and at every tenth from
    then on, the heat map at the first look and at every tenth, and all of them at the end. They
    cost ten times as much as the curves.

    Args:
        log_dir: the run's directory, as of `kmp.summaries.SummaryWriter`.
        history: the looks for the heat map; whoever adds to it does so before `write`.
        hparams: what sets the run apart in the tab HParams; None for nothing.

    Example:

    >>> report = GradientReport(("a",), np.ones((1, 5), "float32"), 1024.0, 10, 0, 0)
    >>> history = History()
    >>> history.add(report)
    >>> board = Dashboard("logs/run_1", history)
    >>> board.write(report, Verdict("HEALTHY"), math.nan)
    >>> board.close()
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        history: History,
        hparams: Mapping[str, float | str] | None = None,
    ):
        self._writer = SummaryWriter(log_dir, DESCRIPTIONS)
        if hparams:
            self._writer.hparams(hparams)
        self._looks = 0
        self._left: dict[Callable[[GradientReport], None], GradientReport] = {}
        self._history = history

    def write(self, report: GradientReport, verdict: Verdict, update_ratio: float) -> None:
        """Write one look: the report, what it was judged, and its median log10 update ratio."""
        if not self._looks:
            has_spikes = report.skipped_spikes is not None
            self._writer.custom_scalars_layout(LAYOUT | SPIKES if has_spikes else LAYOUT)
        self._writer.scalars(_scalars(report, verdict, update_ratio), report.step)
        text = f"**{verdict}**\n\n```\n{report.summary()}\n```"
        self._writer.text("mixed_precision/report", text, report.step)
        self._looks += 1
        for write, first in ((self._write_tables, 10), (self._write_heat_map, 1)):
            self._left[write] = report
            if self._looks <= first or self._looks % 10 == 0:
                write(self._left.pop(write))
        self._writer.flush()

    def close(self) -> None:
        """Write what has been left out of the last look, then close the file."""
        while self._left:
            write, report = self._left.popitem()
            write(report)
        self._writer.close()

    def _write_tables(self, report: GradientReport) -> None:
        for path, counts in (report.exponents or {}).items():
            self._writer.histogram(
                f"variable_grad_exponent/{path}", counts[1:-1].tolist(), _EDGES, report.step
            )
        self._writer.text("mixed_precision/variables", _table(report), report.step)

    def _write_heat_map(self, report: GradientReport) -> None:
        if report.paths:
            picture, size = heat_map(report.paths, self._history.looks)
            self._writer.image("heatmap/log10_grad_norm", picture, *size, report.step)


def _scalars(report: GradientReport, verdict: Verdict, update_ratio: float) -> dict[str, float]:
    scalars: dict[str, float] = {
        "mixed_precision/loss_scale": report.loss_scale,
        "mixed_precision/loss_scale_log2": math.log2(report.loss_scale),
        "mixed_precision/skipped_steps": report.skipped_steps,
        "mixed_precision/consecutive_skips": report.consecutive_skips,
        "mixed_precision/headroom_bits": report.headroom_bits,
        "mixed_precision/verdict": verdict.code,
        "grad/global_norm": report.grad_norm,
        "grad/max_abs": report.max_abs,
    }
    if report.skipped_spikes is not None:
        scalars["spikes/count"] = report.skipped_spikes
        scalars["spikes/score"] = report.skipped_spikes / max(report.step, 1)
        scalars["spikes/held_statistics"] = report.held_statistics or 0
    if report.spike_limit is not None:
        scalars["spikes/limit"] = report.spike_limit
    for column, tag in _COLUMNS:
        scalars |= {f"{tag}/{path}": x for path, x in report.column(column).items()}
    if report.details is not None:
        for name, shares in (
            ("degraded", report.degraded_share),
            ("lost", report.lost_share),
            ("unmoved", report.unmoved_share),
        ):
            scalars[f"mixed_precision/{name}_pct"] = 100 * float(np.mean(list(shares.values())))
        scalars |= {f"variable_weight_norm/{path}": x for path, x in report.weight_norm.items()}
    ratios = report.update_ratio
    if ratios:
        scalars["update_ratio/median"] = update_ratio
        scalars["update_ratio/min"] = min(ratios.values())
        scalars["update_ratio/max"] = max(ratios.values())
        scalars |= {f"variable_update_ratio/{path}": x for path, x in ratios.items()}
    return scalars


def _table(report: GradientReport) -> str:
    """The variables as a Markdown table."""
    rows = ["| variable | norm | largest | zeros | degraded | lost | log10 update | overflows |"]
    rows.append("|---|" + "--:|" * 7)
    ratios, degraded, lost = report.update_ratio, report.degraded_share, report.lost_share
    for path, (norm, peak, zeros, _, overflows) in zip(report.paths, report.matrix, strict=True):
        low = f"{degraded[path]:.1%} | {lost[path]:.1%}" if path in degraded else "| "
        ratio = f"{ratios[path]:.1f}" if path in ratios else ""
        rows.append(
            f"| {path} | {norm:.3g} | {peak:.3g} | {zeros:.1%} | {low} | {ratio} "
            f"| {overflows:.0f} |"
        )
    return "\n".join(rows)


def settings_of(model: Any, optimizer: Any) -> dict[str, float | str]:
    """What sets a run apart in the tab HParams.

    Args:
        model: `keras.Model`.
        optimizer: `kmp.LossScaleOptimizer`.

    Example:

    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> rule = kmp.DynamicLossScale(growth_interval=20)
    >>> settings_of(model, kmp.scaled("sgd", rule, learning_rate=0.5))["loss_scale"]
    'DynamicLossScale(growth_interval=20)'
    """
    inner = optimizer.inner_optimizer
    rate = inner.get_config().get("learning_rate")
    if is_several(inner):
        rate = "several"
    elif isinstance(rate, numbers.Real):
        rate = float(f"{float(rate):.6g}")  # 0.001, which float32 keeps as 0.0010000000474974513
    elif isinstance(rate, Mapping):
        rate = rate["class_name"]  # a schedule
    return {
        "policy": model.dtype_policy.name,
        "loss_scale": _short(optimizer.loss_scale),
        "optimizer": type(inner).__name__,
        "learning_rate": rate if isinstance(rate, float | str) else type(rate).__name__,
    }


def _short(rule: Any) -> str:
    """The class of a rule, and what is not left at its default."""
    fields = dataclasses.fields(rule) if dataclasses.is_dataclass(rule) else ()
    values = {f.name: getattr(rule, f.name) for f in fields if getattr(rule, f.name) != f.default}
    return f"{type(rule).__name__}({', '.join(f'{k}={v!r}' for k, v in values.items())})"
