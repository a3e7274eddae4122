"""Write the notebooks of the recipes from the examples, without outputs.

    python notebooks/from_examples.py    or `make notebooks`, which also runs them

A notebook has the script's text, its code in a cell for each function, a run with --smoke, the
picture that it drew, and XLA's plan. tests/test_notebooks.py compares the cells with the script.
"""

import ast
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
# For each: what else it needs, its picture, and the options of the plan.
RECIPES = {
    "finetune_language_model": ("keras-hub", "", ["--preset", "gemma_2b_en", "--plan", "here"]),
    "finetune_on_a_tpu": ("keras-hub", "", ["--plan", "here"]),
    "float16_on_a_t4": ("keras-hub", "", ["--preset", "gemma_2b_en", "--plan", "here"]),
    "gan": ("", "gan.png", ["--size", "64", "--width", "64", "--plan", "here"]),
    "custom_loop": ("", "", ["--plan", "here"]),
    "diffusion": ("", "diffusion.png", ["--size", "64", "--width", "64", "--plan", "here"]),
}
INSTALL = """\
# From the package index once kmp is published there. Until then, from a clone of its repository:
#   pip install '/path/to/the/clone[tensorflow,jax,examples]'{more}
# Where kmp is installed this cell does nothing. The recipes import each other from examples/.
import importlib.util
import os
import sys
import warnings

if importlib.util.find_spec("kmp") is None:
    %pip install --quiet "kmp[tensorflow,jax,examples]"{more}
os.environ["KERAS_BACKEND"] = {backend}
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # TensorFlow looks for a GPU, and says so
examples = [os.path.abspath("../examples"), os.environ.get("PYTHONPATH", "")]
sys.path.append(examples[0])
warnings.filterwarnings("ignore", message="IProgress")  # of a package that keras-hub needs
os.environ["PYTHONPATH"] = os.pathsep.join(examples)"""
SHORT = "## A short run"
SHORT_WITH_PICTURE = f"""\
{SHORT}

Its few epochs draw no digits yet; `main([])` trains longer."""
PLAN = """\
## The plan

What XLA says that the step holds, on the device that JAX has here, from shapes alone. For a card
that is not here write its name: `--plan l4`, `h100`, `t4` or `v5e`; see
[the recipes](../docs/recipes.md). For a CPU XLA computes half precision in float32, and keeps
what a card would compute again, so that its bytes are more than a card's."""
BACKEND = 'os.environ.get("KERAS_BACKEND", "jax")  # "tensorflow", "torch"'
ASK = """\
import subprocess

options = [{options}]
command = [sys.executable, "-m", "{name}", *options]
print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)"""


def cells_of(name: str) -> list[tuple[str, str]]:
    """(kind, source) of each cell, in order."""
    more, picture, options = RECIPES[name]
    backend = '"jax"  # it alone has ModelParallel' if name == "finetune_on_a_tpu" else BACKEND
    text = (ROOT / "examples" / f"{name}.py").read_text()
    title, _, prose = ast.get_docstring(ast.parse(text)).partition("\n")
    paragraphs = [p for p in prose.split("\n\n") if not p.strip("\n").startswith("    ")]
    words = "\n\n".join(p.strip() for p in paragraphs if p.strip())
    cells = [("markdown", f"# {title.rstrip('.')}\n\n{words}")]
    cells.append(("code", INSTALL.format(more=more and f" {more}", backend=backend)))
    cells += [("code", part) for part in parts_of(text)]
    cells.append(("markdown", SHORT_WITH_PICTURE if picture else SHORT))
    cells.append(("code", 'main(["--smoke"])'))
    if picture:
        cells.append(("code", f'from IPython.display import Image\n\nImage("{picture}")'))
    asked = ", ".join(json.dumps(option) for option in options)
    return [*cells, ("markdown", PLAN), ("code", ASK.format(name=name, options=asked))]


def parts_of(text: str) -> list[str]:
    """The imports and constants, then each function and class; without the last `if`."""
    tree, lines = ast.parse(text), text.splitlines()
    found, start = [], tree.body[0].end_lineno  # after the docstring
    for node in tree.body[1:-1]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
            found.append("\n".join(lines[start:first]))
            found.append("\n".join(lines[first : node.end_lineno]))
            start = node.end_lineno
    return [part.strip("\n") for part in found if part.strip()]


def notebook_of(name: str) -> dict:
    """A notebook without outputs, in nbformat 4.5."""
    cells = []
    for i, (kind, source) in enumerate(cells_of(name)):
        cell = {"cell_type": kind, "id": f"{name}-{i}", "metadata": {}, "source": source}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def main() -> None:
    """Write those whose cells are not those of their scripts any more."""
    for name in RECIPES:
        path = ROOT / "notebooks" / f"{name}.ipynb"
        if path.exists() and sources(json.loads(path.read_text())) == cells_of(name):
            continue
        path.write_text(json.dumps(notebook_of(name), indent=1) + "\n")


def sources(notebook: dict) -> list[tuple[str, str]]:
    """(kind, source) of each cell of a notebook."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


if __name__ == "__main__":
    main()
