"""What kmp's telemetry costs: a training step with it over the same step without it.

    KERAS_BACKEND=jax python benchmarks/telemetry.py           a table
    KERAS_BACKEND=jax python benchmarks/telemetry.py --json    the same as JSON

A ratio is that of the CPU seconds of two `fit` calls that follow each other directly, on two
models: one with `measure_gradients=False`, and one that measures ("measured") or is watched by
`GradientHealth` at its default cadence too ("watched"). What else the machine does meets both. The
compile time is that of the first step of a model with 200 variables, each in a process of its own.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib import metadata

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import keras
import numpy as np
from keras import layers

import kmp

BATCH = 64
BACKEND = keras.backend.backend()
VARIANTS = ("without", "measured", "watched")
GOALS = {"cnn": 1.02, "mlp": 1.05, "compile": 1.3}


def cnn() -> keras.Model:
    """A small CNN with BatchNormalization, 114,000 parameters."""
    inputs = keras.Input((16, 16, 3))
    x = inputs
    for filters in (32, 64, 128):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.MaxPooling2D()(x)
    return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x)))


def mlp() -> keras.Model:
    """An MLP of 1.3 million parameters: its step is memory-bound, the worst case."""
    hidden = [layers.Dense(512, activation="relu") for _ in range(5)]
    return keras.Sequential([keras.Input((512,)), *hidden, layers.Dense(10)])


def deep() -> keras.Model:
    """One hundred small layers: 200 variables."""
    hidden = [layers.Dense(16, activation="tanh") for _ in range(99)]
    return keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(10)])


class Run:
    """A model and its data in one variant."""

    def __init__(self, build, variant: str, steps: int):
        keras.utils.set_random_seed(0)
        self.model = build()
        optimizer = kmp.LossScaleOptimizer(
            keras.optimizers.Adam(1e-4), measure_gradients=variant != "without"
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(optimizer, loss, jit_compile=BACKEND != "torch")
        random = np.random.default_rng(0)
        shape = (BATCH * steps, *self.model.input_shape[1:])
        self.x = random.normal(size=shape).astype("float32")
        self.y = random.integers(0, 10, BATCH * steps)
        self.callbacks = [kmp.callbacks.GradientHealth()] if variant == "watched" else []

    def fit(self) -> float:
        """Train one epoch; the CPU seconds that it took."""
        start = time.process_time()
        self.model.fit(self.x, self.y, batch_size=BATCH, verbose=0, callbacks=self.callbacks)
        return time.process_time() - start


def step_ratios(build, steps: int, rounds: int) -> dict:
    """Median and quartiles of the ratio of each variant, and the milliseconds of a step without."""
    runs = {variant: Run(build, variant, steps) for variant in VARIANTS}
    for run in runs.values():
        for _ in range(-(-110 // steps)):  # each of the first hundred steps is measured
            run.fit()
    ratios: dict[str, list[float]] = {variant: [] for variant in VARIANTS[1:]}
    milliseconds = []
    for i in range(rounds):
        order = list(VARIANTS[i % 3 :] + VARIANTS[: i % 3])
        seconds = {variant: runs[variant].fit() for variant in order}
        milliseconds.append(1e3 * seconds["without"] / steps)
        for variant in ratios:
            ratios[variant].append(seconds[variant] / seconds["without"])
        print(f"\r{build.__name__}: {i + 1} of {rounds} rounds", end="", file=sys.stderr)
    print(file=sys.stderr)
    summary: dict = {"without_ms": statistics.median(milliseconds)}
    for variant, values in ratios.items():
        summary[variant] = [statistics.median(values), *statistics.quantiles(values, n=4)[::2]]
    return summary


def compile_seconds(rounds: int) -> dict:
    """Median CPU seconds of the first step with 200 variables, by variant, and their ratios."""
    seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for i in range(rounds):
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--first-step", variant]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds[variant].append(float(done.stdout.split()[-1]))
        print(f"\rcompile: {i + 1} of {rounds} rounds", end="", file=sys.stderr)
    print(file=sys.stderr)
    medians = {variant: statistics.median(x) for variant, x in seconds.items()}
    return {
        "without_ms": 1e3 * medians["without"],
        **{
            v: [medians[v] / medians["without"]]
            + [
                f(x / y for x, y in zip(seconds[v], seconds["without"], strict=True))
                for f in (min, max)
            ]
            for v in VARIANTS[1:]
        },
    }


def environment() -> dict:
    """Versions and device."""
    names = {"tensorflow": ["tensorflow"], "jax": ["jax", "jaxlib"], "torch": ["torch"]}[BACKEND]
    versions = {name: metadata.version(name) for name in ("keras", "numpy", *names)}
    device = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
    return {"backend": BACKEND, "device": device, "kmp": kmp.__version__, **versions}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=50, help="steps of one `fit`")
    parser.add_argument("--only", choices=GOALS, help="measure this alone")
    parser.add_argument("--first-step", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.first_step:
        print(Run(deep, arguments.first_step, 1).fit())
        return
    results = {}
    for build in (cnn, mlp):
        if arguments.only in (None, build.__name__):
            results[build.__name__] = step_ratios(build, arguments.steps, arguments.rounds)
    if arguments.only in (None, "compile"):
        results["compile"] = compile_seconds(max(arguments.rounds // 4, 1))
    if arguments.json:
        print(json.dumps({"environment": environment(), "goals": GOALS, "results": results}))
        return
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    print(
        f"{'':8} {'without':>10}  {'measured [quartiles]':>22}  {'watched [quartiles]':>22}  goal"
    )
    for name, row in results.items():
        cells = ["{:.3f} [{:.3f}, {:.3f}]".format(*row[variant]) for variant in VARIANTS[1:]]
        left, right = (f"{cell:>22}" for cell in cells)
        print(f"{name:8} {row['without_ms']:>7.1f} ms  {left}  {right}  {GOALS[name]}")


if __name__ == "__main__":
    main()
