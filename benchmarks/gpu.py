"""What kmp does on an NVIDIA GPU: its numerics, its step, its memory, its peers; into docs/gpu.md.

    make gpu                                    every part, one after the other
    python benchmarks/gpu.py step peers         these parts, each at most 8 minutes
    python benchmarks/gpu.py --smoke            every part in little, on any machine

Needs the extras `bench`, `examples` and `test`, and JAX for CUDA (the extra `gpu`). The commands of
a part start together: they compile side by side, and are timed one after another
(device_turns.py). Each part keeps what its commands printed in build/gpu, and the page is rewritten
from all that is there.
"""

import argparse
import concurrent.futures
import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
HALVES = ("mixed_float16", "mixed_bfloat16", "bfloat16")
MODELS = ("large_transformer", "resnet50")
FITS = ("mlp", "cnn", "transformer")
ABOUT = {
    "numerics": "The contract, the layers and stochastic rounding, by their tests.",
    "step": "A step over plain Adam, and what XLA plans to hold. The goal is 1.005 with health.",
    "memory": "The device's own peak, each in a process of its own.",
    "modes": "A step in each mode of half memory, over Keras's Adam in that precision.",
    "layers": "kmp's layers over Keras's.",
    "peers": "Each framework over its own unscaled step.",
    "fit": "Whole `fit`s over plain Adam's, with the callback and what the host does.",
    "certify": "Whether training in half precision ends where float32 does.",
}


