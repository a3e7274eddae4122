"""Do several PyTorch processes that `fit` one model together agree, whatever goes wrong on one?

    python benchmarks/experiments/processes.py run          2 and 4 processes, half an hour
    python benchmarks/experiments/processes.py page         docs/lab/processes.md, from what has run

Needs Keras 3.16. Each case is a fault, on one rank where it can be, under a list of callbacks. All
ranks have to come to the same weights, optimizer state, loss scale, logs, verdict, warnings and
decisions, bit for bit, and none may wait for ever. `run` goes on where it was stopped.
"""

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import warnings
from typing import Any, NamedTuple

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import torch
from keras import ops

import kmp

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "processes"
PAGE = ROOT / "docs" / "lab" / "processes.md"
TIMEOUT = 20  # seconds that a rank waits for another
LIMIT = 120  # seconds without a result, after which a case counts as a hang
BATCH, STEPS, EPOCHS = 4, 10, 4  # of each process
AT = 21  # the step of a fault, counted from 0
SCALE = 2.0**15  # where the loss scale starts; it does not grow in so few steps
NAN_GRADIENT = 777.0  # as a target: the loss is finite, its gradient is not


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
COMPILED = ("none", "loss NaN, last rank", "overflow, last rank")  # as it takes a minute each


class Case(NamedTuple):
    """A run of some processes."""

    processes: int
    fault: str
    watches: str

    @property
    def name(self) -> str:
        return f"{self.processes} processes, {self.fault}, {self.watches}"


def cases(processes: int) -> list[Case]:
    """The grid of so many processes; at last what ends its processes, or takes long."""
    grid = [Case(processes, fault, watches) for fault in FAULTS for watches in WATCHES + WAYS]
    grid += [Case(processes, fault, "all") for fault in ENDS]
    return grid + [Case(processes, fault, "all, jit_compile") for fault in COMPILED]


# In each process


class Model(NamedTuple):
    """A compiled model with its callbacks by name."""

    model: keras.Model
    callbacks: dict[str, keras.callbacks.Callback]


