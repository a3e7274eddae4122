"""Draw docs/performance.png from the first table of docs/performance.md.

    python benchmarks/draw_performance.py

Needs the extra `examples`, for Matplotlib.
"""

import pathlib

from matplotlib import pyplot as plt

DOCS = pathlib.Path(__file__).parents[1] / "docs"
COLORS = ("#b0bec5", "#3f51b5", "#9fa8da")


def table(page: str) -> tuple[list[str], list[tuple[str, list[float]]]]:
    """The names of the last three columns, and each row's model and ratios."""
    lines = [line for line in page.split("## A step")[1].splitlines() if line.startswith("|")]
    end = next(i for i, line in enumerate(lines) if line.startswith("| transformer, 116"))
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]
    ]
    return header[2:], [(row[0].replace("`", ""), [float(x) for x in row[2:]]) for row in rows]


def main() -> None:
    """Draw."""
    names, rows = table((DOCS / "performance.md").read_text())
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, (name, color) in enumerate(zip(names, COLORS, strict=True)):
        places = [row + 0.27 * i for row in range(len(rows))]
        more = [ratios[i] - 1 for _, ratios in rows]
        axes.barh(places, more, 0.25, left=1, label=name, color=color)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlim(0.9, 1.4)
    axes.set_yticks([row + 0.27 for row in range(len(rows))], [model for model, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("time of a step / the same with plain Adam (two CPU cores)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "performance.png", dpi=110)


if __name__ == "__main__":
    main()