def commands(part: str, smoke: bool) -> list[str]:
    """The command lines of a part. A smoke test runs the first of them."""
    python = "python"
    few, models = (" --rounds 3 --steps 2", ["mlp"]) if smoke else (" --rounds 12", MODELS)
    halves = HALVES[1:2] if smoke else HALVES
    jax = f"KERAS_BACKEND=jax {python}"
    if part == "numerics":
        where = "tests/half_memory/test_rounding.py" if smoke else ""
        share = max((os.cpu_count() or 1) // len(installed()), 1)
        tests = f'-m pytest -n {share} -m "gpu and not wide" {where}'.strip()
        return [f"KERAS_BACKEND={name} {python} {tests}" for name in installed()]
    if part == "step":
        each = [f"--model {model} --policy {half}" for model in models for half in halves]
        plain = [f'--model {model} --policy float32 --only "Adam"' for model in models]
        return [f"{python} benchmarks/gpu_step.py {x}{few}" for x in each + plain]
    if part == "modes":
        each = [f"--model {models[0]} --policy {half} --half-memory" for half in halves[-2:]]
        each = ['--model mlp --policy bfloat16 --only "kmp, exact masters"'] if smoke else each
        return [f"{python} benchmarks/gpu_step.py {x}{few}" for x in each]
    if part == "memory":
        few = " --rounds 3 --steps 5"
        cases = [("float32", "Adam")]
        for half in halves:
            cases += [(half, "Keras's LossScaleOptimizer"), (half, "kmp, health")]
        each = [f'--policy {policy} --only "{name}"' for policy, name in cases]
        return [f"{python} benchmarks/gpu_step.py --model {models[0]} {x}{few}" for x in each]
    if part == "layers":
        return [f"{jax} benchmarks/layers.py" + smoke * " --smoke --rounds 3"]
    if part == "peers":
        few = " --smoke" if smoke else " --rounds 12"
        return [f"{python} benchmarks/against_peers.py --only {model}{few}" for model in MODELS]
    if part == "fit":
        few = few if smoke else " --rounds 7"
        each = [f"--model {' '.join(FITS[: 1 if smoke else None])} --policy {HALVES[1]}{few}"]
        each += [f"--model mlp --policy {HALVES[2]}{few}"]
        return [
            f"KERAS_BACKEND={name} {python} benchmarks/step_overhead.py {x}"
            for x in each
            for name in installed()
        ]
    less = " --epochs 1 --seeds 2" if smoke else ""
    tasks = "diabetes" if smoke else "digits text"
    return [f"{jax} -m kmp certify --task {tasks} --policies {' '.join(halves)}{less}"]


def installed() -> list[str]:
    """The backends that are there."""
    return [name for name in ("jax", "torch", "tensorflow") if importlib.util.find_spec(name)]


def run(part: str, smoke: bool, folder: pathlib.Path, limit: float) -> bool:
    """Run a part, and keep what it prints; whether all of its commands ended well."""
    environment = os.environ | {
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu" if smoke else "cuda,cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if part == "numerics":  # float32 is meant where float32 stands
        environment |= {"JAX_DEFAULT_MATMUL_PRECISION": "highest", "NVIDIA_TF32_OVERRIDE": "0"}
    lines = commands(part, smoke)[: 1 if smoke else None]
    for line in lines:
        print(f"{part}: {line}", flush=True)
    blocks, good = {}, True
    with concurrent.futures.ThreadPoolExecutor(len(lines)) as pool:
        started = {pool.submit(run_command, line, part, environment, limit): line for line in lines}
        for future in concurrent.futures.as_completed(started):
            text, ended_well = future.result()
            good = good and ended_well
            blocks[started[future]] = f"$ {started[future]}\n{text.strip()}\n"
            printed = [blocks[line] for line in lines if line in blocks]
            (folder / f"{part}.txt").write_text("\n".join(printed))
    return good


def run_command(
    line: str, part: str, environment: dict[str, str], limit: float
) -> tuple[str, bool]:
    """What a command line printed, and whether it ended well."""
    process = subprocess.Popen(
        line,
        shell=True,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        text, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the shell, and what it started
        text, _ = process.communicate()
        return f"{text}not over after {limit:g} s\n", False
    # 1 of certify is a result: not equivalent.
    if process.returncode and not (part == "certify" and process.returncode == 1):
        return f"{text}{errors[-2000:]}\nexit status {process.returncode}\n", False
    return text, True


def page(folder: pathlib.Path) -> str:
    """docs/gpu.md, from what the parts have printed so far."""
    lines = [
        "# On a GPU",
        "",
        "Written by `make gpu`. All figures are of the machine named here.",
        "",
    ]
    device = folder / "device.txt"
    lines += ["```", device.read_text().strip(), "```", ""]
    for part, about in ABOUT.items():
        printed = folder / f"{part}.txt"
        if printed.exists():
            lines += [f"## {part.capitalize()}", "", about, ""]
            lines += ["```", printed.read_text().strip(), "```", ""]
    return "\n".join(lines)


def device(smoke: bool) -> str:
    """The device and its driver, and the versions of what runs."""
    query = "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader"
    found = "no GPU: a smoke test" if smoke else subprocess.getoutput(query)
    packages = ("keras", "jax", "tensorflow", "torch", "jmp", "flax", "optax", "kmp")
    list_them = f"{sys.executable} -m pip list --format freeze"
    installed = [x for x in subprocess.getoutput(list_them).split() if x.split("==")[0] in packages]
    return f"{found}\n{', '.join(installed)}\n"


def main() -> int:
    """Run the parts, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", choices=[[], *ABOUT], metavar="PART", help=str([*ABOUT])
    )
    parser.add_argument("--smoke", action="store_true", help="in little, on any machine")
    parser.add_argument("--limit", type=float, default=480, help="seconds of a part")
    arguments = parser.parse_args()
    if not arguments.smoke and not shutil.which("nvidia-smi"):
        parser.error("there is no NVIDIA GPU here (no nvidia-smi). Write --smoke to try the parts.")
    folder = ROOT / "build" / ("gpu_smoke" if arguments.smoke else "gpu")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "device.txt").write_text(device(arguments.smoke))
    target = folder / "gpu.md" if arguments.smoke else ROOT / "docs" / "gpu.md"
    failed = []
    for part in arguments.parts or ABOUT:
        if not run(part, arguments.smoke, folder, arguments.limit):
            failed.append(part)
        target.write_text(page(folder))
    print(f"{target.relative_to(ROOT)}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