def make_model(case: Case, logs: pathlib.Path) -> Model:
    """A model with statistics, and the callbacks of a case."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    stack = [layers.Dense(8), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.1)]
    model = keras.Sequential([keras.Input((6,)), *stack, layers.Dense(2)])
    rule = kmp.DynamicLossScale(initial_scale=SCALE, growth_interval=10_000)
    if case.fault == "fixed scale too high":
        rule = kmp.StaticLossScale(2.0**126)
    spikes = kmp.SkipSpikes() if case.fault.startswith(("spike", "statistics")) else None
    optimizer = kmp.scaled(keras.optimizers.Adam(1e-2), rule, spikes=spikes)
    per_execution = 2 if "steps_per_execution" in case.watches else 1
    model.compile(
        optimizer,
        loss,
        metrics=["mae"],
        steps_per_execution=per_execution,
        jit_compile="jit" in case.watches,
    )
    optimizer.build(model.trainable_variables)
    return Model(model, make_callbacks(case.watches.split(",")[0], logs))


def make_callbacks(watches: str, logs: pathlib.Path) -> dict[str, keras.callbacks.Callback]:
    """The callbacks of a case by name."""
    made = {
        "health": lambda: kmp.callbacks.GradientHealth(log_dir=logs, update_freq=2),
        "guard": lambda: kmp.callbacks.DivergenceGuard(
            "rollback",
            update_freq=1,
            snapshot_freq=2,
            detector=kmp.callbacks.SpikeDetector(patience=2),
        ),
        "terminate": lambda: kmp.callbacks.TerminateOnNaN(patience=4, update_freq=2),
        "stopping": lambda: keras.callbacks.EarlyStopping("loss", patience=2),
        "plateau": lambda: keras.callbacks.ReduceLROnPlateau("loss", patience=1),
    }
    watches = "terminate" if watches == "finder" else watches  # in the `fit` after the sweep
    chosen = made if watches == "all" else {watches} & made.keys()
    return {name: make() for name, make in made.items() if name in chosen}


def loss(y_true, y_pred):
    """Squared errors, and a gradient of NaN where the target says so."""
    marked = y_true == NAN_GRADIENT
    nothing = ops.sqrt(ops.where(marked, y_pred * 0.0, 1.0)) - 1.0
    error = ops.where(marked, 0.0, y_true - y_pred) + nothing
    return ops.mean(ops.square(error), axis=-1)


def make_data(case: Case, rank: int) -> list[np.ndarray]:
    """Inputs, targets and sample weights of one rank in all epochs."""
    random = np.random.default_rng(rank)
    rows = BATCH * STEPS * EPOCHS
    x, y = random.normal(size=(rows, 6)), random.normal(size=(rows, 2))
    w = np.ones(rows)
    fault = {**FAULTS, **ENDS}[case.fault]
    if fault.rank is not None and rank == fault.rank % case.processes:
        here, rest = BATCH * AT, slice(BATCH * AT, None)
        first = case.fault.split(",")[0]
        if first == "loss NaN":
            y[here] = np.nan
        elif first == "overflow":
            w[here] = 1e36
        elif first == "gradient NaN":
            y[here] = NAN_GRADIENT
        elif first == "inputs NaN from then on":
            x[rest] = np.nan
        elif first == "spike":
            y[here] = 1e6  # after the first 16 batches, which are never spikes
        elif first == "statistics ruined":
            x[here] = 1e18
        elif first == "samples weigh nothing":
            w[rest] = 0.0
    return [a.astype("float32") for a in (x, y, w)]


class Data(keras.utils.PyDataset):
    """The batches of a rank in their order; `Disturb` says in which epoch."""

    def __init__(self, case: Case, rank: int):
        super().__init__()
        self.arrays, self.epoch = make_data(case, rank), 0
        fault = ENDS.get(case.fault)
        self.raises = "data" in case.fault and rank == fault.rank % case.processes

    def __len__(self):
        return STEPS

    def __getitem__(self, i):
        at = self.epoch % EPOCHS * STEPS + i
        if self.raises and at >= AT:
            raise RuntimeError("the data of this rank cannot be read")
        rows = slice(at * BATCH, (at + 1) * BATCH)
        return tuple(a[rows] for a in self.arrays)


class Disturb(keras.callbacks.Callback):
    """Says which epoch it is, and makes the faults that a callback can make."""

    def __init__(self, data: Data, case: Case, rank: int):
        super().__init__()
        self.data, self.case, self.rank, self.step = data, case, rank, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.data.epoch, self.step = epoch, epoch * STEPS

    def on_train_batch_begin(self, batch, logs=None):
        if self.case.fault.startswith("learning rate") and self.step >= AT:
            self.model.optimizer.learning_rate = 10.0
        if "callback" in self.case.fault and self.rank == 0 and self.step >= AT:
            raise RuntimeError("a callback of this rank raises")
        self.step += 1


def run_case(case: Case, rank: int, home: pathlib.Path) -> dict[str, Any]:
    """Run a case in this process; returns what all ranks must agree on, and what they need not."""
    logs = home / "logs"  # of all ranks
    made = make_model(case, logs)
    model, callbacks = made.model, made.callbacks
    data, found = Data(case, rank), {}
    handle = kmp.protect(model) if case.watches == "protect" else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as caught, handle:
        warnings.simplefilter("always")
        if case.watches == "finder":
            finder = kmp.callbacks.LearningRateFinder(1e-5, 1.0, steps=20, log_dir=logs)
            before = digests(model)
            sweep = [Disturb(data, case._replace(fault="none"), rank)]
            found["suggestion"] = finder.find(model, data, callbacks=sweep, shuffle=False)
            found["points"] = finder.losses
            found["swept"] = digests(model) == before
        fit = {"epochs": EPOCHS, "verbose": 0, "shuffle": False}
        if "resumed" in case.watches:
            history = model.fit(
                data,
                callbacks=[Disturb(data, case, rank), *callbacks.values()],
                **{**fit, "epochs": 2},
            ).history
            found["first"] = {k: list(map(float, v)) for k, v in history.items()}
            model.save(home / f"{rank}.keras")
            before = digests(model)
            model = keras.models.load_model(home / f"{rank}.keras", {"loss": loss})
            found["loaded"] = digests(model) == before
            made = Model(model, make_callbacks("all", logs))
            callbacks, fit["initial_epoch"] = made.callbacks, 2
            keras.utils.set_random_seed(1)
        every = [Disturb(data, case, rank), *callbacks.values()]
        history = model.fit(data, callbacks=every, **fit).history
    return {
        **found,
        **state(model, callbacks),
        "history": {k: list(map(float, v)) for k, v in history.items()},
        "warnings": [str(w.message) for w in caught if "kmp" in w.category.__module__],
        "own": [hashed(v) for v in model.non_trainable_variables],
        "finite": all(np.isfinite(ops.convert_to_numpy(v)).all() for v in model.variables),
    }


def digests(model: keras.Model) -> list[str]:
    """The bits of all weights and of the optimizer's state."""
    return [hashed(v) for v in [*model.trainable_variables, *model.optimizer.variables]]


