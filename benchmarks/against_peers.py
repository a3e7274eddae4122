"""What loss scaling costs here and elsewhere: each framework over its own unscaled step.

    python benchmarks/against_peers.py            on one GPU: transformer of 116M, ResNet-50
    python benchmarks/against_peers.py --json     the same as JSON
    python benchmarks/against_peers.py --smoke    a small transformer, two rows, on any machine

Needs the extra `bench` (JAX, PyTorch, JMP, Flax, Optax); who is not installed is said to be so. All
train the same shapes with Adam in one process, in turn, some steps at a time. The cost is the ratio
of the medians, scaled over unscaled, with the quartiles of the ratios of neighbouring turns:

    kmp, Keras          Keras's train step on JAX; Keras's LossScaleOptimizer, kmp's, kmp's without
                        measuring; unscaled: bare Adam
    JMP, Flax           the same model in a loop of its own with Optax's Adam; unscaled: without
    PyTorch             autocast, GradScaler; unscaled: without, Adam fused or not in both
"""

import argparse
import concurrent.futures
import functools
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch is on the device too

import device_turns
import jax
import keras
import models
from jax import numpy as jnp

import kmp
from kmp.cli.doctor import version_of

MODELS = ("large_transformer", "resnet50")
# name: (what it is compared with, what it needs)
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kmp": ("keras unscaled", ()),
    "kmp, not measuring": ("keras unscaled", ()),
    "Keras": ("keras unscaled", ()),
    "JMP": ("optax unscaled", ("jmp", "optax")),
    "Flax": ("optax unscaled", ("flax", "optax")),
    "PyTorch": ("torch unscaled", ("torch",)),
    "PyTorch fused": ("torch fused unscaled", ("torch",)),
}
# of the `kmp.LossScaleOptimizer` of that name; a name that is not here has none
SETTINGS: dict[str, dict] = {
    "kmp, not measuring": {"measure_gradients": False},
    "kmp, spikes": {"spikes": "skip"},
    "kmp, float32 slots": {"slot_dtype": "float32"},
    "kmp, 8-bit slots": {"slot_dtype": "int8"},
    "kmp, exact masters": {"master_weights": True},
    "kmp, exact masters, 8-bit slots": {"master_weights": True, "slot_dtype": "int8"},
    "kmp, 24 bits, 8-bit slots": {"master_weights": 24, "slot_dtype": "int8"},
}


class Run(NamedTuple):
    """One framework's training."""

    step: Callable[[], None]  # starts a step
    wait: Callable[[], object]  # for all steps so far
    parameters: int
    bytes: int | None = None  # that the step holds, by the compiler


class Lowered(NamedTuple):
    """A training step of JAX's that XLA has yet to compile."""

    program: jax.stages.Lowered
    holder: list[list]  # of the state that the next step starts from
    data: tuple
    parameters: int


def keras_step(build: Callable, name: str) -> Lowered:
    """Keras's own train step on JAX."""
    keras.utils.set_random_seed(0)
    model, x, y = build()
    optimizer = keras.optimizers.Adam(1e-4)
    if name == "Keras":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    elif name != "keras unscaled":
        optimizer = kmp.LossScaleOptimizer(optimizer, **SETTINGS.get(name, {}))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, auto_scale_loss=False)
    optimizer.build(model.trainable_variables)
    if name == "kmp, watched":
        optimizer.sample_gradients(100)  # as GradientHealth does
    parts = ("trainable_variables", "non_trainable_variables")
    kept = [[v.value for v in getattr(model, part)] for part in parts]
    kept += [[v.value for v in optimizer.variables], [v.value for v in model.metrics_variables]]
    return _lowered(lambda state, data: model.train_step(state, data)[1], tuple(kept), (x, y))


