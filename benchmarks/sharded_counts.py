"""What kmp adds to a sharded step on many devices: collectives, bytes and temporary memory.

    python benchmarks/sharded_counts.py                                16 chips, 20.8 million
    python benchmarks/sharded_counts.py --half-memory                  the same, other dtypes
    python benchmarks/sharded_counts.py --large --topology 16x16       256 chips, 7 billion
    python benchmarks/sharded_counts.py --large --target h100 --topology 2x4

XLA's compilers for TPUs and for GPUs run ahead of time, from shapes alone: no weight is in memory,
nothing is executed, and the counts repeat exactly. Kernels are split over both axes with `--large`,
over the model axis without. Needs JAX and the extra `tpu` or `h100` (one environment each).
"""

import argparse
import json
import subprocess
import sys
from unittest import mock

from compiled_counts import H100, HALF_MEMORY, VARIANTS, chosen  # isort: skip  (first: it sets the environment)

import fits
import hlo
import jax
import keras
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "model")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


def distribution(mesh: Mesh, both: bool):
    """Keras's ModelParallel: kernels split over the model axis, or over both."""
    names = [f"tpu:{i}" for i in range(mesh.size)]
    backend_mesh, mesh = mesh, keras.distribution.DeviceMesh(mesh.devices.shape, AXES, names)
    mesh._backend_mesh = backend_mesh  # or Keras would look for the devices on this machine
    data = "data" if both else None
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*embeddings"] = (data, "model")
    layouts[".*(query|key|value).kernel"] = (data, "model", None)
    layouts[".*attention_output.kernel"] = ("model", None, data)
    layouts[r".*dense(_\d*[02468])?.kernel"] = (data, "model")  # into the hidden layer; the head
    layouts[r".*dense_\d*[13579].kernel"] = ("model", data)
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="data")


def spec_of(variable, parallel) -> PartitionSpec:
    """How a variable lies on the mesh; a slot as its weight, whose path its name begins with."""
    axes = (None,) * len(variable.shape)
    for path, layout in parallel.items():
        if path == variable.path or variable.name.startswith(path.replace("/", "_") + "_"):
            axes = layout if len(layout) == len(variable.shape) else axes
    return PartitionSpec(*axes)


def count(arguments) -> dict:
    """Compile one step of a variant, and count in it."""
    rows, columns = map(int, arguments.topology.split("x"))
    if arguments.target == "tpu":
        found = topologies.get_topology_desc(f"v5e:{arguments.topology}", platform="tpu")
    else:
        found = topologies.get_topology_desc(
            platform="cuda", target_config=H100, topology=f"1x1x{rows * columns}"
        )
    mesh = Mesh(np.array(found.devices).reshape(rows, columns), AXES)
    parallel = distribution(mesh, arguments.large)
    keras.distribution.set_distribution(parallel)
    policy, wrap = chosen(arguments.variant, arguments.policy)
    keras.config.set_dtype_policy(policy)
    sizes = (arguments.blocks, 4096, 32, 32_000, 2048) if arguments.large else (4, 512, 8, 8000, 64)
    with mock.patch.object(jax, "device_put", lambda value, layout: value):  # there is no device
        model, optimizer = fits.build(*sizes, wrap=wrap)
    layouts = {}
    for v in model.trainable_variables:
        layout = parallel.get_variable_layout(v)
        if layout is not None and any(layout.axes):
            layouts[v.path] = tuple(layout.axes)

    def described(shape, dtype, spec):
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(mesh, spec))

    state = [
        [described(v.shape, v.dtype, spec_of(v, layouts)) for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]
    size = rows if arguments.large else 64
    batch = [described((size, sizes[-1]), "int32", PartitionSpec("data"))] * 2
    weights, others, slots = jax.tree.map(lambda x: x.sharding, state)
    step = jax.jit(
        fits.step_of(model, optimizer),
        donate_argnums=(0, 1, 2),
        out_shardings=(weights, slots, others),
    )
    program = step.lower(*state, *batch).compile()
    text, memory = program.as_text(), program.memory_analysis()
    result = {"parameters": model.count_params(), "temporary": memory.temp_size_in_bytes}
    result["arguments"] = memory.argument_size_in_bytes
    result["conditionals"] = hlo.counts(text)["conditionals"]
    for name in COLLECTIVES:
        sizes = hlo.collectives(text, name)
        result[name], result[f"{name} bytes"] = len(sizes), sum(sizes)
    return result


def table(title: str, found: dict[str, dict]) -> str:
    """A row for each variant: number and MB of each collective."""
    lines = [title, f"{'':24}" + "".join(f"{name:>22}" for name in COLLECTIVES)]
    lines[1] += f"{'conditionals':>14}{'temporary MB':>14}{'arguments MB':>14}"
    for variant, row in found.items():
        sizes = {name: row[f"{name} bytes"] / 1e6 for name in COLLECTIVES}
        cells = "".join(f"{f'{row[x]} ({size:.2f} MB)':>22}" for x, size in sizes.items())
        lines.append(
            f"{variant:24}{cells}{row['conditionals']:>14}{row['temporary'] / 1e6:>14.1f}"
            f"{row['arguments'] / 1e6:>14.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("tpu", "h100"), default="tpu")
    parser.add_argument("--topology", default="4x4", help="devices of the data and the model axis")
    parser.add_argument("--policy", default="mixed_bfloat16")
    parser.add_argument("--large", action="store_true", help="width 4096, words 32,000")
    parser.add_argument("--blocks", type=int, default=32, help="of the large model")
    parser.add_argument(
        "--half-memory", action="store_true", help="weights and slots in fewer bits"
    )
    choices = [*VARIANTS, *HALF_MEMORY]
    parser.add_argument("--variant", choices=choices, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(count(arguments)))
        return
    found = {}
    for variant in (
        HALF_MEMORY if arguments.half_memory else VARIANTS
    ):  # a process each: the compiler keeps what it has allocated
        print(variant, file=sys.stderr)
        command = [sys.executable, *sys.argv, "--variant", variant]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[variant] = json.loads(done.stdout.splitlines()[-1])
    millions = next(iter(found.values()))["parameters"] / 1e6
    policies = "half the memory" if arguments.half_memory else arguments.policy
    device = {"h100": "NVIDIA H100", "tpu": "TPU v5e"}[arguments.target]
    title = f"{millions:.1f} million parameters, {policies}, Adam: {device}, "
    print(table(f"{title}{arguments.topology} of them (data x model), not run", found))


if __name__ == "__main__":
    main()
