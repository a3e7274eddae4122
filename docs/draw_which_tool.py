"""Draw docs/which_tool.svg, the picture of docs/overview.md: `python docs/draw_which_tool.py`."""

import html
import pathlib

# (what you see, the tool, what it tells), or a heading alone.
ROWS: list[tuple[str, ...]] = [
    ("Before training",),
    (
        "Will half precision hurt this model?",
        "kmp.audit(model)",
        "what is dangerous, without a run",
    ),
    ("Does it fit in memory?", "kmp.debug.memory_report", "bytes of weights, slots, activations"),
    (
        "Which precision on this machine?",
        "kmp doctor, kmp bench",
        "speed, memory and error of each",
    ),
    ("While it trains: GradientHealth().verdict",),
    (
        "FORWARD-NAN, COLLAPSED, skips",
        "kmp.debug.locate_nonfinite",
        "first layer, and its cause",
    ),
    ("↳ the layer needs more range", "kmp.debug.diagnose", "few float32 layers that cure it"),
    ("UNSTABLE after one batch", "kmp.debug.explain_spike", "what is unusual about the batch"),
    ("UNDERFLOW, STALLED", "print(health.verdict)", "the reason, and what to write"),
    ("After training",),
    ("HEALTHY, but worse than in float32", "kmp.debug.compare_precisions", "what each layer costs"),
    ("↳ one layer costs the most", "kmp.debug.diagnose", "the policy that keeps it in float32"),
    ("As good as float32, over seeds?", "kmp certify", "equivalent or not, by a test"),
    ("At any time",),
    ("An error, a message, an odd number", "docs/messages/", "a page for each, with its cure"),
]
WIDTH, LINE, TOP = 940, 40, 16
SEEN, TOOL, TELLS = (16, 300), (356, 250), 622  # left and width of the boxes; left of the words
STYLE = """text{font:14px system-ui,sans-serif;fill:#1f2430}.head{font-weight:700}
.tool{font-family:ui-monospace,monospace;font-size:13px}.tells{fill:#555}
.seen rect{fill:#eef1fb;stroke:#7a86c4}.does rect{fill:#e8f5ec;stroke:#4f9a6a}
path{stroke:#7a86c4;fill:none;stroke-width:1.5;marker-end:url(#tip)}"""


def box(kind: str, left: float, width: float, y: float, text: str, style: str = "") -> str:
    """A rectangle with a text in it."""
    return (
        f'<g class="{kind}"><rect x="{left}" y="{y}" width="{width}" height="30" rx="6"/>'
        f'<text class="{style}" x="{left + 10}" y="{y + 20}">{html.escape(text)}</text></g>'
    )


def draw() -> str:
    """The picture, as the text of an SVG file."""
    parts, y = [], TOP
    for row in ROWS:
        if len(row) == 1:
            parts.append(f'<text class="head" x="{SEEN[0]}" y="{y + 24}">{row[0]}</text>')
        else:
            seen, tool, tells = row
            # What follows from the row above stands a little to the right.
            left = SEEN[0] + (24 if seen.startswith("↳") else 0)
            width = SEEN[0] + SEEN[1] - left
            parts.append(box("seen", left, width, y, seen))
            parts.append(f'<path d="M{left + width} {y + 15}H{TOOL[0] - 3}"/>')
            parts.append(box("does", *TOOL, y, tool, "tool"))
            parts.append(
                f'<text class="tells" x="{TELLS}" y="{y + 20}">{html.escape(tells)}</text>'
            )
        y += LINE
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8" style="marker-end:none"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + TOP}" role="img">',
            "<title>Which tool for which question</title>",
            f"<defs><style>{STYLE}</style>{tip}</defs>",
            f'<rect width="{WIDTH}" height="{y + TOP}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    pathlib.Path(__file__).with_name("which_tool.svg").write_text(draw(), encoding="utf-8")