def jax_step(build: Callable, name: str) -> Lowered:
    """A loop of one's own on JAX, as the documentation of JMP and Flax has it."""
    import optax

    keras.utils.set_random_seed(0)
    model, x, y = build()
    trainable = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]
    adam = optax.adam(1e-4)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss_of(trainable, others, data, scale=lambda loss: loss):
        logits, others = model.stateless_call(trainable, others, data[0], training=True)
        return scale(entropy(data[1], logits)), others

    def update(gradients, trainable, slots):
        updates, slots = adam.update(gradients, slots, trainable)
        return optax.apply_updates(trainable, updates), slots

    def unscaled(state, data):
        trainable, others, slots, rule = state
        gradients, others = jax.grad(loss_of, has_aux=True)(trainable, others, data)
        return *_swap(update(gradients, trainable, slots), others), rule

    def with_jmp(state, data):
        trainable, others, slots, rule = state
        gradients, others = jax.grad(loss_of, has_aux=True)(trainable, others, data, rule.scale)
        gradients = rule.unscale(gradients)
        finite = jmp.all_finite(gradients)
        new = update(gradients, trainable, slots)
        new = jmp.select_tree(finite, new, (trainable, slots))
        return *_swap(new, others), rule.adjust(finite)

    def with_flax(state, data):
        trainable, others, slots, rule = state
        slope = rule.value_and_grad(loss_of, has_aux=True)
        rule, finite, (_, others), gradients = slope(trainable, others, data)
        new = update(gradients, trainable, slots)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (trainable, slots))
        return *_swap(new, others), rule

    step, rule = unscaled, None
    if name == "JMP":
        import jmp

        step, rule = with_jmp, jmp.DynamicLossScale(jnp.asarray(2.0**15, "float32"))
    elif name == "Flax":
        from flax.training.dynamic_scale import DynamicScale

        step, rule = with_flax, DynamicScale(scale=jnp.asarray(2.0**15, "float32"))
    return _lowered(step, (trainable, others, adam.init(trainable), rule), (x, y))


def _swap(updated, others):
    trainable, slots = updated
    return trainable, others, slots


def _lowered(step: Callable, state, data) -> Lowered:
    data = jax.device_put(data)
    # Flat, since JMP's state cannot be rebuilt from what JAX describes arguments by. Copies, since
    # what is donated may still be a variable's.
    leaves, tree = jax.tree.flatten(state)
    holder = [[jnp.array(leaf) for leaf in leaves]]

    def flat_step(leaves, data):
        return jax.tree.leaves(step(jax.tree.unflatten(tree, leaves), data))

    program = jax.jit(flat_step, donate_argnums=0).lower(holder[0], data)
    return Lowered(program, holder, data, sum(v.size for v in state[0]))


def compiled(lowered: dict[str, Lowered]) -> dict[str, Run]:
    """Compile steps side by side: most of XLA's compiler runs on one core a program."""
    with concurrent.futures.ThreadPoolExecutor(len(lowered) or 1) as pool:
        programs = list(pool.map(lambda each: each.program.compile(), lowered.values()))
    pairs = zip(lowered.items(), programs, strict=True)
    return {name: _run(each, program) for (name, each), program in pairs}


def _run(lowered: Lowered, program) -> Run:
    holder, data = lowered.holder, lowered.data

    def step() -> None:
        holder[0] = program(holder[0], data)

    held = program.memory_analysis()
    size = held.argument_size_in_bytes + held.output_size_in_bytes - held.alias_size_in_bytes
    size += held.temp_size_in_bytes
    return Run(step, lambda: jax.block_until_ready(holder[0]), lowered.parameters, size)


def torch_step(name: str, model_name: str, data, half: str) -> Run:
    """PyTorch's autocast, with or without its GradScaler."""
    import torch
    import torch_models

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model, x, y = torch_models.on_device(torch_models.MODELS[model_name](), *data, device)
    adam = torch.optim.Adam(model.parameters(), 1e-4, fused="fused" in name)
    scaler = torch.amp.GradScaler(device, enabled="unscaled" not in name)

    def run() -> None:
        adam.zero_grad(set_to_none=True)
        with torch.autocast(device, getattr(torch, half)):
            loss = torch.nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(adam)
        scaler.update()

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    return Run(run, wait, torch_models.num_parameters(model))


