"""What TensorBoard shows of a run: `GradientHealth`'s reports as curves, histograms and images."""

import io
import math
import os
from typing import Any

import numpy as np

from kmp.callbacks.verdict import Verdict
from kmp.health import details as _sample
from kmp.health.measure import OVERFLOW_STEPS
from kmp.health.report import GradientReport
from kmp.summaries import SummaryWriter

LAYOUT: dict[str, dict[str, Any]] = {
    "Mixed precision": {
        "loss scale, log2": ["mixed_precision/loss_scale_log2$"],
        "skipped steps": ["mixed_precision/skipped_steps$"],
        "headroom, bits": ["mixed_precision/headroom_bits$"],
        "float16: % of the gradient degraded, lost": ["mixed_precision/(degraded|lost)_pct$"],
        "verdict: 0 healthy, 1 calibrating, 2 underflow, 3 unstable, 4 stalled, 5 collapsed, "
        "6 forward NaN": ["mixed_precision/verdict$"],
    },
    "Gradient health": {
        "global norm": ["grad/global_norm$"],
        "norm of each variable": ["grad_norm/.*"],
        "log10 of update / weight: median and range, healthy near -3": {
            "value": "update_ratio/median",
            "lower": "update_ratio/min",
            "upper": "update_ratio/max",
        },
        "log10 of update / weight, each variable": ["update_ratio_of/.*"],
        "overflows of each variable": ["grad_overflow_steps/.*"],
    },
}
_COLUMNS = (
    ("l2_norm", "grad_norm"),
    ("max_abs", "grad_max_abs"),
    ("zero_share", "grad_zero_share"),
    ("overflow_steps", "grad_overflow_steps"),
)
_EDGES = range(_sample.LOWEST, _sample.HIGHEST + 2)  # the same for all variables, steps and runs
_CELL, _LABEL, _LOOKS = 12, 240, 60  # pixels, pixels, columns of the heat map
_COLD, _HOT, _OVERFLOW, _ABSENT = (20, 20, 90), (250, 240, 110), (220, 20, 20), (200, 200, 200)


class Dashboard:
    """Writes reports so that TensorBoard's tab Custom Scalars shows them on two pages.

    Histograms, the heat map and the table of variables are written at the first ten looks and at
    each tenth from then on: they cost ten times what the curves do.

    Args:
        log_dir: the run's directory, as of `kmp.summaries.SummaryWriter`.
        before: the report at its beginning, whose overflows are not this run's; None if it is new.

    Example:

    >>> report = GradientReport(("a",), np.ones((1, 5), "float32"), 1024.0, 10, 0, 0)
    >>> board = Dashboard("logs/run_1")
    >>> board.write(report, Verdict("HEALTHY"), math.nan)
    >>> board.close()
    """

    def __init__(self, log_dir: str | os.PathLike[str], before: GradientReport | None = None):
        self._writer = SummaryWriter(log_dir)
        self._writer.custom_scalars_layout(LAYOUT)
        self._looks = 0
        self._history: list[tuple[np.ndarray, np.ndarray]] = []
        self._overflows = before.matrix[:, OVERFLOW_STEPS] if before else np.zeros(())

    def write(self, report: GradientReport, verdict: Verdict, update_ratio: float) -> None:
        """Write one look: the report, what it was judged, and its median log10 update ratio."""
        self._writer.scalars(_scalars(report, verdict, update_ratio), report.step)
        text = f"**{verdict}**\n\n```\n{report}\n```"
        self._writer.text("mixed_precision/report", text, report.step)
        overflows = report.matrix[:, OVERFLOW_STEPS]
        self._history.append((report.matrix[:, 0], overflows > self._overflows))
        self._history, self._overflows = self._history[-_LOOKS:], overflows.copy()
        self._looks += 1
        if self._looks <= 10 or self._looks % 10 == 0:
            self._write_pictures(report)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _write_pictures(self, report: GradientReport) -> None:
        for path, counts in (report.exponents or {}).items():
            self._writer.histogram(
                f"grad_exponent/{path}", counts[1:-1].tolist(), _EDGES, report.step
            )
        self._writer.text("mixed_precision/variables", _table(report), report.step)
        if report.paths:
            picture, size = heat_map(report.paths, self._history)
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
    for column, tag in _COLUMNS:
        scalars |= {f"{tag}/{path}": x for path, x in report.column(column).items()}
    if report.details is not None:
        for name, shares in (
            ("degraded", report.degraded_share),
            ("lost", report.lost_share),
            ("unmoved", report.unmoved_share),
        ):
            scalars[f"mixed_precision/{name}_pct"] = 100 * float(np.mean(list(shares.values())))
        scalars |= {f"weight_norm/{path}": x for path, x in report.weight_norm.items()}
    ratios = report.update_ratio
    if ratios:
        scalars["update_ratio/median"] = update_ratio
        scalars["update_ratio/min"] = min(ratios.values())
        scalars["update_ratio/max"] = max(ratios.values())
        scalars |= {f"update_ratio_of/{path}": x for path, x in ratios.items()}
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


def heat_map(
    paths: tuple[str, ...], looks: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[bytes, tuple[int, int]]:
    """Draw the norms of the variables (rows) over the looks (columns), red where one overflowed.

    Args:
        paths: the variables' paths.
        looks: for each look float32[num_variables] norms and bool[num_variables], whether the
            variable has overflowed since the look before.

    Returns:
        A PNG, and its width and height in pixels.
    """
    from PIL import Image, ImageDraw  # only here, since it takes time to import

    with np.errstate(divide="ignore"):
        levels = np.log10(np.stack([norms for norms, _ in looks], axis=1).astype("float64"))
    bad = np.stack([overflowed for _, overflowed in looks], axis=1)
    known = np.isfinite(levels)
    low, high = (levels[known].min(), levels[known].max()) if known.any() else (0.0, 1.0)
    heat = (np.where(known, levels, low) - low) / max(high - low, 1e-9)
    colours = np.array(_COLD) + heat[..., None] * (np.array(_HOT) - np.array(_COLD))
    colours[~known] = _ABSENT
    colours[bad] = _OVERFLOW
    pixels = np.kron(colours.astype("uint8"), np.ones((_CELL, _CELL, 1), "uint8"))
    size = (_LABEL + pixels.shape[1], pixels.shape[0] + _CELL)
    image = Image.new("RGB", size, "white")
    image.paste(Image.fromarray(pixels), (_LABEL, 0))
    draw = ImageDraw.Draw(image)
    for row, path in enumerate(paths):
        draw.text((2, row * _CELL), path[-38:], fill="black", font_size=_CELL - 2)
    legend = f"log10 norm {low:.1f} (dark) to {high:.1f} (light); red: overflowed"
    draw.text((2, size[1] - _CELL), legend, fill="black", font_size=_CELL - 2)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), size
