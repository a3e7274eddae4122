"""What loss scaling and gradient health cost: a training step with them over a plain one.

    KERAS_BACKEND=jax python benchmarks/step_overhead.py                 a table
    KERAS_BACKEND=tensorflow python benchmarks/step_overhead.py --no-xla --model mlp
    KERAS_BACKEND=jax python benchmarks/step_overhead.py --json          the same as JSON
    KERAS_BACKEND=jax python benchmarks/step_overhead.py --variant health "health, spikes"
    KERAS_BACKEND=torch python benchmarks/step_overhead.py --policy bfloat16 --variant plain half

Every variant trains the same model with Adam in `fit`, in turn, and a ratio is that of neighbours,
over the first variant: what else the machine does meets both. On a CPU it is of CPU seconds, on an
accelerator of the time that passes. "watched" has a `GradientHealth` at its default cadence. The
first hundred steps, each of which is measured, are over by then.
"""

import argparse
import json
import os
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

import device_turns
import keras
import numpy as np
from models import MODELS
from variants import HALF_MEMORY, VARIANTS, WITH_SPIKES

import kmp
from kmp.cli.doctor import environment, environment_line

KNOWN = VARIANTS | WITH_SPIKES | HALF_MEMORY
WARM_UP = 110
ON_CPU = "(cpu)" in environment()["device"]


class Run:
    """A model and its data in one variant."""

    def __init__(self, name: str, variant: str, steps: int, xla: bool, accumulate: int | None):
        keras.utils.set_random_seed(0)
        self.model, x, y = MODELS[name]()
        inner = keras.optimizers.Adam(1e-4, gradient_accumulation_steps=accumulate)
        optimizer = KNOWN[variant](inner)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(optimizer, loss, jit_compile=xla, auto_scale_loss=False)
        self.batch = len(x)
        self.x, self.y = np.concatenate([x] * steps), np.concatenate([y] * steps)
        self.callbacks = [kmp.callbacks.GradientHealth()] if variant == "watched" else []

    def fit(self) -> float:
        """Train one epoch; the seconds that it took."""
        clock = time.process_time if ON_CPU else time.perf_counter
        start = clock()
        self.model.fit(self.x, self.y, batch_size=self.batch, verbose=0, callbacks=self.callbacks)
        return clock() - start


def overhead(
    name: str,
    policy: str,
    names: list[str],
    xla: bool,
    steps: int,
    rounds: int,
    accumulate: int | None,
) -> dict:
    """Median and quartiles of the ratio of each variant, and the milliseconds of the first."""
    keras.config.set_dtype_policy(policy)
    runs = {variant: Run(name, variant, steps, xla, accumulate) for variant in names}
    with device_turns.compiling():
        for variant, run in runs.items():
            print(f"\r{name}, {policy}: warming {variant} up", end=" " * 9, file=sys.stderr)
            for _ in range(-(-WARM_UP // steps)):
                run.fit()
    seconds: dict[str, list[float]] = {variant: [] for variant in names}
    with device_turns.timing():
        for i in range(rounds):
            for variant in names[i % len(names) :] + names[: i % len(names)]:
                seconds[variant].append(runs[variant].fit())
            print(f"\r{name}, {policy}: {i + 1} of {rounds} rounds", end=" " * 9, file=sys.stderr)
    print(file=sys.stderr)
    first, *others = names
    result: dict = {f"{first}_ms": 1e3 * statistics.median(seconds[first]) / steps}
    for variant in others:
        ratios = [a / b for a, b in zip(seconds[variant], seconds[first], strict=True)]
        result[variant] = [statistics.median(ratios), *statistics.quantiles(ratios, n=4)[::2]]
    return result


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="*", default=["mlp", "transformer", "cnn"])
    parser.add_argument(
        "--policy", nargs="*", default=["float32", "mixed_bfloat16", "mixed_float16"]
    )
    parser.add_argument(
        "--variant", choices=KNOWN, nargs="+", default=list(VARIANTS), help="the first is the base"
    )
    parser.add_argument("--no-xla", action="store_true", help="jit_compile=False")
    parser.add_argument("--torch-compile", action="store_true", help="jit_compile=True on torch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40, help="steps of one `fit`")
    parser.add_argument("--accumulate", type=int, help="micro-batches of an update")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    on_torch = keras.backend.backend() == "torch"
    xla = arguments.torch_compile if on_torch else not arguments.no_xla
    if on_torch and xla:  # else it leaves uncompiled what comes after eight models
        import torch._dynamo

        torch._dynamo.config.recompile_limit = 64
    results = {
        name: {
            policy: overhead(
                name,
                policy,
                arguments.variant,
                xla,
                arguments.steps,
                arguments.rounds,
                arguments.accumulate,
            )
            for policy in arguments.policy
        }
        for name in arguments.model
    }
    facts = environment() | {
        "jit_compile": str(xla),
        "micro-batches": str(arguments.accumulate or 1),
    }
    if arguments.json:
        print(json.dumps({"environment": facts, "results": results}))
        return
    print(environment_line(facts))
    first, *others = arguments.variant
    print(f"{'':28} {first:>9}" + "".join(f"{v:>22}" for v in others))
    for name, rows in results.items():
        for policy, row in rows.items():
            cells = "".join(f"{'{:.3f} [{:.3f}, {:.3f}]'.format(*row[v]):>22}" for v in others)
            print(f"{name:12} {policy:15} {row[f'{first}_ms']:>6.1f} ms{cells}")


if __name__ == "__main__":
    main()