def measure(model_name: str, half: str, rounds: int, steps: int, **size: int) -> dict:
    """Milliseconds of a step of each, and the ratio of each to its own unscaled step."""
    build = functools.partial(models.MODELS[model_name], **size)
    keras.config.set_dtype_policy(f"mixed_{half}")
    with device_turns.compiling():
        runs, missing = _build_runs(model_name, build, half)
    sizes = {name: run.parameters for name, run in runs.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"The models differ in their number of parameters: {sizes}")
    results: dict = {"missing": missing, "parameters": sizes["kmp"]}
    with device_turns.timing():
        times = take_turns(runs, rounds, steps, model_name)
    medians = {name: statistics.median(each) for name, each in times.items()}
    results["unscaled_ms"] = {name: ms for name, ms in medians.items() if name not in PEERS}
    for name, (base, _) in PEERS.items():
        if name in times:
            ratios = [a / b for a, b in zip(times[name], times[base], strict=True)]
            quartiles = statistics.quantiles(ratios, n=4)[::2]
            results[name] = {
                "ms": medians[name],
                "ratio": medians[name] / medians[base],
                "quartiles": quartiles,
            }
    return results


def _build_runs(
    model_name: str, build: Callable, half: str
) -> tuple[dict[str, Run], dict[str, list[str]]]:
    """Every peer and what it is compared with, by name; the packages that are missing, by peer."""
    _, *data = build()
    runs: dict[str, Run] = {}
    lowered: dict[str, Lowered] = {}
    missing: dict[str, list[str]] = {}
    for name, (base, needs) in PEERS.items():
        missing[name] = [x for x in needs if importlib.util.find_spec(x) is None]
        if missing[name]:
            continue
        for each in {base, name} - set(runs) - set(lowered):
            if base.startswith("torch"):
                runs[each] = torch_step(each, model_name, data, half)
            else:
                lowered[each] = (jax_step if base.startswith("optax") else keras_step)(build, each)
    return compiled(lowered) | runs, {
        name: packages for name, packages in missing.items() if packages
    }


def take_turns(runs: dict[str, Run], rounds: int, steps: int, title: str) -> dict[str, list[float]]:
    """Milliseconds of a step in each round of each run."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):  # the first warms up
        names = list(runs)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = time.perf_counter()
            for _ in range(steps if i else 2):
                runs[name].step()
            runs[name].wait()
            if i:
                times[name].append(1e3 * (time.perf_counter() - start) / steps)
        print(f"\r{title}: {i} of {rounds} rounds", end="", file=sys.stderr)
    print(file=sys.stderr)
    return times


def environment() -> dict:
    """Versions and device."""
    found = {}
    for name in ("keras", "jax", "jmp", "flax", "optax", "torch"):
        installed = importlib.util.find_spec(name) is not None
        found[name] = version_of(name) if installed else "not installed"
    device = jax.devices()[0]
    processor = f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
    name = processor if device.platform == "cpu" else device.device_kind
    return {"device": name, "kmp": kmp.__version__, **found}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--smoke", action="store_true", help="small and short, also on a CPU")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="steps of one turn")
    parser.add_argument("--only", choices=MODELS, help="measure this alone")
    arguments = parser.parse_args()
    # XLA's CPU compiler has no product of float16 for attention.
    half = "bfloat16" if jax.default_backend() == "cpu" else "float16"
    names = ("transformer",) if arguments.smoke else MODELS
    rounds, steps = (2, 1) if arguments.smoke else (arguments.rounds, arguments.steps)
    size = {"size": 2} if arguments.smoke else {}
    results = {
        name: measure(name, half, rounds, steps, **size)
        for name in names
        if arguments.only in (None, name) or arguments.smoke
    }
    if arguments.json:
        print(json.dumps({"environment": environment() | {"half": half}, "results": results}))
        return
    print(", ".join(f"{name} {value}" for name, value in environment().items()), half)
    for name, row in results.items():
        print(f"\n{name}, {row['parameters'] / 1e6:.1f} million parameters")
        print(f"{'':20} {'unscaled':>11} {'scaled':>11}  {'ratio [quartiles]':>22}")
        for peer, (base, _) in PEERS.items():
            if peer in row["missing"]:
                print(f"{peer:20} {', '.join(row['missing'][peer])}: not installed")
                continue
            found = row[peer]
            ratio = "{:.3f} [{:.3f}, {:.3f}]".format(found["ratio"], *found["quartiles"])
            unscaled = row["unscaled_ms"][base]
            print(f"{peer:20} {unscaled:>8.2f} ms {found['ms']:>8.2f} ms  {ratio:>22}")


if __name__ == "__main__":
    main()
