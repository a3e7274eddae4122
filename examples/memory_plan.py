"""What a training step will hold on a card that is not here: XLA's own plan, ahead of time.

    python examples/memory_plan.py --device h100     needs kmp's extras jax and h100
    python examples/memory_plan.py --device v5e     needs kmp's extras jax and tpu

XLA's compilers for NVIDIA's cards and for TPUs run on machines that have neither. From the shapes
of a model's variables they compile the whole step that `fit` would run, and say how many bytes it
needs: weights, slots, gradients, activations, scratch. No weight is in memory here and nothing is
executed, so that a plan for 8 billion parameters can be had on a laptop, in minutes of compiling.
It is not a measurement: what the allocator loses, and a few hundred MB that CUDA takes for itself,
come on top.

The other recipes import `plan` from here: see their option --plan. This script alone plans a
decoder of 1.1 billion parameters, under two policies.
"""

import argparse
import dataclasses
import functools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

import keras
import numpy as np
from keras import layers

import kmp

NOT_HERE = {  # a compiler must neither look for its device nor ask the machine for its name
    "KERAS_BACKEND": "jax",
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


V5E_MEMORY = 16 * 2**30  # bytes of one chip
DEVICES = ("here", "v5e", "t4", "l4", "h100")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes of one training step on one device; of one chip where there are several.

    Attributes:
        device: what it was planned for.
        parameters: numbers in the model's weights, on all devices.
        held: weights, optimizer's slots and the batch: what is there between steps.
        step: what comes on top during a step: gradients, activations, scratch.
        memory: what the device has; None where it is not known.
    """

    device: str
    parameters: int
    held: int
    step: int
    memory: int | None

    def __str__(self) -> str:
        total = self.held + self.step
        fits = "fits" if self.memory and total < self.memory else "does not fit"
        verdict = f": {fits} into {self.memory / 1e9:.1f} GB" if self.memory else ""
        return (
            f"{self.device}, {self.parameters / 1e6:,.1f} million parameters: held "
            f"{size(self.held)}, in a step {size(self.step)} more, together {size(total)}{verdict}"
        )


def size(number: float) -> str:
    """Bytes in words."""
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / 1e6:.2f} MB"


def numbers(model: keras.Model) -> int:
    """How many numbers are trained."""
    return sum(math.prod(v.shape) for v in model.trainable_variables)


def held_bytes(model: keras.Model) -> int:
    """The bytes of the weights and of all that the optimizer keeps."""
    kept = [*model.variables, *model.optimizer.variables]
    return sum(math.prod(v.shape) * int(re.search(r"\d+", v.dtype)[0]) // 8 for v in kept)


def again() -> int:
    """Run this command again in a process that may ask the compilers, and return its exit code."""
    return subprocess.run([sys.executable, *sys.argv], env={**os.environ, **NOT_HERE}).returncode


def is_ready() -> bool:
    """Whether this process may ask the compilers."""
    return all(os.environ.get(key) == value for key, value in NOT_HERE.items())


def topology_of(device: str):
    """The devices that JAX compiles for, and the bytes that one of them has."""
    import jax
    from jax.experimental import topologies

    if device == "here":
        return jax.devices(), None
    if device == "v5e":
        return topologies.get_topology_desc("v5e:2x4", platform="tpu").devices, V5E_MEMORY
    from kmp._backend.jax.cards import CARDS, device_of

    return [device_of(device)], CARDS[device].memory * 2**20


def plan(
    build: Callable[[], keras.Model],
    compile_model: Callable[[keras.Model], Any],
    batch: Any,
    device: str = "here",
    mesh_shape: tuple[int, int] | None = None,
    layouts: Callable[[Any], Any] | None = None,
) -> Plan:
    """Compile the step of `fit` for a device, and count its bytes.

    Args:
        build: makes the model. Here its weights have shapes, and no values.
        compile_model: calls `compile`, without metrics.
        batch: `(x, y)` or `(x, y, weights)`: arrays, or anything with a shape and a dtype.
        device: one of `DEVICES`; "here" is what JAX runs on.
        mesh_shape: how many devices share out the batch, and how many the model.
        layouts: called with a `keras.distribution.DeviceMesh`, returns the `LayoutMap` of the
            weights.
    """
    shape = mesh_shape or (1, 1)
    devices, memory = topology_of(device)
    # In these scopes variables have shapes, and no values.
    with keras.StatelessScope(initialize_variables=False):
        model = build()
    compile_model(model)
    with keras.StatelessScope(initialize_variables=False):
        model.optimizer.build(model.trainable_variables)
        compiled = compile_step(model, batch, np.array(devices[: math.prod(shape)]), shape, layouts)
    keras.backend.clear_session()  # which forgets the variables that wait for their values
    name = f"{math.prod(shape)} {device}" if mesh_shape else device
    return counted(compiled, name, model.count_params(), memory)


def compile_step(model: keras.Model, batch: Any, devices: np.ndarray, shape, layouts) -> Any:
    """What `fit` compiles, from shapes that lie on a mesh of devices."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(devices.reshape(shape), ("batch", "model"))
    axes = axes_of(model, shape, layouts)

    def described(x, spec=()):
        place = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(tuple(x.shape), x.dtype, sharding=place)

    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([described(v, axes(v)) for v in group] for group in groups)
    data = jax.tree.map(lambda x: described(x, ("batch",)), batch)
    kept = jax.tree.map(lambda x: x.sharding, state)
    step = jax.jit(model.train_step, donate_argnums=0, out_shardings=(None, kept))
    return step.lower(state, data).compile()


def plan_step(
    step: Callable, arguments: tuple, parameters: int, device: str = "here", donate: bool = True
) -> Plan:
    """Compile any pure function for a device, such as a training step of your own.

    Args:
        step: what `jax.jit` would be given.
        arguments: nested tuples, lists and dicts of Keras variables and of arrays, in place of the
            values that `step` is called with.
        parameters: what the plan is to say of their number.
        device: one of `DEVICES`.
        donate: whether the first argument gives its memory to the results.
    """
    import jax
    from jax.sharding import SingleDeviceSharding

    devices, memory = topology_of(device)
    place = SingleDeviceSharding(devices[0])

    def described(x):
        return jax.ShapeDtypeStruct(tuple(x.shape), x.dtype, sharding=place)

    shapes = keras.tree.map_structure(described, arguments)
    compiled = jax.jit(step, donate_argnums=0 if donate else ()).lower(*shapes).compile()
    return counted(compiled, device, parameters, memory)


def plan_forward(build: Callable[[], keras.Model], x: Any, device: str = "here") -> Plan:
    """Compile one call of a model, in inference, for a device; `build` as in `plan`."""
    with keras.StatelessScope(initialize_variables=False):
        model = build()

        def call(weights, x):
            return model.stateless_call(*weights, x, training=False)[0]

        weights = (model.trainable_variables, model.non_trainable_variables)
        found = plan_step(call, (weights, x), model.count_params(), device, donate=False)
    keras.backend.clear_session()
    return found


def counted(compiled: Any, device: str, parameters: int, memory: int | None) -> Plan:
    """What XLA says of a compiled program. What it gives back in place of arguments counts once."""
    found = compiled.memory_analysis()
    on_top = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return Plan(device, parameters, found.argument_size_in_bytes, on_top, memory)


def axes_of(
    model: keras.Model, shape: Sequence[int], layouts: Callable[[Any], Any] | None
) -> Callable[[Any], tuple]:
    """A function that says along which axes of the mesh a variable lies; a slot as its weight."""
    if layouts is None:
        return lambda variable: ()
    names = [f"chip:{i}" for i in range(shape[0] * shape[1])]
    chosen = layouts(keras.distribution.DeviceMesh(tuple(shape), ("batch", "model"), names))
    weights = {}
    for v in model.variables:
        layout = chosen[v.path]
        if layout is not None and any(layout.axes):
            weights[v.path] = tuple(layout.axes)
    slots = {path.replace("/", "_"): axes for path, axes in weights.items()}

    def axes(variable) -> tuple:
        found = weights.get(variable.path)
        if found is None:
            found = next(
                (axes for name, axes in slots.items() if variable.name.startswith(f"{name}_")), ()
            )
        return found if len(found) == len(variable.shape) else ()

    return axes


def decoder(blocks: int, width: int, words: int) -> keras.Model:
    """A decoder-only transformer."""
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(words, width)(inputs)
    for _ in range(blocks):
        normed = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(width // 64, 64)(normed, normed, use_causal_mask=True)
        hidden = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(hidden)
    logits = kmp.layers.Float32OutputDense(words)(layers.LayerNormalization()(x))
    return keras.Model(inputs, logits)


def compile_decoder(model: keras.Model) -> None:
    """With AdamW."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kmp.scaled("adamw", loss_scale="none", learning_rate=1e-4), loss)


def main() -> None:
    """Plan a decoder, in mixed bfloat16 and in bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="here")
    parser.add_argument("--smoke", action="store_true", help="a small model")
    arguments = parser.parse_args()
    if not is_ready():
        sys.exit(again())
    blocks, width, words = (2, 64, 500) if arguments.smoke else (20, 2048, 32_000)
    length = 32 if arguments.smoke else 1024
    tokens = np.zeros((4, length), "int32")
    for policy in ("mixed_bfloat16", "bfloat16"):
        keras.config.set_dtype_policy(policy)
        build = functools.partial(decoder, blocks, width, words)
        found = plan(build, compile_decoder, (tokens, tokens), arguments.device)
        print(f"{policy}, {found}")


if __name__ == "__main__":
    main()
