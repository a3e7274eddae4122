"""Do several processes that train one model together agree, whatever goes wrong on one?

    python benchmarks/experiments/processes.py run          all that has not run yet
    python benchmarks/experiments/processes.py page         docs/lab/processes.md, from what has run

On PyTorch, which needs Keras 3.16, and JAX in `fit`; on TensorFlow, where Keras's `fit` takes no
several processes, in a custom loop. Each case is a fault, on one rank where it can be, under a list
of callbacks. All ranks have to come to the same weights, optimizer state, loss scale, logs,
verdict, warnings and decisions, bit for bit, and none may wait for ever. `run` goes on where it was
stopped; with `--backends`, `--processes` and `--watches` it runs a part.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import os
import pathlib
import socket
import subprocess
import sys
import time
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "processes"
PAGE = ROOT / "docs" / "lab" / "processes.md"
WORKER = pathlib.Path(__file__).with_name("processes_worker.py")
LIMIT = 900  # seconds without a result, after which a case counts as a hang
AFTER = 240  # seconds in which all have to end once one has failed
SCALE = 2.0**15  # where the loss scale starts; it does not grow in so few steps
BACKENDS = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow"}


class Fault(NamedTuple):
    """What goes wrong.

    Attributes:
        rank: the rank that has it: 0, -1 for the last, or None for all.
        scale: the loss scale that a protected run must end with; None if it may vary.
        skips: how many steps it must have skipped; None if it may vary.
    """

    rank: int | None = None
    scale: float | None = None
    skips: int | None = None


FAULTS = {
    "none": Fault(scale=SCALE, skips=0),
    "loss NaN, rank 0": Fault(0, SCALE, 1),
    "loss NaN, last rank": Fault(-1, SCALE, 1),
    "overflow, rank 0": Fault(0, SCALE / 2, 1),
    "overflow, last rank": Fault(-1, SCALE / 2, 1),
    "gradient NaN, last rank": Fault(-1, SCALE / 2, 1),
    "inputs NaN from then on, last rank": Fault(-1, SCALE),
    "spike, last rank": Fault(-1, SCALE),
    "statistics ruined, last rank": Fault(-1),
    "samples weigh nothing, last rank": Fault(-1, SCALE, 0),
    "learning rate 1000 times as high": Fault(),
    "fixed scale too high": Fault(scale=2.0**126),
}
# These end the run: whether the others end too is what is asked.
ENDS = {"raises in the data, last rank": Fault(-1), "raises in a callback, rank 0": Fault(0)}
WATCHES = ("nothing", "protect", "health", "guard", "terminate", "finder", "all")
WAYS = ("all, steps_per_execution=2", "all, saved and resumed")
LOOPS = ("loop", "loop, saved and resumed")  # on TensorFlow
COMPILED = ("none", "loss NaN, last rank", "overflow, last rank")  # as it takes minutes each


class Case(NamedTuple):
    """A run of some processes."""

    backend: str
    processes: int
    fault: str
    watches: str

    @property
    def name(self) -> str:
        return f"{self.backend}, {self.processes} processes, {self.fault}, {self.watches}"

    @property
    def directory(self) -> str:
        """A short name for a directory."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:12]


