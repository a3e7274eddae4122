"""Does `memory_plan` keep its budget on other people's programs, by what XLA says of the step?

    python benchmarks/experiments/budgets.py run          every program, one or two hours
    python benchmarks/experiments/budgets.py run --only gpt2 resnet
    python benchmarks/experiments/budgets.py page         docs/lab/budgets.md, from what has run

Needs the extras `jax`, `programs` and `h100`, and no GPU. Each program of compat/ is planned for a
share of what its step takes without recomputation. Then the advice is followed on a model made
anew, and that step compiled by `jax` alone. `run` goes on where it was stopped.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "compat"))

import jax
import keras
import program
from catalogue import CATALOGUE
from catalogue import program as program_of

import kmp
from kmp._backend import backend
from kmp._backend.jax.cards import compiled_for, device_of
from kmp._keras.blocks import recomputed_in
from kmp._keras.training import build_for_training
from kmp.debug import budget as planning

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "budgets"
PAGE = ROOT / "docs" / "lab" / "budgets.md"
DEVICE, BATCH = "h100", 1024
SHARES = (0.85, 0.7)  # of what the step takes without recomputation
POLICY = "mixed_bfloat16"
OTHER_CUTS = (3, 6)  # segments that "cannot" is tried against
SMALLEST = 'slot_dtype="int8"'  # of the optimizer, where the weights are float32


def made(name: str, **memory: Any) -> tuple[keras.Model, Any, Any]:
    """A program's model, compiled and built for training, and its batch; the same at each call."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    found = program_of(name)
    model = found.compiled(found.make(), lambda optimizer: kmp.scaled(optimizer, **memory))
    x, y = found.batch()
    build_for_training(model, x, y)
    return model, x, y


