"""A picture of the gradient's norm: variables over time, and the looks that it is drawn from."""

import io
import math
import posixpath
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kmp.health.measure import L2_NORM
from kmp.health.report import GradientReport
from kmp.health.telemetry import OVERFLOW_STEPS
from kmp.summaries import check_installed

_LOOKS = 60  # columns of the heat map
_CELL, _LABEL = 12, 240  # pixels
_COLD, _HOT, _OVERFLOW, _ABSENT = (20, 20, 90), (250, 240, 110), (220, 20, 20), (200, 200, 200)
# Inches: the figure's width, a row's height, that of all rows at most; margins below, above, right.
_WIDTH, _ROW, _TALLEST, _BELOW, _ABOVE, _RIGHT = 9.0, 0.2, 12.0, 0.9, 0.4, 1.2
_DPI, _LETTER = 100, 0.068  # dots per inch; inches of a letter of a name
_NAMES, _STEPS, _LETTERS = 60, 10, 48  # labels of an axis, and letters of a name, at most
_TITLE = "Gradient norm of each variable"
_COLOUR_BAR = "log10 of the l2 norm"


class Column(NamedTuple):
    """A column of the heat map.

    Attributes:
        step: the training step.
        norms: float32[num_variables], the l2 norm of each variable's gradient.
        overflowed: bool[num_variables], whether it has overflowed since the look before.
    """

    step: int
    norms: np.ndarray
    overflowed: np.ndarray


class History:
    """The last 60 looks.

    Args:
        before: the report at the beginning, whose overflows are not this run's; None if the run is
            new.

    Attributes:
        paths: the variables' paths.
        looks: list of `Column`, the latest last.

    Example:

    >>> history = History()
    >>> history.add(GradientReport(("a",), np.ones((1, 5), "float32"), 1024.0, 10, 0, 0))
    >>> history.paths, history.looks[-1].step
    (('a',), 10)
    """

    def __init__(self, before: GradientReport | None = None):
        self.paths: tuple[str, ...] = ()
        self.looks: list[Column] = []
        self._overflows = before.matrix[:, OVERFLOW_STEPS].copy() if before else 0

    def add(self, report: GradientReport) -> None:
        """Keep what the heat map shows of a report."""
        overflows = report.matrix[:, OVERFLOW_STEPS]
        look = Column(report.step, report.matrix[:, L2_NORM], overflows > self._overflows)
        self.paths, self.looks = report.paths, [*self.looks, look][-_LOOKS:]
        self._overflows = overflows.copy()


def heat_map(paths: Sequence[str], looks: Sequence[Column]) -> tuple[bytes, tuple[int, int]]:
    """Draw the norms of the variables (rows) over the looks (columns), red where one overflowed.

    With matplotlib installed this is a figure with axes, names and a colour bar. It takes some
    10 ms per name, of which there are at most 60. Without matplotlib it is only cells and names.

    Args:
        paths: the variables' paths.
        looks: what was seen, at least one.

    Returns:
        A PNG, and its width and height in pixels.

    Example:

    >>> look = Column(100, np.ones(1, "float32"), np.zeros(1, bool))
    >>> png, (width, height) = heat_map(["dense/kernel"], [look])
    >>> png[1:4], width > height
    (b'PNG', True)
    """
    with np.errstate(divide="ignore"):
        levels = np.log10(np.stack([look.norms for look in looks], axis=1).astype("float64"))
    bad = np.stack([look.overflowed for look in looks], axis=1)
    try:
        from matplotlib.figure import Figure  # which leaves pyplot and its backend alone
    except ImportError:
        return _cells(paths, levels, bad)
    figure = Figure(figsize=(_WIDTH, _height(len(paths)) + _BELOW + _ABOVE), dpi=_DPI)
    _draw(figure, _short_names(paths), [look.step for look in looks], levels, bad)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    width, height = figure.get_size_inches() * _DPI
    return file.getvalue(), (round(width), round(height))


def picture(paths: Sequence[str], looks: Sequence[Column]) -> Any:
    """Draw what `heat_map` draws, as a `PIL.Image.Image`."""
    check_installed(["PIL"], "The heat map")
    from PIL import Image

    return Image.open(io.BytesIO(heat_map(paths, looks)[0]))


def _height(rows: int) -> float:
    """The inches of so many rows; at least enough for the colour bar."""
    return min(max(_ROW * rows, 1.0), _TALLEST)


def _draw(figure, names: Sequence[str], steps: list[int], levels: np.ndarray, bad: np.ndarray):
    """Draw float64[rows, columns] levels, and red where bool[rows, columns] `bad` is true.

    Places are computed here: a layout of matplotlib's takes longer than the drawing.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    red, grey = ("#" + bytes(colour).hex() for colour in (_OVERFLOW, _ABSENT))
    left, high = _LETTER * max(map(len, names)) + 0.2, _height(len(names))
    all_high = high + _BELOW + _ABOVE
    vertical = (_BELOW / all_high, high / all_high)
    wide = (_WIDTH - left - _RIGHT) / _WIDTH
    axes = figure.add_axes((left / _WIDTH, vertical[0], wide, vertical[1]))
    axes.set_facecolor(grey)
    place = {"aspect": "auto", "interpolation": "nearest"}
    heat = axes.imshow(np.ma.masked_invalid(levels), cmap="viridis", **place)
    axes.imshow(np.ma.masked_equal(bad, 0), cmap=ListedColormap([red]), **place)
    every = math.ceil(len(names) / _NAMES)
    axes.set_yticks(range(0, len(names), every), names[::every], fontsize=8)
    every = math.ceil(len(steps) / _STEPS)
    axes.set_xticks(range(0, len(steps), every), steps[::every], fontsize=8)
    axes.set_xlabel("training step")
    axes.set_title(_TITLE, fontsize=10)
    bar = figure.add_axes((1 - (_RIGHT - 0.2) / _WIDTH, vertical[0], 0.25 / _WIDTH, vertical[1]))
    figure.colorbar(heat, cax=bar).set_label(_COLOUR_BAR, fontsize=8)
    marks = [Patch(color=red, label="overflowed"), Patch(color=grey, label="no gradient")]
    figure.legend(handles=marks, loc="lower right", ncols=2, fontsize=8)


def _short_names(paths: Sequence[str]) -> list[str]:
    """The end of each path, without the part up to a "/" that all of them begin with."""
    common = posixpath.commonpath([f"/{path}" for path in paths]) if len(paths) > 1 else "/"
    return [f"/{path}".removeprefix(common).removeprefix("/")[-_LETTERS:] for path in paths]


def _cells(
    paths: Sequence[str], levels: np.ndarray, bad: np.ndarray
) -> tuple[bytes, tuple[int, int]]:
    """The same without matplotlib."""
    from PIL import Image, ImageDraw  # tensorboard depends on it

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
