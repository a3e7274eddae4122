"""docs/lab/programs.md from the results."""

import pathlib
import re
from importlib.metadata import PackageNotFoundError, version

from catalogue import CATALOGUE

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "lab" / "programs.md"

COLUMNS = {
    "fit": "`fit` in `mixed_float16`: the losses of four steps are those of Keras's "
    "`LossScaleOptimizer`; then the verdict of `GradientHealth`",
    "convert": "`kmp.to_mixed_precision` of a float32 model that has trained a step: how many of "
    "the layers with weights compute in float16, how well the outputs agree, and it trains on",
    "file": "the converted model, saved in training, is loaded by a new process: same outputs, and "
    "the next two losses are the same",
    "audit": "`kmp.audit`: what it finds",
    "locate_nonfinite": "`kmp.debug.locate_nonfinite`: finds nothing in the sound model, and the "
    "right layer when the weights of one are NaN (the first, the middle and the last in turn)",
    "compare_precisions": "`kmp.debug.compare_precisions`: the output in `mixed_float16` against "
    "float32",
    "diagnose": "`kmp.debug.diagnose`: reaches 40 dB, and the model trains under its map: "
    "rebuilt, or converted to it where layers without a path are kept",
    "memory_report": "`kmp.debug.memory_report`: KiB of a step in float32, in mixed and in pure "
    "half precision",
    "quantize_aware": "`kmp.quantize_aware` trains two steps, then `kmp.to_int8`: how well int8 "
    "agrees",
}
TITLES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
MARKS = {"works": "works", "Keras cannot": "**Keras cannot**", "kmp cannot": "**kmp cannot**"}

INTRODUCTION = """# Other people's programs

Models that nobody here wrote, and programs of the kinds that keras.io shows, rewritten: each
with random weights in a small configuration, through everything that kmp does with a model.

```bash
make programs                                       # or, with the extra `programs` installed:
python compat/table.py                 # writes this page
python compat/table.py --only gpt2     # one row again
```

A cell says *works*, *Keras cannot* (plain Keras fails in the same place) or *kmp cannot*. What a
cell that works has found stands in the second table. `fit` is compiled, on TensorFlow without XLA
unless `PROGRAMS_XLA=1` is set; on TensorFlow the other columns train eagerly, which is quicker for
a step or two. On PyTorch all run eagerly, as they do in Keras by default. Layers that are frozen
are left out of `quantize_aware`, and of the GAN, which has no `call`, the tools of `kmp.debug` are
given the critic, as their message asks; of BayesFlow's approximator, its flow. BayesFlow's own
`train_step` scales no loss: the verdict STALLED says so. Keras's attention without dropout is JAX's
own, which has no float16 on CPUs, where this page was made: on JAX these cells of the ViT and
others say *Keras cannot*.
"""


def markdown(results: dict[str, dict], before: str = "") -> str:
    """The whole page: for each backend the states, then what was found.

    A backend whose results have holes keeps the section that it has in the page `before`, if any.
    """
    parts = [INTRODUCTION, "| column | what it asks |", "|---|---|"]
    parts += [f"| {name} | {text} |" for name, text in COLUMNS.items()]
    for backend, rows in results.items():
        old = old_section(backend, before)
        if old and sum(map(len, rows.values())) < len(CATALOGUE) * len(COLUMNS):
            parts += ["", old]
        elif rows:
            parts += section(backend, {name: rows.get(name, {}) for name in CATALOGUE})
    parts += ["", f"Versions: {', '.join(versions())}.", ""]
    return "\n".join(parts)


def old_section(backend: str, page: str) -> str:
    """What a page says of a backend, with its heading; "" if it does not."""
    _, heading, text = page.partition(f"## On {TITLES[backend]}\n")
    return (heading + re.split(r"\n## |\nVersions: ", text)[0]).rstrip() if heading else ""


def section(backend: str, rows: dict[str, dict]) -> list[str]:
    """The two tables of a backend."""
    cells = [cell for row in rows.values() for cell in row.values()]
    counts = [f"{sum(c['state'] == state for c in cells)} {state}" for state in MARKS]
    run = sum(bool(row) for row in rows.values())
    lines = [
        "",
        f"## On {TITLES[backend]}",
        "",
        f"Cells of {run} programs: {', '.join(counts)}.",
        "",
    ]
    lines += [f"| program | from | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, row in rows.items():
        entry = CATALOGUE[name]
        states = [MARKS[row[c]["state"]] if c in row else "not run" for c in COLUMNS]
        lines.append(f"| {entry.what} | {entry.source} | {' | '.join(states)} |")
    lines += ["", *failures(rows), "", "What was found where it works:", ""]
    lines += [f"| program | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, row in filter(lambda each: each[1], rows.items()):
        found = [row[c]["text"] if c in row and row[c]["state"] == "works" else "" for c in COLUMNS]
        lines.append(f"| {name} | {' | '.join(map(escaped, found))} |")
    return lines


def failures(rows: dict[str, dict]) -> list[str]:
    """A line for each cell that does not work."""
    return [
        f"- {CATALOGUE[name].what}, {column}, {cell['state']}: {escaped(cell['text'])}"
        for name, row in rows.items()
        for column, cell in row.items()
        if cell["state"] != "works"
    ]


def escaped(text: str) -> str:
    """Text that a cell of a table can hold."""
    return text.replace("|", "\\|")


def versions() -> list[str]:
    """The packages that count, with their versions."""
    found = []
    for package in ("keras", "keras-hub", "keras-rs", "bayesflow", "tensorflow", "jax", "torch"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found