def state(model: keras.Model, callbacks: dict[str, Any]) -> dict[str, Any]:
    """What training has come to on this rank, and what the callbacks made of it."""
    optimizer = model.optimizer
    health, guard = callbacks.get("health"), callbacks.get("guard")
    return {
        "weights": {v.path: hashed(v) for v in model.trainable_variables},
        "optimizer": {v.path: hashed(v) for v in optimizer.variables},
        "scale": float(ops.convert_to_numpy(optimizer.scale_variable)),
        "skipped": int(ops.convert_to_numpy(optimizer.skipped_steps)),
        "steps": int(ops.convert_to_numpy(optimizer.steps)),
        "verdict": str(health.verdict) if health else None,
        "rollbacks": guard.rollbacks if guard else None,
        "stopped": getattr(callbacks.get("terminate"), "stopped_because", None),
    }


def hashed(variable: Any) -> str:
    """A digest of the bits of a variable."""
    array = np.ascontiguousarray(ops.convert_to_numpy(variable))
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def worker(rank: int, processes: int, port: str, home: pathlib.Path, names: list[str]) -> None:
    """Run cases one after another as one of the processes, and write down what each has found."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, LOCAL_RANK=str(rank))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(processes))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
    devices = [f"cpu:{i}" for i in range(processes)]
    distribution = keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False)
    keras.distribution.set_distribution(distribution)
    chosen = [x for x in cases(processes) if x.name in names]
    for case in chosen:
        directory = home / hashlib.sha256(case.name.encode()).hexdigest()[:12]
        directory.mkdir(exist_ok=True)
        found = run_case(case, rank, directory)
        with open(home / f"rank_{rank}.jsonl", "a") as file:
            print(json.dumps({"case": case.name, **found}), file=file)
        keras.utils.clear_session()
    torch.distributed.destroy_process_group()
    os._exit(0)  # CPython may never end its last garbage collection after DistributedDataParallel


# In the process that starts them


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """The results in a file."""
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def run_together(chosen: list[Case], home: pathlib.Path) -> dict[str, Any]:
    """Run cases in one set of processes until one fails; returns what was found of each.

    The first that was not finished is told how the processes ended.
    """
    processes = chosen[0].processes
    home.mkdir(parents=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    started, logs = [], [home / f"rank_{rank}.log" for rank in range(processes)]
    names = json.dumps([case.name for case in chosen])
    for rank, log in enumerate(logs):
        command = [sys.executable, __file__, "worker", str(rank), str(processes), port, str(home)]
        with open(log, "w") as file:
            started.append(subprocess.Popen([*command, names], stdout=file, stderr=file))
    ended, hangs = wait(started, [home / f"rank_{rank}.jsonl" for rank in range(processes)])
    results = [{x["case"]: x for x in lines(home / f"rank_{r}.jsonl")} for r in range(processes)]
    found: dict[str, Any] = {}
    for case in chosen:
        ranks = [x.get(case.name) for x in results]
        if None in ranks:
            said = [last_words(log) for log in logs]
            found[case.name] = {"hangs": hangs, "ended": ended, "said": said}
            break
        files = sum(1 for _ in home.rglob("*tfevents*"))
        found[case.name] = {"ranks": ranks, "event_files": files}
    return found


def wait(started: list[subprocess.Popen], results: list[pathlib.Path]) -> tuple[list, bool]:
    """Wait until all processes have ended, or nothing has come from them for too long.

    Returns the seconds after the first failure at which each ended, and whether some hung.
    """
    ended: list[float | None] = [None] * len(started)
    failed, last, known = None, time.monotonic(), 0
    while None in ended and time.monotonic() - last < LIMIT:
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


def run(numbers: list[int], at_once: int) -> None:
    """Run what has not run yet."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    ledger = RESULTS / "results.jsonl"
    for processes in numbers:
        while True:
            done = {x["case"] for x in lines(ledger)}
            left = [x for x in cases(processes) if x.name not in done]
            if not left:
                break
            group = left[:at_once]
            home = RESULTS / f"{processes}_{time.time_ns()}"
            for name, found in run_together(group, home).items():
                with open(ledger, "a") as file:
                    print(json.dumps({"case": name, **found}), file=file)
                print(name, "|", ", ".join(wrong_with(name, found)) or "agree", flush=True)


