"""One of the processes of processes.py.

    python processes_worker.py RANK HOME

Which others there are stands in the environment. It runs the cases that HOME/cases.json names, and
appends what it finds to HOME/rank_RANK.jsonl.
"""

import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import sys
import warnings
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from processes import ENDS, FAULTS, SCALE, Case, case_of

import kmp

BACKEND = keras.backend.backend()
TIMEOUT = 20  # seconds that a rank waits for another, on PyTorch
BATCH, STEPS, EPOCHS = 4, 10, 4  # of each process
AT = 21  # the step of a fault, counted from 0
NAN_GRADIENT = 777.0  # as a target: the loss is finite, its gradient is not


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
        jit_compile="jit" in case.watches if BACKEND == "torch" else "auto",
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


# On TensorFlow, where `fit` takes no several processes


def run_loop(case: Case, rank: int, home: pathlib.Path, strategy: Any) -> dict[str, Any]:
    """Run a case in a custom loop; returns what all ranks must agree on."""
    with strategy.scope():
        model = make_model(case, home / "logs").model
    data, found = Data(case, rank), {}
    step, losses = make_step(model, strategy), []
    for epoch in range(EPOCHS):
        if "resumed" in case.watches and epoch == 2:
            model.save(home / f"{rank}.keras")
            before = digests(model)
            with strategy.scope():
                model = keras.models.load_model(home / f"{rank}.keras", {"loss": loss})
            found["loaded"] = digests(model) == before
            step = make_step(model, strategy)
        data.epoch = epoch
        for i in range(STEPS):
            if case.fault.startswith("learning rate") and epoch * STEPS + i >= AT:
                model.optimizer.learning_rate.assign(10.0)
            losses.append(float(step(*data[i])))
    return {
        **found,
        **state(model, {}),
        "history": losses,
        "report": str(model.optimizer.gradient_report()),
        "own": [hashed(v) for v in model.non_trainable_variables],
    }


def make_step(model: keras.Model, strategy: Any) -> Any:
    """A compiled step of all processes, which returns the mean of their losses."""
    import tensorflow as tf

    weights = model.trainable_variables
    number = BATCH * strategy.num_replicas_in_sync

    def replica_step(x: Any, y: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            found = tf.reduce_sum(loss(y, model(x, training=True)) * w) / number
            scaled = model.optimizer.scale_loss(found)
        model.optimizer.apply(tape.gradient(scaled, weights), weights)
        return found

    @tf.function
    def step(x: Any, y: Any, w: Any) -> Any:
        found = strategy.run(replica_step, args=(x, y, w))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, found, axis=None)

    return lambda *arrays: step(*map(tf.constant, arrays))


# All


def join() -> Any:
    """Wait for the other processes; what `run_loop` takes on TensorFlow."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.distribute.MultiWorkerMirroredStrategy()
    if BACKEND == "torch":
        import torch

        torch.set_num_threads(1)
        given = {x: os.environ[f"KERAS_DISTRIBUTION_{x}"] for x in ("NUM_PROCESSES", "PROCESS_ID")}
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{os.environ['KERAS_DISTRIBUTION_JOB_ADDRESSES']}",
            world_size=int(given["NUM_PROCESSES"]),
            rank=int(given["PROCESS_ID"]),
            timeout=datetime.timedelta(seconds=TIMEOUT),
        )
    else:
        keras.distribution.initialize()
    return None


def main(rank: int, home: pathlib.Path) -> None:
    """Run cases one after another, and write down what each has found."""
    strategy = join()
    for name in json.loads((home / "cases.json").read_text()):
        case = case_of(name)
        directory = home / case.directory
        directory.mkdir(exist_ok=True)
        if strategy is None:
            distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
            keras.distribution.set_distribution(distribution)  # which `clear_session` takes away
            found = run_case(case, rank, directory)
        else:
            found = run_loop(case, rank, directory, strategy)
        with open(home / f"rank_{rank}.jsonl", "a") as file:
            print(json.dumps({"case": case.name, **found}), file=file)
        keras.utils.clear_session()
    # CPython may never end its last garbage collection after PyTorch's DistributedDataParallel, and
    # JAX would wait for those that have been killed.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), pathlib.Path(sys.argv[2]))
