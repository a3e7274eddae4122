"""What loss scaling and gradient health cost as models grow: first step, later steps, reading.

    KERAS_BACKEND=jax python benchmarks/scaling.py                              a table
    KERAS_BACKEND=tensorflow python benchmarks/scaling.py --layers 100 --width --json

Models of many small layers show the cost of a variable, which is that of compiling; those of few
large ones that of a parameter. Small layers stand in chains of at most 50, side by side, whose
outputs are added. Each first step is a process of its own (median CPU seconds of all rounds); the
steps after it are in that process too, so their ratios are of neither neighbours nor the same
memory, and coarser than those of `step_overhead.py`.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

import keras
import numpy as np
from variants import VARIANTS

import kmp
from kmp.cli.doctor import environment, environment_line

BATCH, DEPTH = 32, 50


def model_of(layers: int, width: int) -> keras.Model:
    """Dense layers, in chains side by side."""
    x = inputs = keras.Input((width,))
    ends = []
    for first in range(0, layers, DEPTH):
        x = inputs
        for _ in range(first, min(first + DEPTH, layers)):
            x = keras.layers.Dense(width, activation="tanh")(x)
        ends.append(x)
    return keras.Model(inputs, keras.layers.Add()(ends) if len(ends) > 1 else x)


def measure(layers: int, width: int, variant: str, steps: int) -> list[float]:
    """What a run of one variant takes.

    Returns:
        CPU seconds of the first step, with tracing and compilation, and of one of the steps after
        it; if watched, also those of reading and writing one report, and the bytes that one takes
        in TensorBoard's file.
    """
    keras.utils.set_random_seed(0)
    model = model_of(layers, width)
    optimizer = VARIANTS[variant](keras.optimizers.Adam(1e-4))
    model.compile(
        optimizer, "mse", jit_compile=keras.backend.backend() != "torch", auto_scale_loss=False
    )

    def fit(number: int, *callbacks: keras.callbacks.Callback) -> float:
        watching = [kmp.callbacks.GradientHealth()] if variant == "watched" else []
        x = np.random.default_rng(0).normal(size=(BATCH * number, width)).astype("float32")
        start = time.process_time()
        model.fit(x, x, batch_size=BATCH, verbose=0, callbacks=[*watching, *callbacks])
        return time.process_time() - start

    found = [fit(1)]
    fit(100)  # each of the first hundred steps is measured
    found.append(fit(steps) / steps)
    if variant == "watched":
        with tempfile.TemporaryDirectory() as folder:
            writing = kmp.callbacks.GradientHealth(log_dir=folder, update_freq=1)
            seconds = fit(steps, writing)
            written = sum(x.stat().st_size for x in pathlib.Path(folder).rglob("*") if x.is_file())
        found += [seconds / steps - found[1], written / steps]
    return found


def in_a_process(layers: int, width: int, variant: str, steps: int) -> list[float]:
    """`measure`, where nothing has been compiled or allocated yet."""
    numbers = [str(x) for x in (layers, width, steps)]
    command = [sys.executable, __file__, "--one", variant, *numbers]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(results: list[dict]) -> None:
    """Print the ratios to plain Adam."""
    others = list(VARIANTS)[1:]
    print(
        f"{'variables':>9} {'parameters':>10}  {'':10} {'plain':>10}", *(f"{v:>8}" for v in others)
    )
    for row in results:
        start = f"{row['variables']:>9} {row['parameters']:>10}"
        for i, name, unit, factor in ((0, "first step", "s", 1), (1, "step", "ms", 1e3)):
            plain = row["plain"][i]
            cells = " ".join(f"{row[v][i] / plain:>8.2f}" for v in others)
            print(f"{start}  {name:10} {factor * plain:>7.2f} {unit:2} {cells}")
        _, _, seconds, written = row["watched"]
        print(f"{start}  a report: {1e3 * seconds:.1f} ms, {written / 1e3:.1f} kB in TensorBoard")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layers", type=int, nargs="*", default=[5, 50, 250, 1000], help="of width 16"
    )
    parser.add_argument(
        "--width", type=int, nargs="*", default=[256, 1024, 2048], help="of two layers"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        variant, *numbers = arguments.one
        layers, width, steps = map(int, numbers)
        print(json.dumps(measure(layers, width, variant, steps)))
        return
    shapes = [(n, 16) for n in arguments.layers] + [(2, width) for width in arguments.width]
    results = []
    for layers, width in shapes:
        found: dict[str, list] = {variant: [] for variant in VARIANTS}
        for _ in range(arguments.rounds):
            for variant, figures in found.items():
                print(f"\r{layers} x {width}: {variant}", end=" " * 9, file=sys.stderr)
                figures.append(in_a_process(layers, width, variant, arguments.steps))
        row = {
            variant: [statistics.median(column) for column in zip(*figures, strict=True)]
            for variant, figures in found.items()
        }
        parameters = layers * width * (width + 1)
        results.append({"variables": 2 * layers, "parameters": parameters, **row})
    print(file=sys.stderr)
    facts = environment()
    if arguments.json:
        print(json.dumps({"environment": facts, "results": results}))
        return
    print(environment_line(facts))
    table(results)


if __name__ == "__main__":
    main()