def bytes_by_xla(model: keras.Model, x: Any, y: Any) -> int:
    """What XLA plans for a step: arguments, results that are not in their place, and the rest."""
    mesh = jax.sharding.Mesh([device_of(DEVICE)], ["device"])
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def spec(value: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        return jax.ShapeDtypeStruct(tuple(value.shape), dtype, sharding=here)

    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    data = keras.utils.pack_x_y_sample_weight(x, y)
    state, batch = jax.tree.map(spec, (tuple(map(list, variables)), data))
    step = jax.jit(model.train_step, donate_argnums=0).lower(state, batch)
    found = compiled_for(step, device_of(DEVICE)).memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + found.temp_size_in_bytes + results


def remembered(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Let plans of one program share what has been compiled: the second costs a step or two."""
    known: dict[tuple, Any] = {}

    def planned_step(model: Any, x: Any, y: Any, device: Any = None) -> Any:
        pieces = tuple(getattr(each, "last", None) or each.path for each in recomputed_in(model))
        shape, options = jax.tree.leaves(x)[0].shape, str(model.optimizer.get_config())
        key = (pieces, shape, options)
        if key not in known:
            known[key] = compiled(model, x, y, device)
        return known[key]

    return planned_step


def planned(name: str, budget: float) -> tuple[kmp.debug.MemoryPlan, int | None]:
    """The plan, and what the line through the first steps says of the last of them."""
    planners = []

    class Planner(planning._Planner):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            planners.append(self)

    before, planning._Planner = planning._Planner, Planner
    try:
        plan = kmp.debug.memory_plan(*made(name), budget, device=DEVICE)
    finally:
        planning._Planner = before
    savings, last = planners[0]._savings, plan.step
    kinds = [planning._kind_of(group) for group in planners[0]._groups]
    if savings is None or last.memory or last.blocks < 2:
        return plan, None
    if last.blocks == 2 and kinds[0] == kinds[1]:  # the line goes through that step
        return plan, None
    whole = next(each for each in plan.steps if not (each.blocks or each.memory))
    return plan, round(whole.bytes - sum(savings[: last.blocks]))


def bytes_with(name: str, plan: kmp.debug.MemoryPlan, number: int, words: str) -> int:
    """XLA's bytes of a model made anew, after the lines that a plan of these steps prints."""
    model, x, y = made(name, **eval(f"dict({words})"))
    if number:
        step = plan.step._replace(blocks=number)
        exec(plan.call, {"kmp": kmp, "model": model, "plan": replace(plan, steps=(step,))})
    return bytes_by_xla(model, x, y)


def other_ways(name: str, plan: kmp.debug.MemoryPlan) -> dict[str, int]:
    """XLA's bytes of the tightest that there is: all blocks or other cuts, the slots in int8."""
    number = len(plan.blocks)
    ways = {f"{number} of {number}": bytes_with(name, plan, number, SMALLEST)}
    seen = {plan.blocks}
    for number in OTHER_CUTS:
        model, x, y = made(name, **eval(f"dict({SMALLEST})"))
        try:
            report = kmp.recompute(model, segments=number)
        except ValueError:  # its layers are called in code of its own
            break
        if report.paths not in seen:
            ways[f"segments={number}"] = bytes_by_xla(model, x, y)
        seen.add(report.paths)
    return ways


def checked(name: str) -> list[dict[str, Any]]:
    """What is written of a program: a row for each budget."""
    whole = planned(name, 1e18)[0].step.bytes
    rows = []
    ways: dict[str, int] = {}
    applied: dict[tuple, int] = {}
    for share in SHARES:
        budget = int(share * whole)
        plan, predicted = planned(name, budget)
        step = plan.step
        key = (plan.call, step.blocks, step.memory)
        if key not in applied:
            applied[key] = bytes_with(name, plan, step.blocks, step.memory)
        holds = plan.steps and applied[key] == step.bytes and (step.bytes <= budget) == plan.fits
        if not plan.fits:
            ways = ways or other_ways(name, plan)
            holds = holds and min(ways.values()) > budget
        states = ("met", "BROKEN") if plan.fits else ("cannot", "UNTRUE")
        rows.append(
            {
                "state": states[0 if holds else 1],
                "share": share,
                "whole": whole,
                "budget": budget,
                "blocks": len(plan.blocks),
                "in_segments": "segments=" in plan.call,
                "steps": [each._asdict() for each in plan.steps],
                "predicted": predicted,
                "applied": applied[key],
                "advice": plan.advice,
                "ways": {} if plan.fits else ways,
            }
        )
    return rows


def worker(names: list[str]) -> None:
    """Write the result of each program."""
    program.BATCH = BATCH
    keras.config.set_dtype_policy(POLICY)
    compiled = backend.planned_step
    for name in names:
        start = time.time()
        backend.planned_step = remembered(compiled)
        try:
            rows = checked(name)
        except Exception as error:
            traceback.print_exc()
            rows = [{"state": "ERROR", "why": f"{type(error).__name__}: {error}"[:300]}]
        write(name, rows, time.time() - start)
        jax.clear_caches()


def write(name: str, rows: list[dict[str, Any]], seconds: float) -> None:
    """Append the result of a program."""
    row = {"program": name, "rows": rows, "seconds": round(seconds)}
    with open(RESULTS / f"{DEVICE}.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    print(name, *(each["state"] for each in rows), row["seconds"], flush=True)


def results() -> dict[str, dict[str, Any]]:
    """The last result of each program."""
    path = RESULTS / f"{DEVICE}.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {row["program"]: row for row in rows}


def broken(row: dict[str, Any]) -> bool:
    """Whether the experiment itself failed."""
    return any(each["state"] == "ERROR" for each in row["rows"])


def run(names: list[str]) -> None:
    """All that have no result, in a process that is begun anew behind one that crashes it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    while names:
        command = [sys.executable, __file__, "worker", "--only", *names]
        with open(RESULTS / "log.txt", "a") as log:
            code = subprocess.run(command, stderr=log, check=False).returncode
        left = [name for name in names if name not in results() or broken(results()[name])]
        if code and left:
            write(left[0], [{"state": "ERROR", "why": f"the process ended with {code}"}], 0)
        names = left[1:] if code else []


PAGE_TEXT = """# Budgets, planned and followed

`kmp.debug.memory_plan` for {programs} of the 45 [programs](programs.md), in {policy}, batches of
{batch}, compiled for an {device} that is not there: a budget of 0.85 and one of 0.7 of what the
step takes by XLA without recomputation. The programs are small, most of two blocks of width 16; at
this batch what they keep for the gradient is most of what a step takes.

```bash
python benchmarks/experiments/budgets.py run     # goes on where it was stopped
python benchmarks/experiments/budgets.py page    # writes this page
```

Of each plan the lines that it prints are run on a model made anew, and that step is compiled by
`jax` alone. *met*: XLA's bytes of that step are those that the plan says, and within the budget.
*cannot*: they are those that the plan says, and over it, and so are the step with all blocks or
segments and slots in int8, and those with at most 3 and 6 segments. Anything else is *BROKEN* or
*UNTRUE*. The number after it is that step over the one without recomputation.

{counts}

| program | MB without | pieces | budget 0.85 | budget 0.7 | the line is off by |
|---|--:|--:|---|---|--:|
{rows}

The last column is where the plan went further than it had compiled: what the line through the first
steps says against XLA's number. A `-` is where it needed no line.

Plain Keras does not train these on JAX either: the GAN's `train_step` is written for TensorFlow,
and Keras cannot trace Stable Diffusion 3.

{why}

Versions: keras {keras}, jax {jax}.
"""


def page() -> None:
    """Write docs/lab/budgets.md from the results that are there."""
    found = results()
    names = [name for name in CATALOGUE if name in found]
    states = [[each["state"] for each in found[name]["rows"]] for name in names]
    right = [each for each in states if set(each) <= {"met", "cannot"}]
    counts = (
        f"Of these {len(states)} programs {len(right)} are told the truth under both budgets:\n"
        f"{sum(each.count('met') for each in right)} budgets are met, "
        f"{sum(each.count('cannot') for each in right)} cannot be."
    )
    why = [
        f"- {CATALOGUE[name].what}: {row['state']}, {' '.join(row['why'].split())[:120]}"
        for name in names
        for row in found[name]["rows"]
        if "why" in row
    ]
    text = PAGE_TEXT.format(
        programs=len(names),
        policy=POLICY,
        batch=f"{BATCH:,}",
        device=DEVICE.upper(),
        counts=counts,
        rows="\n".join(_line(name, found[name]["rows"]) for name in names),
        why="\n".join(why),
        keras=keras.__version__,
        jax=jax.__version__,
    )
    PAGE.write_text(text.replace("\n\n\n", "\n\n"), encoding="utf-8")


def _line(name: str, rows: list[dict[str, Any]]) -> str:
    """A program's row of the table."""
    what, (first, *_) = CATALOGUE[name].what, rows
    if "whole" not in first:
        return f"| {what} | | | {first['state']} | {first['state']} | |"
    cells = [
        f"{row['state']}, with {row['steps'][-1]['blocks']}: {row['applied'] / row['whole']:.2f}"
        for row in rows
    ]
    off = [abs(row["predicted"] / row["applied"] - 1) for row in rows if row["predicted"]]
    pieces = f"{first['blocks']} {'segment' if first['in_segments'] else 'block'}"
    pieces += "" if first["blocks"] == 1 else "s"
    worst = f"{max(off):.1%}" if off else "-"
    return f"| {what} | {first['whole'] / 1e6:.1f} | {pieces} | {' | '.join(cells)} | {worst} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "page", "worker"])
    parser.add_argument("--only", nargs="+", choices=list(CATALOGUE), default=[])
    arguments = parser.parse_args()
    names = arguments.only or [
        name for name in CATALOGUE if name not in results() or broken(results()[name])
    ]
    if arguments.what == "run":
        run(names)
    elif arguments.what == "worker":
        worker(names)
    else:
        page()


if __name__ == "__main__":
    main()
