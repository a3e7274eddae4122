"""What compiling the train step costs on JAX's CPU backend, counted in instructions.

    KERAS_BACKEND=jax python benchmarks/compile_cost.py          some four minutes a variant

Tracing, lowering and compiling a model of 100 small layers, 200 variables. Seconds of CPU time vary
by a half on a shared machine, instructions by less than a percent. Needs valgrind on the path,
whose callgrind counts them; nothing is executed.
"""

import argparse
import gc
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import keras
import numpy as np
from variants import VARIANTS

from kmp.cli.doctor import environment, environment_line

BATCH = 32


def compile_step(variant: str, layers: int, width: int) -> None:
    """Compile one step, with the instructions of nothing else counted."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(width, activation="tanh") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *hidden])
    optimizer = VARIANTS[variant](keras.optimizers.Adam(1e-4))
    model.compile(optimizer, "mse", auto_scale_loss=False)
    optimizer.build(model.trainable_variables)
    if variant == "watched":
        optimizer.sample_gradients(100)
    x = np.zeros((BATCH, width), "float32")
    model._symbolic_build(data_batch=(x, x))  # the metrics' variables
    state = tuple(
        [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
            model.metrics_variables,
        )
    )
    gc.collect()
    gc.freeze()
    subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], check=True)
    jax.jit(model.train_step, donate_argnums=0).lower(state, (x, x)).compile()
    os._exit(0)  # what Python does at its end is not compiling


def instructions(variant: str, layers: int, width: int) -> int:
    """How many instructions `compile_step` takes, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "counts")
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        command += [f"--callgrind-out-file={path}", sys.executable, __file__]
        command += ["--one", variant, "--layers", str(layers), "--width", str(width)]
        subprocess.run(command, check=True, capture_output=True)
        return int(re.findall(r"^totals: (\d+)", path.read_text(), re.MULTILINE)[-1])


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=100, help="of two variables each")
    parser.add_argument("--width", type=int, default=16, help="of the layers")
    parser.add_argument("--variant", choices=VARIANTS, nargs="*", default=list(VARIANTS))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        compile_step(arguments.one, arguments.layers, arguments.width)
    counts = {}
    for variant in arguments.variant:
        print(f"\r{variant}", end=" " * 9, file=sys.stderr)
        counts[variant] = instructions(variant, arguments.layers, arguments.width)
    print(file=sys.stderr)
    facts = environment()
    if arguments.json:
        sizes = {"layers": arguments.layers, "width": arguments.width}
        print(json.dumps({"environment": facts, **sizes, "counts": counts}))
        return
    print(environment_line(facts))
    for variant, count in counts.items():
        print(f"{variant:8} {count / 1e9:>7.2f} thousand million instructions")


if __name__ == "__main__":
    main()
