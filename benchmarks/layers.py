"""kmp's layers against Keras's: time, bytes kept for the backward pass, temporary memory.

    KERAS_BACKEND=jax python benchmarks/layers.py           a table
    KERAS_BACKEND=jax python benchmarks/layers.py --json    the same as JSON
    KERAS_BACKEND=tensorflow python benchmarks/layers.py --no-xla

A step is a forward and a backward pass on half inputs. The two layers run in turn; the ratio is
that of the medians, kmp's over Keras's, with the quartiles of the ratios of neighbours. Bytes kept
are a share of those of the inputs, variables aside (JAX and PyTorch; a test counts TensorFlow's).
Temporary memory is what XLA needs beside arguments and results (JAX).
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

import keras
import numpy as np
from keras import ops

import kmp
from kmp._backend import backend
from kmp.cli.doctor import version_of

BACKEND = keras.backend.backend()
# name: (kmp's layer, Keras's, shape of the inputs)
CASES = {
    "batch_norm": (
        lambda policy: kmp.layers.Float32BatchNormalization(dtype=policy),
        lambda policy: keras.layers.BatchNormalization(dtype=policy),
        (32, 32, 32, 64),
    ),
    "head": (
        lambda policy: kmp.layers.Float32OutputDense(32_000, dtype=policy),
        lambda policy: keras.layers.Dense(32_000, dtype="float32"),
        (2048, 512),
    ),
}
SMALL = {"batch_norm": (8, 8, 8, 16), "head": (16, 32)}
HALVES = ("float16", "bfloat16")


class Step:
    """One layer's forward and backward pass, compiled."""

    def __init__(self, layer: keras.Layer, shape: tuple[int, ...], half: str, xla: bool):
        self.layer = layer
        layer.build(shape)
        random = np.random.default_rng(0)
        self.x = ops.cast(random.normal(size=shape), half)
        y = layer(self.x, training=True)
        self.cotangent = ops.cast(random.normal(size=y.shape), y.dtype)
        self.pull_back = {"jax": self._jax, "tensorflow": self._tensorflow, "torch": self._torch}[
            BACKEND
        ](xla)
        self()

    def __call__(self) -> float:
        """Run it; the milliseconds that it took."""
        start = time.perf_counter()
        to_x, *_ = self.pull_back(self.x, self.cotangent)
        ops.convert_to_numpy(ops.ravel(to_x)[:1])  # wait for the device
        return 1e3 * (time.perf_counter() - start)

    def _values(self):
        trainable = [v.value for v in self.layer.trainable_variables]
        return trainable, [v.value for v in self.layer.non_trainable_variables]

    def _jax(self, xla):
        import jax

        trainable, others = self._values()

        def output(x, trainable):
            return self.layer.stateless_call(trainable, others, x, training=True)[0]

        def pull_back(x, cotangent, trainable):
            to_x, to_variables = jax.vjp(output, x, trainable)[1](cotangent)
            return to_x, *to_variables

        kept = jax.tree_util.tree_leaves(jax.vjp(output, self.x, trainable)[1])
        self.kept = _bytes(kept, besides=trainable)
        compiled = jax.jit(pull_back).lower(self.x, self.cotangent, trainable).compile()
        self.temporary = compiled.memory_analysis().temp_size_in_bytes
        return lambda x, cotangent: compiled(x, cotangent, trainable)

    def _tensorflow(self, xla):
        import tensorflow as tf

        @tf.function(jit_compile=xla)
        def pull_back(x, cotangent):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = self.layer(x, training=True)
            return tape.gradient(y, [x, *self._values()[0]], cotangent)

        self.kept = self.temporary = None
        return pull_back

    def _torch(self, xla):
        import torch

        self.x.requires_grad_()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            self.layer(self.x, training=True)
        self.kept, self.temporary = _bytes(saved, besides=self._values()[0]), None

        def pull_back(x, cotangent):
            return torch.autograd.grad(
                self.layer(x, training=True), [x, *self._values()[0]], cotangent
            )

        return pull_back


def _bytes(tensors, besides) -> int:
    """Bytes of tensors, each counted once, those of `besides` not at all."""

    def place(tensor):
        return tensor.data_ptr() if BACKEND == "torch" else id(tensor)

    found = {place(t): t.nbytes for t in tensors if hasattr(t, "nbytes")}
    return sum(size for key, size in found.items() if key not in {place(t) for t in besides})


def measure(name: str, half: str, rounds: int, small: bool, xla: bool) -> dict:
    """Compare the layers of one case."""
    ours, theirs, shape = CASES[name]
    shape = SMALL[name] if small else shape
    steps = [Step(make(f"mixed_{half}"), shape, half, xla) for make in (ours, theirs)]
    times: list[list[float]] = [[], []]
    for i in range(rounds):
        for j in (0, 1) if i % 2 else (1, 0):
            times[j].append(steps[j]())
        print(f"\r{name} {half}: {i + 1} of {rounds} rounds", end="", file=sys.stderr)
    print(file=sys.stderr)
    medians = [statistics.median(each) for each in times]
    ratios = [a / b for a, b in zip(*times, strict=True)]
    inputs = 2 * int(np.prod(shape))
    return {
        "keras_ms": medians[1],
        "time_ratio": medians[0] / medians[1],
        "time_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "kept_share": [s.kept and s.kept / inputs for s in steps],
        "temporary_mb": [s.temporary and s.temporary / 1e6 for s in steps],
    }


def environment() -> dict:
    """Versions and device."""
    names = {"tensorflow": ["tensorflow"], "jax": ["jax", "jaxlib"], "torch": ["torch"]}[BACKEND]
    versions = {name: version_of(name) for name in ("keras", "numpy", *names)}
    found = backend.device()
    processor = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
    device = processor if found.platform == "cpu" else found.name
    return {"backend": BACKEND, "device": device, "kmp": kmp.__version__, **versions}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=CASES, help="measure this alone")
    parser.add_argument("--no-xla", action="store_true", help="TensorFlow without jit_compile")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to see that it runs")
    arguments = parser.parse_args()
    results = {
        f"{name} {half}": measure(
            name, half, arguments.rounds, arguments.smoke, not arguments.no_xla
        )
        for name in CASES
        if arguments.only in (None, name)
        for half in HALVES
    }
    found = environment() | {"xla": BACKEND == "jax" or not arguments.no_xla}
    if arguments.json:
        print(json.dumps({"environment": found, "results": results}))
        return
    print(", ".join(f"{name} {value}" for name, value in found.items()))
    print(
        f"{'':20} {'Keras':>9}  {'time, kmp / Keras [quartiles]':>30}"
        f"  {'kept / inputs, kmp, Keras':>26}  {'temporary, kmp, Keras':>22}"
    )
    for name, row in results.items():
        time_cell = "{:.3f} [{:.3f}, {:.3f}]".format(row["time_ratio"], *row["time_quartiles"])
        kept, temporary = (
            ", ".join("-" if x is None else f"{x:.2f}" for x in row[key])
            for key in ("kept_share", "temporary_mb")
        )
        print(
            f"{name:20} {row['keras_ms']:>6.1f} ms  {time_cell:>30}  {kept:>26}  {temporary:>19} MB"
        )


if __name__ == "__main__":
    main()
