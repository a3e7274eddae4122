"""What loss scaling and gradient health cost as models grow: first step, and the steps after it.

    KERAS_BACKEND=jax python benchmarks/scaling.py                         a table
    KERAS_BACKEND=tensorflow python benchmarks/scaling.py --layers 100 --json

Models of many small layers show the cost of a variable, which is that of compiling; those of few
large ones that of a parameter. Each first step is a process of its own (median CPU seconds of all
rounds); the steps after it are in that process too, so their ratios are of neither neighbours nor
the same memory, and coarser than those of `step_overhead.py`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

import keras
import numpy as np
from variants import VARIANTS

import kmp
from kmp.cli.doctor import environment, environment_line

BATCH = 32


sys.setrecursionlimit(100_000)  # Keras walks a model recursively


def measure(layers: int, width: int, variant: str, steps: int) -> tuple[float, float]:
    """CPU seconds of the first step, compilation included, and of one of the steps after it."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(width, activation="tanh") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *hidden])
    model.compile(
        VARIANTS[variant](keras.optimizers.Adam(1e-4)),
        "mse",
        jit_compile=keras.backend.backend() != "torch",
        auto_scale_loss=False,
    )
    callbacks = [kmp.callbacks.GradientHealth()] if variant == "watched" else []

    def fit(number: int) -> float:
        x = np.zeros((BATCH * number, width), "float32")
        start = time.process_time()
        model.fit(x, x, batch_size=BATCH, verbose=0, callbacks=callbacks)
        return time.process_time() - start

    first = fit(1)
    fit(100)  # each of the first hundred steps is measured
    return first, fit(steps) / steps


def in_a_process(layers: int, width: int, variant: str, steps: int) -> tuple[float, float]:
    """`measure`, where nothing has been compiled or allocated yet."""
    numbers = [str(x) for x in (layers, width, steps)]
    command = [sys.executable, __file__, "--one", variant, *numbers]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    first, step = done.stdout.split()[-2:]
    return float(first), float(step)


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
        print(*measure(layers, width, variant, steps))
        return
    shapes = [(n, 16) for n in arguments.layers] + [(2, width) for width in arguments.width]
    results = []
    for layers, width in shapes:
        found: dict[str, list] = {variant: [] for variant in VARIANTS}
        for _ in range(arguments.rounds):
            for variant, seconds in found.items():
                print(f"\r{layers} x {width}: {variant}", end=" " * 9, file=sys.stderr)
                seconds.append(in_a_process(layers, width, variant, arguments.steps))
        row = {
            variant: [statistics.median(column) for column in zip(*seconds, strict=True)]
            for variant, seconds in found.items()
        }
        parameters = layers * width * (width + 1)
        results.append({"variables": 2 * layers, "parameters": parameters, **row})
    print(file=sys.stderr)
    facts = environment()
    if arguments.json:
        print(json.dumps({"environment": facts, "results": results}))
        return
    print(environment_line(facts))
    others = list(VARIANTS)[1:]
    print(
        f"{'variables':>9} {'parameters':>10}  {'':10} {'plain':>10}", *(f"{v:>8}" for v in others)
    )
    for row in results:
        for i, name, unit, factor in ((0, "first step", "s", 1), (1, "step", "ms", 1e3)):
            plain = row["plain"][i]
            cells = " ".join(f"{row[v][i] / plain:>8.2f}" for v in others)
            print(
                f"{row['variables']:>9} {row['parameters']:>10}  {name:10} "
                f"{factor * plain:>7.2f} {unit:2} {cells}"
            )


if __name__ == "__main__":
    main()