# What was wrong

AGREED = (
    *("weights", "optimizer", "scale", "skipped", "steps", "verdict", "rollbacks", "stopped"),
    *("history", "warnings", "suggestion", "points", "swept", "loaded", "first"),
)


def case_of(name: str) -> Case:
    """The case of this name."""
    return next(x for n in (2, 3, 4, 8) for x in cases(n) if x.name == name)


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


INTRODUCTION = """# Several PyTorch processes in `fit`

Each fault below, on one rank where it says so, under nothing but `kmp.scaled`, `kmp.protect`, each
callback, all of them, `steps_per_execution=2`, and a run that is saved and resumed: Keras 3.16
nightly, gloo on the loopback address of a CPU. All ranks must agree bit for bit on weights, the
optimizer's state and scale, and on history, verdict, warnings, rollbacks and stops; a loss of NaN
must lower no scale, an overflow must halve it once.

```bash
python benchmarks/experiments/processes.py run
python benchmarks/experiments/processes.py page     # writes this page
```

Where nothing protects the model, a NaN loss halves the scale on all, and each rank notes for itself
whose loss it was: that note alone is what differs below. "raises": gloo ended the other ranks.

| processes | fault | runs | hang or fail | differ or are wrong |
|--:|---|--:|--:|---|
"""


def page() -> str:
    """The page, from what has run; compiled runs are not on it."""
    found = [x for x in lines(RESULTS / "results.jsonl") if "jit" not in x["case"]]
    table = []
    for processes in (2, 4):
        for fault in (*FAULTS, *ENDS):
            those = [x for x in found if case_of(x["case"])[:2] == (processes, fault)]
            wrong = [(case_of(x["case"]).watches, wrong_with(x["case"], x)) for x in those]
            lost = sum(w[0].startswith(("hangs", "fails")) for _, w in wrong if w)
            told = "; ".join(f"{watches}: {', '.join(w)}" for watches, w in wrong if w)
            table.append(f"| {processes} | {fault} | {len(those)} | {lost} | {told or 'none'} |")
    return INTRODUCTION + "\n".join(table) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    runs.add_argument("--at-once", type=int, default=40, help="cases of one set of processes")
    commands.add_parser("page")
    worker_parser = commands.add_parser("worker")
    for name in ("rank", "processes", "port", "home", "names"):
        worker_parser.add_argument(name)
    chosen = parser.parse_args()
    if chosen.command == "worker":
        names = json.loads(chosen.names)
        home = pathlib.Path(chosen.home)
        worker(int(chosen.rank), int(chosen.processes), chosen.port, home, names)
    elif chosen.command == "run":
        run(chosen.processes, chosen.at_once)
    else:
        PAGE.write_text(page())


if __name__ == "__main__":
    main()