def cases(backend: str, processes: int) -> list[Case]:
    """The grid of so many processes; at last what ends its processes, or takes long."""
    watches = LOOPS if backend == "tensorflow" else WATCHES + WAYS
    grid = [Case(backend, processes, fault, each) for fault in FAULTS for each in watches]
    if backend == "tensorflow":
        return [*grid, Case(backend, processes, next(iter(ENDS)), "loop")]
    grid += [Case(backend, processes, fault, "all") for fault in ENDS]
    compiled = COMPILED if backend == "torch" else ()  # JAX compiles all
    return grid + [Case(backend, processes, fault, "all, jit_compile") for fault in compiled]


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The results in a file."""
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def run_together(chosen: list[Case], home: pathlib.Path) -> dict[str, Any]:
    """Run cases in one set of processes until one fails; returns what was found of each.

    The first that was not finished is told how the processes ended.
    """
    processes = chosen[0].processes
    home.mkdir(parents=True)
    names = home / "cases.json"
    names.write_text(json.dumps([case.name for case in chosen]))
    ports = free_ports(processes)
    started, logs = [], [home / f"rank_{rank}.log" for rank in range(processes)]
    for rank, log in enumerate(logs):
        variables = {**os.environ, **environment(chosen[0].backend, rank, ports)}
        with open(log, "w") as file:
            command = [sys.executable, str(WORKER), str(rank), str(home)]
            started.append(subprocess.Popen(command, env=variables, stdout=file, stderr=file))
    ended, hangs = wait(started, [home / f"rank_{rank}.jsonl" for rank in range(processes)])
    results = [{x["case"]: x for x in lines(home / f"rank_{r}.jsonl")} for r in range(processes)]
    found: dict[str, Any] = {}
    for case in chosen:
        ranks = [x.get(case.name) for x in results]
        if None in ranks:
            said = [last_words(log) for log in logs]
            found[case.name] = {"hangs": hangs, "ended": ended, "said": said}
            break
        files = sum(1 for _ in (home / case.directory).rglob("*tfevents*"))
        found[case.name] = {"ranks": ranks, "event_files": files}
    return found


def free_ports(number: int) -> list[int]:
    """Ports of the loopback address on which nobody listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def environment(backend: str, rank: int, ports: list[int]) -> dict[str, str]:
    """What tells a process which it is, and where the others are."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    common = {"KERAS_BACKEND": backend, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
    if backend == "tensorflow":
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
        task = {"type": "worker", "index": rank}
        return {**common, "TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}
    return {
        **common,
        "JAX_PLATFORMS": "cpu",
        # Which compiles in half the time, and what another case has compiled, not again.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(RESULTS / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "GLOO_SOCKET_IFNAME": "lo",
        "LOCAL_RANK": str(rank),
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"127.0.0.1:{ports[0]}",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": str(len(ports)),
        "KERAS_DISTRIBUTION_PROCESS_ID": str(rank),
    }


def wait(started: list[subprocess.Popen], results: list[pathlib.Path]) -> tuple[list, bool]:
    """Wait until all processes have ended, or nothing has come from them for too long.

    Returns the seconds after the first failure at which each ended, and whether some hung.
    """
    ended: list[float | None] = [None] * len(started)
    failed, last, known = None, time.monotonic(), 0
    while None in ended and time.monotonic() < min(last + LIMIT, (failed or math.inf) + AFTER):
        for i, process in enumerate(started):
            if ended[i] is None and process.poll() is not None:
                now = time.monotonic()
                failed = failed or (now if process.returncode else None)
                ended[i] = round(now - (failed or now), 1)
        done = sum(x.stat().st_size for x in results if x.exists())
        if done != known:
            known, last = done, time.monotonic()
        time.sleep(0.1)
    hangs = None in ended
    for process in started:
        process.kill()
        process.wait()
    return ended, hangs


def last_words(log: pathlib.Path) -> str:
    """The last error that a process has printed."""
    words = [x for x in log.read_text(errors="replace").splitlines() if "Error" in x]
    return words[-1][:300] if words else ""


def run(backends: list[str], numbers: list[int], watches: list[str], at_once: int) -> None:
    """Run what has not run yet; under all that watches if `watches` is empty."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    ledger = RESULTS / "results.jsonl"
    for backend, processes in itertools.product(backends, numbers):
        while True:
            done = {x["case"] for x in lines(ledger)}
            left = [x for x in cases(backend, processes) if x.name not in done]
            left = [x for x in left if x.watches in watches or not watches]
            if not left:
                break
            group = left[:at_once]
            home = RESULTS / f"{backend}_{processes}_{time.time_ns()}"
            for name, found in run_together(group, home).items():
                with open(ledger, "a") as file:
                    print(json.dumps({"case": name, **found}), file=file)
                print(name, "|", ", ".join(wrong_with(name, found)) or "agree", flush=True)


# What was wrong

