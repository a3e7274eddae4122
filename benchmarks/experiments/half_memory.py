"""Train with bfloat16 weights and slots under several optimizers into docs/lab/half_memory.md.

    KERAS_BACKEND=jax python benchmarks/experiments/half_memory.py optimizers    any backend
    KERAS_BACKEND=jax python benchmarks/experiments/half_memory.py transformer   twenty minutes
    KERAS_BACKEND=jax python benchmarks/experiments/half_memory.py codes         an hour
    KERAS_BACKEND=jax python benchmarks/experiments/half_memory.py longer        an hour

All use the test of `python -m kmp certify`. Each run keeps its result in build/half_memory, and
writes the page anew from all that is there.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false"
os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{tempfile.gettempdir()}/kmp-half-memory-{os.getpid()}"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import keras
import numpy as np
from sklearn.datasets import load_digits

from kmp.cli.architectures import cross_entropy, mlp
from kmp.cli.certify import Certificate, certify
from kmp.cli.doctor import environment
from kmp.cli.ledger import Ledger
from kmp.cli.printing import Progress
from kmp.cli.tasks import TASKS, Task
from kmp.half_memory import codes

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "build" / "half_memory"
PAGE = ROOT / "docs" / "lab" / "half_memory.md"
BACKEND = keras.backend.backend()

# All weights in bfloat16, those of the output layer too, which computes in float32.
HALF = "p=bf16,c=bf16,o=f32"
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(1e-3),
    "AdamW": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.01),
    "SGD with momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Lion": lambda: keras.optimizers.Lion(1e-4),
}
# Slots in 8 bits: beside float32 weights, and beside bfloat16 ones with int8 remainders.
CODED = ["p=f32,c=bf16,o=f32,slot_dtype=int8", f"{HALF},master_weights=24,slot_dtype=int8"]
UNDER_CODES = {
    **{name: OPTIMIZERS[name] for name in ("Adam", "AdamW", "Lion")},
    "Muon": lambda: keras.optimizers.Muon(2e-3),
}
INTRODUCTION = """# Does it train with half the memory?

Weights and the optimizer's slots in bfloat16, against float32, from the same seeds and on the same
batches. kmp computes each update in float32 and rounds once, at random. *Equivalent* means that the
90% interval of the mean difference lies within a margin that was stated before: one point of
accuracy, 2% of a loss. [Parity](../parity.md) explains the test, and has five tasks more.

```bash
KERAS_BACKEND=jax python benchmarks/experiments/half_memory.py optimizers  # each backend
KERAS_BACKEND=jax python benchmarks/experiments/half_memory.py transformer
KERAS_BACKEND=jax python benchmarks/experiments/half_memory.py codes
KERAS_BACKEND=jax python benchmarks/experiments/half_memory.py longer
```
"""
TITLES = {
    "optimizers": """## Four optimizers

scikit-learn's digits, an MLP 64-128-10 whose weights and slots are all in bfloat16; accuracy on the
half that was held back.
""",
    "transformer": """## A transformer, trained on

The decoder-only transformer of `examples/full_recipe.py`, width 64, two blocks, on the text of
Python's help, with Adam at a constant rate of 3e-4: at such a rate most updates are below half a
unit in the last place of a bfloat16 weight. Rounded to nearest they are lost.
""",
    "codes": """## Slots of 8 bits

The five tasks of [parity](../parity.md), which have Adam, and the MLP above under four optimizers.
Weights are kept in float32, and in bfloat16 with remainders of 8 bits. So that small models say
something too, slots of all sizes are coded here, and not only those of 4096 numbers or more.
""",
    "longer": """## A transformer, eight times as long, with slots of 8 bits

The same transformer at the same rate, for 3,072 steps on four times as much text; slots of all
sizes are coded.
""",
}


def digits(seed: int, optimizer: str):
    """Digits, split again by each seed, and an MLP for them."""
    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.data))
    x, y = (data.data[order] / 16).astype("float32"), data.target[order]
    model = mlp(64, [128], 10)
    model.compile((OPTIMIZERS | UNDER_CODES)[optimizer](), cross_entropy(), metrics=["accuracy"])
    half = len(x) // 2
    return model, (x[:half], y[:half]), (x[half:], y[half:])


def recipe(seed: int, windows: int = 2048):
    """The transformer of the full recipe, and windows of its text."""
    sys.path.insert(0, str(ROOT / "examples"))
    full_recipe = importlib.import_module("full_recipe")
    training, validation = full_recipe.read_text()
    x, y = full_recipe.draw_windows(np.roll(training, seed * 1000), windows)
    model = full_recipe.build_model(64, 2)
    model.compile(keras.optimizers.Adam(3e-4), cross_entropy())
    return model, (x, y), full_recipe.draw_windows(validation, 512)


def tasks(which: str) -> dict[str, tuple[Task, list[str]]]:
    """The tasks of a table, each with its policies."""
    if which == "transformer":
        task = Task("transformer", recipe, "loss", 0.02, True, epochs=6, batch_size=32, seeds=3)
        more = [HALF, f"{HALF},slot_dtype=float32", f"{HALF},rounding=nearest"]
        return {"Adam": (task, more)}
    if which == "optimizers":
        return {
            name: (on_digits(name), [HALF, f"{HALF},slot_dtype=float32"]) for name in OPTIMIZERS
        }
    codes._FEWEST = 1
    if which == "longer":
        build = functools.partial(recipe, windows=8192)
        task = Task("longer", build, "loss", 0.02, True, epochs=12, batch_size=32, seeds=3)
        return {"Adam": (task, CODED)}
    five = {name: dataclasses.replace(task, seeds=10) for name, task in TASKS.items()}
    four = {f"MLP, {name}": on_digits(name) for name in UNDER_CODES}
    return {name: (task, CODED) for name, task in (five | four).items()}


def on_digits(optimizer: str) -> Task:
    """An MLP on the digits, 10 seeds, with a margin of one point of accuracy."""
    build = functools.partial(digits, optimizer=optimizer)
    return Task(optimizer, build, "accuracy", 0.01, False, 10, 32, 10)


def rows(name: str, certificate: Certificate) -> list[list[str]]:
    """The rows of a task, without what a busy CPU says of speed."""
    return [[name, BACKEND, *row[:5]] for row in certificate.cells[1:]]


def page() -> str:
    """The page, from all results that are there."""
    parts = [INTRODUCTION]
    for which, title in TITLES.items():
        found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{which}-*.json"))]
        if not found:
            continue
        header = ["task" if which == "codes" else "optimizer", "backend", *found[0]["header"]]
        table = [header, ["---"] * len(header), *(row for each in found for row in each["rows"])]
        parts += [title, *(f"| {' | '.join(row)} |" for row in table), ""]
        parts += [f"{each['facts']}.\n" for each in found]
    return "\n".join(parts)


def main() -> None:
    """Train, keep the result, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=list(TITLES))
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = f"{arguments.which}-{BACKEND}"
    ledger = Ledger(str(RESULTS / f"{name}.jsonl"), environment())
    found: list[list[str]] = []
    for optimizer, (task, policies) in tasks(arguments.which).items():
        with Progress(f"{name} {optimizer}") as progress:
            certificate = certify(task, policies, progress, ledger)
        print(f"{certificate}\n", flush=True)
        found += rows(optimizer, certificate)
    facts = ", ".join(f"{key} {value}" for key, value in environment().items())
    content = {"header": certificate.cells[0][:5], "rows": found, "facts": facts}
    (RESULTS / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
