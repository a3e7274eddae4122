"""What loss scaling and gradient health add to the compiled step, counted on an H100 and a TPU.

    make compiled-counts                    all of them, in environments of their own
    python benchmarks/compiled_counts.py --target tpu --model mlp
    python benchmarks/compiled_counts.py --target h100 --policy bfloat16 --half-memory

XLA's compilers for both run ahead of time on a machine that has neither: nothing is executed, and
the counts repeat exactly. Needs JAX and the extra `tpu` or `h100` (one environment each). A row is
the extra over plain Adam on the same model, except the first.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.update(
    TPU_SKIP_MDS_QUERY="1",  # or it would look for the machine's metadata server
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # there is no TPU that two processes could quarrel about
)

import hlo
import jax
import keras
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import MODELS

import kmp
from kmp._backend import backend
from kmp.cli.doctor import version_of

# What XLA's compiler needs to know of the device; NVIDIA's public figures.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def _watched(inner):
    optimizer = kmp.LossScaleOptimizer(inner)
    optimizer.measures_details = True  # as GradientHealth asks for
    return optimizer


VARIANTS = {
    "plain": lambda inner: inner,
    "keras": keras.optimizers.LossScaleOptimizer,
    "kmp": lambda inner: kmp.LossScaleOptimizer(inner, measure_gradients=False),
    "kmp, spikes": lambda inner: kmp.LossScaleOptimizer(
        inner, measure_gradients=False, spikes="skip"
    ),
    "kmp, health": kmp.LossScaleOptimizer,
    "kmp, health, spikes": lambda inner: kmp.LossScaleOptimizer(inner, spikes="skip"),
    "kmp, watched": _watched,
}
# A policy, and arguments about memory.
HALF_MEMORY = {
    "bfloat16": ("bfloat16", {}),
    "remainders": ("bfloat16", {"master_weights": True}),
    "int8 slots": ("bfloat16", {"slot_dtype": "int8"}),
    "remainders, int8 slots": ("bfloat16", {"master_weights": True, "slot_dtype": "int8"}),
    "24 bits, int8 slots": ("bfloat16", {"master_weights": 24, "slot_dtype": "int8"}),
    "float32, int8 slots": ("mixed_bfloat16", {"slot_dtype": "int8"}),
}
DEFAULT_MODELS = ("large_mlp", "large_transformer", "resnet50")


def chosen(variant: str, policy: str) -> tuple[str, Callable]:
    """The policy of a variant, and what makes its optimizer of Keras's."""
    if variant not in HALF_MEMORY:
        return policy, VARIANTS[variant]
    policy, memory = HALF_MEMORY[variant]
    settings = {"loss_scale": "none", "measure_gradients": False, **memory}
    return policy, functools.partial(kmp.LossScaleOptimizer, **settings)