AGREED = (
    *("weights", "optimizer", "scale", "skipped", "steps", "verdict", "rollbacks", "stopped"),
    *("history", "warnings", "suggestion", "points", "swept", "loaded", "first", "report"),
)


def case_of(name: str) -> Case:
    """The case of this name."""
    grids = itertools.product(BACKENDS, (2, 3, 4, 8))
    return next(x for grid in grids for x in cases(*grid) if x.name == name)


def wrong_with(name: str, found: dict[str, Any]) -> list[str]:
    """What is wrong with the results of a case, in words."""
    case = case_of(name)
    if case.fault in ENDS:
        return ["hangs"] if found.get("hangs", True) else []
    if "ranks" not in found:
        return ["hangs" if found["hangs"] else "fails: " + "; ".join(found["said"])]
    first, *others = found["ranks"]
    wrong = [
        f"{key} differ"
        for key in AGREED
        if any(json.dumps(x.get(key)) != json.dumps(first.get(key)) for x in others)
    ]
    fault = FAULTS[case.fault]
    if case.watches == "nothing":
        return wrong
    for key, wanted in (("scale", fault.scale), ("skipped", fault.skips)):
        if wanted is not None and first[key] != wanted and not first["rollbacks"]:
            wrong.append(f"{key} is {first[key]:g}, not {wanted:g}")
    wrong += [f"not {x}" for x in ("swept", "loaded") if first.get(x) is False]
    return wrong


INTRODUCTION = """# Several processes that train one model

Each fault below, on one rank where it says so, with 2 and 4 processes that talk over the loopback
address of a CPU: in `fit` on PyTorch (DistributedDataParallel, Keras 3.16's nightly) and on JAX
(`keras.distribution.DataParallel`), in a custom loop on TensorFlow (MultiWorkerMirroredStrategy),
where Keras's `fit` takes none. All ranks must agree bit for bit on weights, the optimizer's state
and scale, and on history, verdict, warnings, rollbacks and stops; a loss of NaN must lower no
scale, an overflow must halve it once.

```bash
python benchmarks/experiments/processes.py run
python benchmarks/experiments/processes.py page     # writes this page
```

A fault has 9 runs in `fit`: under nothing but `kmp.scaled`, `kmp.protect`, `GradientHealth`,
`DivergenceGuard` with rollback, `TerminateOnNaN`; after a sweep of `LearningRateFinder`; under
these three callbacks with `EarlyStopping` and `ReduceLROnPlateau`, once more with
`steps_per_execution=2`, and once more in a run that is saved and resumed. A loop has two runs, one
of them saved and resumed. Where fewer are counted, the others were not run. "raises" is a process
that ends with an error: none of the others may wait for it.

| backend | processes | fault | runs | hang or fail | differ or are wrong |
|---|--:|---|--:|--:|---|
"""


def page() -> str:
    """The page, from what has run; compiled runs are not on it."""
    found = [(case_of(x["case"]), x) for x in lines(RESULTS / "results.jsonl")]
    table = []
    for backend, processes, fault in itertools.product(BACKENDS, (2, 4), (*FAULTS, *ENDS)):
        those = [
            (case.watches, wrong_with(case.name, x))
            for case, x in found
            if case[:3] == (backend, processes, fault) and "jit" not in case.watches
        ]
        if those:
            lost = sum(w[0].startswith(("hangs", "fails")) for _, w in those if w)
            told = "; ".join(f"{watches}: {', '.join(w)}" for watches, w in those if w)
            row = (BACKENDS[backend], processes, fault, len(those), lost, told or "none")
            table.append("| " + " | ".join(map(str, row)) + " |")
    return INTRODUCTION + "\n".join(table) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    runs.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    runs.add_argument("--watches", nargs="+", default=[], metavar="WATCHES")
    runs.add_argument("--at-once", type=int, default=40, help="cases of one set of processes")
    commands.add_parser("page")
    chosen = parser.parse_args()
    if chosen.command == "run":
        run(chosen.backends, chosen.processes, chosen.watches, chosen.at_once)
    else:
        PAGE.write_text(page())


if __name__ == "__main__":
    main()
