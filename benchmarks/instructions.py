"""What a step costs where seconds vary by a half: processor instructions, counted by callgrind.

    KERAS_BACKEND=jax python benchmarks/instructions.py             tracing, lowering, compiling
    KERAS_BACKEND=tensorflow python benchmarks/instructions.py --layers 20      the first step
    KERAS_BACKEND=torch python benchmarks/instructions.py --layers 3      twenty steps, eager

Of a model of small layers, two variables each, where next to nothing is computed. On a shared
machine the counts vary by less than a percent. Needs valgrind on the path; on JAX four minutes a
variant with 100 layers, on torch less than one.
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

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait count instructions, too
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from variants import VARIANTS

from kmp.cli.doctor import environment, environment_line

BATCH = 32


def start_counting() -> None:
    """Let callgrind count from here on, and Python collect no garbage of before."""
    gc.collect()
    gc.freeze()
    subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], check=True)


def on_jax(model: keras.Model, x: np.ndarray) -> None:
    """Compile a step; nothing is executed."""
    import jax

    state = tuple(
        [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    start_counting()
    jax.jit(model.train_step, donate_argnums=0).lower(state, (x, x)).compile()


def on_tensorflow(model: keras.Model, x: np.ndarray) -> None:
    """Trace, compile and run a step by XLA."""
    import tensorflow as tf

    model.make_train_function()
    batches = iter(tf.data.Dataset.from_tensors((x, x)).repeat())
    start_counting()
    model.train_function(batches)


def on_torch(model: keras.Model, x: np.ndarray) -> None:
    """Run twenty steps, after five that fill caches and whose gradients are all measured."""
    batch = (keras.ops.convert_to_tensor(x),) * 2
    for _ in range(5):
        model.train_step(batch)
    if hasattr(model.optimizer, "gradient_health"):
        model.optimizer.steps.assign(200)
    start_counting()
    for _ in range(20):
        model.train_step(batch)


ON_BACKEND = {"jax": on_jax, "tensorflow": on_tensorflow, "torch": on_torch}


def run(variant: str, layers: int, width: int) -> None:
    """What is counted, in a process of its own."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(width, activation="tanh") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *hidden])
    optimizer = VARIANTS[variant](keras.optimizers.Adam(1e-4))
    backend = keras.backend.backend()
    model.compile(optimizer, "mse", auto_scale_loss=False, jit_compile=backend != "torch")
    optimizer.build(model.trainable_variables)
    if variant == "watched":
        optimizer.sample_gradients(100)
    x = np.zeros((BATCH, width), "float32")
    model._symbolic_build(data_batch=(x, x))  # the metrics' variables
    ON_BACKEND[backend](model, x)
    os._exit(0)  # what Python does at its end does not count


def instructions(variant: str, layers: int, width: int) -> int:
    """How many instructions it takes."""
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
        run(arguments.one, arguments.layers, arguments.width)
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
        print(f"{variant:8} {count / 1e6:>12,.1f} million instructions")


if __name__ == "__main__":
    main()