def compiled(target: str, name: str, policy: str, variant: str, inner: str, accumulate: int):
    """Compile one train step.

    Args:
        accumulate: `gradient_accumulation_steps` of the optimizer; 1 for none.

    Returns:
        `(compiled, number of parameters)`.
    """
    platform = {"h100": "gpu"}.get(target, target)
    type(backend).platform = lambda self: platform  # as where there is one
    policy, wrap = chosen(variant, policy)
    keras.config.set_dtype_policy(policy)
    model, *data = MODELS[name]()
    settings = {"gradient_accumulation_steps": accumulate} if accumulate > 1 else {}
    optimizer = wrap(getattr(keras.optimizers, inner)(**settings))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, auto_scale_loss=False)
    model._symbolic_build(data_batch=data)  # the metrics' and the optimizer's variables
    if target == "tpu":
        topology = topologies.get_topology_desc("v5e:2x2", platform="tpu")
    else:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=H100, topology="1x1x1"
        )
    mesh = Mesh(np.array(topology.devices), ["batch"])

    def described(array, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    state = tuple(
        [described(v.value) for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    data = tuple(described(array, "batch") for array in data)
    step = jax.jit(model.train_step, donate_argnums=0).lower(state, data)
    return step.compile(), model.count_params()


def measure(target: str, name: str, policy: str, variant: str, inner: str, accumulate: int) -> dict:
    """Counts of one step, with its temporary memory and its number of parameters."""
    step, parameters = compiled(target, name, policy, variant, inner, accumulate)
    found = hlo.counts(step.as_text())
    if target == "tpu":  # as its compiler counts, which knows what stays in vector memory
        found["bytes"] = int(step.cost_analysis()["bytes accessed"])
    memory = step.memory_analysis()
    found["temporary"] = memory.temp_size_in_bytes
    found["arguments"] = memory.argument_size_in_bytes
    return found | {"parameters": parameters}


def table(title: str, rows: dict[str, dict]) -> str:
    """Plain Adam's counts, and what each variant adds to them."""
    lines = [
        title,
        f"{'':22} {'kernels':>8} {'GB moved':>9} {'bytes/param':>12} {'copies':>7} "
        f"{'conditionals':>13} {'host':>5} {'temporary MB':>13} {'arguments MB':>13}",
    ]
    plain = rows["plain"]
    for variant, row in rows.items():
        extra = {key: row[key] - plain[key] for key in row}
        base = row if variant == "plain" else extra
        sign = "" if variant == "plain" else "+"
        per_parameter = extra["bytes"] / row["parameters"]
        lines.append(
            f"{variant:22} {base['kernels']:>{sign}8} {row['bytes'] / 1e9:>9.2f} "
            f"{per_parameter:>12.2f} {base['copies']:>{sign}7} {row['conditionals']:>13} "
            f"{row['host_transfers']:>5} {base['temporary'] / 1e6:>{sign}13.1f} "
            f"{row['arguments'] / 1e6:>13.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("h100", "tpu"), required=True)
    parser.add_argument("--model", choices=MODELS, nargs="*", default=list(DEFAULT_MODELS))
    parser.add_argument("--policy", default="mixed_bfloat16")
    parser.add_argument("--optimizer", default="Adam", help="a Keras optimizer's class")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of an update")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--half-memory", action="store_true", help="weights and slots in fewer bits"
    )
    choices = [*VARIANTS, *HALF_MEMORY]
    parser.add_argument("--variant", choices=choices, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    target, policy, inner = arguments.target, arguments.policy, arguments.optimizer
    accumulate = arguments.accumulate
    if arguments.variant:
        (name,) = arguments.model
        print(json.dumps(measure(target, name, policy, arguments.variant, inner, accumulate)))
        return
    variants = ["plain", *HALF_MEMORY] if arguments.half_memory else list(VARIANTS)
    results: dict[str, dict] = {}
    for name in arguments.model:
        results[name] = {}
        for variant in variants:  # a process each: the compilers keep what they have allocated
            print(f"{name}: {variant}", file=sys.stderr)
            command = [sys.executable, __file__, "--target", target, "--model", name]
            command += ["--policy", policy, "--optimizer", inner, "--variant", variant]
            command += ["--accumulate", str(accumulate)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[name][variant] = json.loads(done.stdout.splitlines()[-1])
    versions = {name: version_of(name) for name in ("keras", "jax", "jaxlib")}
    if arguments.json:
        chosen = vars(arguments)
        print(json.dumps({"arguments": chosen, "versions": versions, "results": results}))
        return
    device = {"h100": "NVIDIA H100", "tpu": "TPU v5e, 4 chips"}[target]
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    for name, rows in results.items():
        millions = rows["plain"]["parameters"] / 1e6
        title = f"{name}, {millions:.1f} million parameters, {inner}, {policy}"
        if accumulate > 1:
            title += f", {accumulate} micro-batches"
        print("\n" + table(f"{title}: {device}, not run", rows))


if __name__ == "__main__":
    main()
