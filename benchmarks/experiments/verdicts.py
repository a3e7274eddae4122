"""Does a verdict agree with the weights? Small random programs, judged by float32 runs.

    KERAS_BACKEND=jax python benchmarks/experiments/verdicts.py run --programs 2000
    python benchmarks/experiments/verdicts.py page        docs/lab/verdicts.md, from what has run

A program is a model, an optimizer, a policy, data, and at most one fault. It is trained three
times: as it is, under kmp and `GradientHealth`; in float32 under Keras's own optimizer; and so
without the fault. Programs that differ only in data, learning rate and fault share what is
compiled. `run` goes on where it was stopped.
"""

import argparse
import json
import os
import pathlib
import warnings
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers, ops

import kmp

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "verdicts"
PAGE = ROOT / "docs" / "lab" / "verdicts.md"
A_GROUP = 24  # programs that share what is compiled
EVALUATED = 256  # rows of fresh data
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Group(NamedTuple):
    """What programs have in common that is compiled once."""

    kind: str
    width: int
    depth: int
    activation: str
    norm: str
    optimizer: str
    policy: str
    scale: Any
    batch: int
    steps: int
    update_freq: int


class Program(NamedTuple):
    """A run: its data, its learning rate, its fault."""

    seed: int
    epochs: int
    rate: float  # times the optimizer's usual one
    fault: str
    size: float
    at: float  # where in the run, as a share


# Usual learning rates.
OPTIMIZERS = {
    "sgd": (0.05, {}),
    "momentum": (0.02, {"momentum": 0.9}),
    "adam": (3e-3, {}),
    "adamw": (3e-3, {}),
    "nadam": (3e-3, {}),
    "rmsprop": (1e-3, {}),
    "adagrad": (0.05, {}),
    "lion": (3e-4, {}),
    "clipped": (3e-3, {"global_clipnorm": 1.0}),
    "accumulating": (3e-3, {"gradient_accumulation_steps": 2}),
}
CLASSES = {"momentum": "sgd", "clipped": "adam", "accumulating": "adam"}

# Faults that float32 shares: the oracle is a run without them.
SHARED = {
    "zero rate": (0.0,),
    "tiny rate": (1e-9, 1e-7),
    "high rate": (30.0, 300.0, 3000.0),
    "dead relu": (-1e3,),
    "zero weights": (0.0,),
    "huge inputs once": (1e2, 1e4, 1e6, 1e10),
    "huge targets once": (1e2, 1e4, 1e8),
    "huge weight once": (1e2, 1e4, 1e8),
    "NaN targets once": (np.nan,),
    "NaN targets often": (np.nan,),
    "samples weigh nothing": (0.0,),
}
# Faults of precision, or none at all: float32 sees the same data.
OF_PRECISION = {
    "none": (1.0,),
    "small weights": (1e-2, 1e-4, 1e-6),
    "large weights": (1e2, 1e4, 1e6),
    "class weight": (10.0, 1e3, 1e6),
    "empty batches": (0.0,),
    "rows of zeros": (0.0,),
    "large inputs": (10.0, 100.0),
    "small inputs": (1e-2, 1e-4),
}
FAULTS = (*("none",) * 8, *OF_PRECISION, *SHARED)

POLICIES = (
    *(("mixed_float16", "dynamic"),) * 6,
    ("mixed_float16", 1.0),
    ("mixed_float16", 2.0**10),
    ("mixed_float16", 2.0**20),
    ("mixed_bfloat16", "none"),
    ("mixed_bfloat16", "none"),
    ("bfloat16", "none"),
    ("bfloat16", "nearest"),
    ("float32", "none"),
    ("float32", "dynamic"),
)


def draw_group(choose) -> Group:
    """A group, by a function that chooses of a sequence."""
    policy, scale = choose(POLICIES)
    return Group(
        kind=choose(tuple(KINDS)),
        width=choose((4, 8, 16, 32)),
        depth=choose((1, 2, 3)),
        activation=choose(("relu", "tanh", "gelu")),
        norm=choose(("", "", "batch", "layer")),
        optimizer=choose(tuple(OPTIMIZERS)),
        policy=policy,
        scale=scale,
        batch=choose((4, 16)),
        steps=choose((20, 40, 60)),
        update_freq=choose((10, 25, 100)),
    )


def draw_program(choose) -> Program:
    """A program of a group."""
    fault = choose(FAULTS)
    return Program(
        seed=choose(tuple(range(1000))),
        epochs=choose((2, 3, 4)),
        rate=choose((0.3, 1.0, 1.0, 3.0)),
        fault=fault,
        size=choose({**SHARED, **OF_PRECISION}[fault]),
        at=choose((0.1, 0.5, 0.8)),
    )


# Data, models


def teacher(random, rows):
    """Classes of a random network."""
    x = random.normal(size=(rows, 8)).astype("float32")
    hidden = np.tanh(x @ np.random.default_rng(1).normal(size=(8, 12)))
    return x, (hidden @ np.random.default_rng(2).normal(size=(12, 4))).argmax(axis=1)


def curve(random, rows):
    """A smooth function with noise."""
    x = random.normal(size=(rows, 8)).astype("float32")
    y = np.tanh(x[:, :4].sum(axis=1, keepdims=True)) + 0.1 * random.normal(size=(rows, 1))
    return x, y.astype("float32")


def bars(random, rows):
    """Pictures of bars in noise."""
    x, y = random.normal(size=(rows, 8, 8, 1)).astype("float32"), random.integers(0, 4, rows)
    for picture, label in zip(x, y, strict=True):
        where = random.integers(0, 8)
        bar = picture[where] if label % 2 else picture[:, where]
        bar += 3.0 if label < 2 else -3.0
    return x, y


def words(random, rows):
    """Ids, padded with zeros; the class is that of most words."""
    x = random.integers(1, 60, (rows, 6))
    y = np.stack([(x % 4 == c).sum(axis=1) for c in range(4)], 1).argmax(axis=1)
    x[np.arange(6) >= random.integers(3, 7, (rows, 1))] = 0
    return x.astype("int32"), y


def sets(random, rows):
    """Sets of vectors, padded with zeros, of which attention finds the largest."""
    x = random.normal(size=(rows, 5, 8)).astype("float32")
    y = x[..., 0].max(axis=1, keepdims=True)
    x[:, 4][random.random(rows) < 0.3] = 0
    return x, y


def sparse(random, rows):
    """Sparse rows, to be reconstructed."""
    x = (random.normal(size=(rows, 16)) * (random.random((rows, 16)) < 0.2)).astype("float32")
    return x, x


class Attention(layers.Layer):
    """One head, whose mask leaves out vectors of zeros."""

    def __init__(self, width, **arguments):
        super().__init__(**arguments)
        self.width = width
        self.projections = [layers.Dense(width) for _ in range(3)]

    def build(self, shape):
        for each in self.projections:
            each.build(shape)

    def call(self, x):
        query, key, value = (each(x) for each in self.projections)
        scores = ops.matmul(query, ops.swapaxes(key, 1, 2)) / self.width**0.5
        known = ops.any(x != 0, axis=-1)[:, None]
        scores = ops.where(known, scores, ops.full_like(scores, -3e4))
        return ops.mean(ops.matmul(ops.softmax(scores), value), axis=1)


KINDS = {
    "teacher": (teacher, CROSS_ENTROPY, 4, lambda width: []),
    "curve": (curve, "mse", 1, lambda width: []),
    "bars": (bars, CROSS_ENTROPY, 4, lambda width: [layers.Conv2D(4, 3), layers.Flatten()]),
    "words": (
        words,
        CROSS_ENTROPY,
        4,
        lambda width: [
            layers.Embedding(60, width, mask_zero=True),
            layers.GlobalAveragePooling1D(),
        ],
    ),
    "sets": (sets, "mse", 1, lambda width: [Attention(width)]),
    "sparse": (sparse, "mse", 16, lambda width: []),
}


def model_of(group: Group, policy: str) -> keras.Model:
    """The group's model under a policy."""
    keras.config.set_dtype_policy(policy)
    data, _, outputs, first = KINDS[group.kind]
    x, _ = data(np.random.default_rng(0), 2)
    stack = first(group.width)
    for _ in range(group.depth):
        stack.append(layers.Dense(group.width))
        if group.norm:
            norms = {"batch": layers.BatchNormalization, "layer": layers.LayerNormalization}
            stack.append(norms[group.norm]())
        stack.append(layers.Activation(group.activation))
    head = kmp.layers.Float32OutputDense(outputs)
    return keras.Sequential([keras.Input(x.shape[1:], dtype=x.dtype), *stack, head])


class Seen(keras.callbacks.Callback):
    """What is to be known of each epoch."""

    def __init__(self, watches: bool, weights: list[np.ndarray], update_freq: int):
        super().__init__()
        self.watch = kmp.callbacks.GradientHealth(update_freq=update_freq) if watches else None
        self.weights, self.said, self.skips = [weights], [], []

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append([np.array(x, "float32") for x in self.model.get_weights()])
        if self.watch:
            report = self.watch.report
            self.said.append(str(self.watch.verdict))
            self.skips.append(report.skipped_steps if report else 0)


class Runs:
    """The programs of a group: two models, compiled once."""

    def __init__(self, group: Group):
        self.group = group
        name = CLASSES.get(group.optimizer, group.optimizer)
        self.rate, arguments = OPTIMIZERS[group.optimizer]
        ours, plain = (
            keras.optimizers.get(
                {"class_name": name, "config": {"learning_rate": 1.0, **arguments}}
            )
            for _ in range(2)
        )
        nearest = {"rounding": "nearest"} if group.scale == "nearest" else {}
        scale = "none" if nearest else group.scale
        self.loss = KINDS[group.kind][1]
        self.model, self.plain = model_of(group, group.policy), model_of(group, "float32")
        self.model.compile(kmp.scaled(ours, scale, **nearest), self.loss)
        self.plain.compile(plain, self.loss)
        for model in (self.model, self.plain):
            model.optimizer.build(model.trainable_variables)
        self.fresh = [[ops.copy(v.value) for v in x.optimizer.variables] for x in self.models]

    @property
    def models(self):
        return self.model, self.plain

    def restart(self, program: Program, faulty: bool) -> list[np.ndarray]:
        """New weights in both models, and optimizers as they were; returns the weights."""
        random = np.random.default_rng(program.seed)
        weights = []
        for v in self.plain.weights:
            if v.path.endswith(("kernel", "embeddings")):
                spread = 0.3 if "embeddings" in v.path else (2 / sum(v.shape[-2:])) ** 0.5
                weights.append(random.normal(0, spread, v.shape).astype("float32"))
            else:
                is_one = v.path.endswith(("gamma", "moving_variance"))
                weights.append(np.full(v.shape, float(is_one), "float32"))
        if faulty and program.fault in ("dead relu", "zero weights"):
            self.damage(weights, program)
        for model, fresh in zip(self.models, self.fresh, strict=True):
            model.set_weights(weights)
            for variable, value in zip(model.optimizer.variables, fresh, strict=True):
                variable.assign(ops.copy(value))  # a step gives its buffers away
        return weights

    def damage(self, weights, program):
        """Let the first layer of the trunk be dead, or all kernels zero."""
        paths = [v.path for v in self.plain.weights]
        if program.fault == "zero weights":
            for path, x in zip(paths, weights, strict=True):
                x[...] = 0 if path.endswith("kernel") else x
            return
        first = next(x for x in self.plain.layers if type(x) is layers.Dense)
        after = self.plain.layers[self.plain.layers.index(first) + 1]
        victim = after.beta if self.group.norm else first.bias
        weights[paths.index(victim.path)][...] = program.size

    def data(self, program: Program, faulty: bool):
        """Inputs, targets and sample weights of an epoch, for each epoch."""
        data, steps, batch = KINDS[self.group.kind][0], self.group.steps, self.group.batch
        rows, found = steps * batch, []
        total, random = program.epochs * steps, np.random.default_rng(program.seed)
        for epoch in range(program.epochs):
            x, y = data(random, rows)
            w = np.ones(rows, "float32")
            at = int(program.at * total) - epoch * steps
            here = slice(at * batch, (at + 1) * batch) if 0 <= at < steps else slice(0)
            found.append(spoil(x, y, w, program, here, batch) if faulty else (x, y, w))
        return found

    def batches(self, program: Program, faulty: bool):
        """All batches of a run, in their order."""
        for parts in self.data(program, faulty):
            for i in range(self.group.steps):
                rows = slice(i * self.group.batch, (i + 1) * self.group.batch)
                yield tuple(part[rows] for part in parts)

    def train(self, model, program: Program, faulty: bool):
        """Losses on fresh data and weights, before and after each epoch; and what was said."""
        weights = self.restart(program, faulty)
        seen = Seen(model is self.model, weights, self.group.update_freq)
        factor = program.size if faulty and "rate" in program.fault else 1.0
        model.optimizer.learning_rate = self.rate * program.rate * factor
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                model.fit(
                    self.batches(program, faulty),
                    steps_per_epoch=self.group.steps,
                    epochs=program.epochs,
                    callbacks=[*filter(None, [seen.watch]), seen],
                    verbose=0,
                )
            except Exception as error:
                # On TensorFlow Keras's own optimizers divide the gradient of an embedding by slots,
                # and raise once those hold NaN.
                if model is self.model or "is not in [0," not in str(error):
                    raise
                while len(seen.weights) <= program.epochs:
                    seen.weights.append([np.full_like(x, np.nan) for x in weights])
        losses = [self.evaluate(x) for x in seen.weights]
        return losses, seen.weights, seen.said, seen.skips

    def evaluate(self, weights) -> float:
        """The loss of weights on fresh, sound data, in float32."""
        kept = self.plain.get_weights()
        self.plain.set_weights(weights)
        x, y = KINDS[self.group.kind][0](np.random.default_rng(7), EVALUATED)
        with np.errstate(all="ignore"):
            outputs = self.plain.predict_on_batch(x)
            loss = keras.losses.get(self.loss)(y, outputs)
            loss = float(ops.convert_to_numpy(ops.mean(loss)))
        self.plain.set_weights(kept)
        return loss

    def __call__(self, program: Program) -> dict[str, Any]:
        """Run a program and its oracles; returns what is to be judged."""
        losses, weights, said, skips = self.train(self.model, program, True)
        same, their_weights, _, _ = self.train(self.plain, program, True)
        clean, clean_weights = same, their_weights
        if program.fault in SHARED:
            clean, clean_weights, _, _ = self.train(self.plain, program, False)
        trained = [i for i, v in enumerate(self.plain.weights) if v.trainable]

        def moved(run):
            return [distance(run[0], x, trained) for x in run[1:]]

        return {
            "group": self.group._asdict(),
            "program": program._asdict(),
            "losses": losses,
            "same": same,
            "clean": clean,
            "moved": moved(weights),
            "moved_same": moved(their_weights),
            "moved_clean": moved(clean_weights),
            "apart": [
                distance(a, b, trained) for a, b in zip(weights[1:], their_weights[1:], strict=True)
            ],
            "skipped": skips,
            "said": said,
        }


def distance(before, after, trained) -> float:
    """The l2 norm of a difference of weights, over those that are trained."""
    with np.errstate(all="ignore"):
        return float(np.sqrt(sum(np.sum((after[i] - before[i]) ** 2.0) for i in trained)))


def spoil(x, y, w, program: Program, here: slice, batch: int):
    """Put the fault into the data of an epoch; `here` is its batch, if the fault is one batch's."""
    fault, size = program.fault, program.size
    is_float = x.dtype.kind == "f"
    x, y = x.copy(), y.astype("float32") if "NaN" in fault else y.copy()
    if fault == "huge inputs once" and is_float:
        x[here] *= np.float32(size)
    elif fault == "huge targets once" and y.dtype.kind == "f":
        y[here] *= np.float32(size)
    elif fault == "huge weight once":
        w[here] = size
    elif fault == "NaN targets once" and y.dtype.kind == "f":
        w[here] = np.nan
    elif fault == "NaN targets often":
        w.reshape(-1, batch)[::4, 0] = np.nan
    elif fault in ("samples weigh nothing", "small weights", "large weights"):
        w[:] = size
    elif fault == "class weight":
        rare = y == 3 if y.ndim == 1 else y[:, 0] > np.quantile(y[:, 0], 0.95)
        w[rare] = size
    elif fault == "empty batches":
        w.reshape(-1, batch)[::3] = 0
    elif fault == "rows of zeros":
        x.reshape(-1, batch, *x.shape[1:])[:, ::2] = 0
    elif fault in ("large inputs", "small inputs") and is_float:
        x *= np.float32(size)
    return x, y, w


# Judging


def learned(losses) -> float:
    """How far the loss has fallen, of its size in the beginning; at most 1."""
    return (losses[0] - losses[-1]) / max(abs(losses[0]), 1e-12)


def alarms(result) -> list[str]:
    """What was said of epochs that were not well."""
    return [x for x in result["said"] if not x.startswith(("HEALTHY", "CALIBRATING"))]


def harm(result) -> str:
    """What is wrong beyond doubt with a run, by its oracles; "" if nothing is.

    The oracle has learned something, and the run ended at less than two thirds of its way, or its
    weights moved less than a quarter as far. By as much as the oracle's own loss rises from an
    epoch to a later one, losses differ by chance.
    """
    mine, clean = result["losses"], result["clean"]
    way = clean[0] - clean[-1]
    if not (np.isfinite(clean[-1]) and way > 0.1 * clean[0]):
        return ""
    chance = max(late - min(clean[1 : i + 1]) for i, late in enumerate(clean) if i)
    if not mine[-1] <= clean[-1] + way / 3 + 0.05 * clean[0] + chance:
        return f"loss {mine[-1]:.3g}, the oracle's {clean[-1]:.3g}, {clean[0]:.3g} in the beginning"
    if not result["moved"][-1] >= result["moved_clean"][-1] / 4:
        return f"moved {result['moved'][-1]:.3g}, the oracle's {result['moved_clean'][-1]:.3g}"
    return ""


def doubts(result) -> list[str]:
    """What may be wrong with a run, by its oracles: an alarm is right if there is anything."""
    mine, clean, same = result["losses"], result["clean"], result["same"]
    found = []
    for epoch in range(1, len(mine)):
        way = clean[0] - min(clean[1 : epoch + 1])
        least = clean[epoch] + max(way, 0) / 20 + 0.01 * abs(clean[0])
        if not mine[epoch] <= least:
            found.append("loss")
        fault = abs(same[epoch] - clean[epoch])  # which may lower a loss too
        if not (same[epoch] <= least and fault <= least - clean[epoch]):
            found.append("loss in float32")
        if not clean[epoch] < 0.99 * clean[0]:
            found.append("the oracle learns nothing")
        moved, theirs = result["moved"][epoch - 1], result["moved_clean"][epoch - 1]
        if not 0.8 * theirs <= moved <= 1.25 * theirs:
            found.append("way")
        if not result["apart"][epoch - 1] <= 0.05 * result["moved_same"][epoch - 1]:
            found.append("weights")
        before = result["skipped"][epoch - 2] if epoch > 1 else 0
        share = (result["skipped"][epoch - 1] - before) / result["group"]["steps"]
        if share > 0.01 and epoch > 1:
            found.append("skipped steps")
    return sorted(set(found))


def judged(result) -> str:
    """ "false HEALTHY", "false alarm", or "" where the verdict agrees with the weights."""
    if alarms(result):
        return "" if doubts(result) else "false alarm"
    return "false HEALTHY" if harm(result) else ""


# The page

INTRODUCTION = f"""# Does a verdict agree with the weights?

Small random programs: six kinds of data and models, ten optimizers, the policies with fixed
and dynamic scales, {len(OF_PRECISION) - 1} faults of precision, {len(SHARED)} that float32 shares,
or none. Each is trained as it is, under kmp and `GradientHealth`, and in float32 under Keras's own
optimizer; where float32 shares the fault, once more without it. That run is the oracle.

- *False HEALTHY*: all epochs were called HEALTHY or CALIBRATING, but the loss on fresh data
  ended at less than two thirds of the oracle's way, or the weights moved less than a quarter as
  far. By as much as the oracle's own loss rises from an epoch to a later one, losses differ by
  chance: a loss has to be above that too.
- *False alarm*: an epoch was called something else, and by the oracles nothing at all was wrong at
  the end of any epoch. A loss by a twentieth of the way above the oracle's, or in float32 with the
  fault so far from it, weights 5% apart, a way that differs by a fifth, 1% of skipped steps after
  the first epoch, and an oracle that learns nothing, each count as wrong.

```bash
KERAS_BACKEND=jax python benchmarks/experiments/verdicts.py run --programs 2000
python benchmarks/experiments/verdicts.py page     # writes this page
```

The programs of a group differ in data, rate and fault, and share what is compiled. On JAX and
TensorFlow they ran before the last cures, and the last code has judged the looks that were kept.
Where it reads what no look has, the slots after a huge batch, the programs ran again, and so did
those on which verdict and weights disagreed. On PyTorch all ran before the
last two cures, of bfloat16's smallest rates and of huge batches that come again.
"""


def page(folder: pathlib.Path) -> str:
    """The page, from the results of all backends."""
    results = {x.stem: read(x) for x in sorted(folder.glob("*.jsonl"))}
    lines = [
        INTRODUCTION,
        "| backend | programs | false HEALTHY | false alarms |",
        "|---|--:|--:|--:|",
    ]
    everything = [each for found in results.values() for each in found]
    for name, found in {**results, "all": everything}.items():
        wrong = [judged(each) for each in found]
        cells = [
            f"{wrong.count(kind)} ({wrong.count(kind) / len(found):.2%})" for kind in KINDS_OF_WRONG
        ]
        lines.append(f"| {name} | {len(found)} | {' | '.join(cells)} |")
    lines += ["", "By the fault, on all backends:", ""]
    lines += ["| fault | programs | with an alarm | harmed | false HEALTHY | false alarms |"]
    lines += ["|---|--:|--:|--:|--:|--:|"]
    for fault in (*OF_PRECISION, *SHARED):
        found = [each for each in everything if each["program"]["fault"] == fault]
        wrong = [judged(each) for each in found]
        counts = [
            len(found),
            sum(bool(alarms(x)) for x in found),
            sum(bool(harm(x)) for x in found),
        ]
        counts += [wrong.count(kind) for kind in KINDS_OF_WRONG]
        lines.append(f"| {fault} | {' | '.join(map(str, counts))} |")
    lines += ["", "Where they disagree:", ""]
    lines += [told(name, each) for name, found in results.items() for each in found if judged(each)]
    return "\n".join(lines) + "\n"


KINDS_OF_WRONG = ("false HEALTHY", "false alarm")


def told(name: str, result: dict[str, Any]) -> str:
    """A line of the page on a program where they disagree."""
    group, program = Group(**result["group"]), Program(**result["program"])
    said = (alarms(result) or [harm(result)])[0]
    size = f" {program.size:g}" if program.fault != "none" else ""
    return (
        f"- {judged(result)}, {name} {result['index']}: {group.kind}, {group.optimizer}, "
        f"{group.policy} {group.scale}, {program.fault}{size}: {said}"
    )


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The results of a backend."""
    return [json.loads(line) for line in path.read_text().splitlines()]


# The command


def chooser(*seed):
    """A function that chooses of a sequence, by a seed."""
    random = np.random.default_rng(seed)
    return lambda sequence: sequence[int(random.integers(len(sequence)))]


def run(programs: int, folder: pathlib.Path, first: int = 0) -> None:
    """Run programs that have not run yet, group by group."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{keras.backend.backend()}.jsonl"
    done = (
        {json.loads(line)["index"] for line in path.read_text().splitlines()}
        if path.exists()
        else set()
    )
    for number in range(first, first + -(-programs // A_GROUP)):
        indices = [number * A_GROUP + i for i in range(A_GROUP)]
        if set(indices) <= done:
            continue
        runs = Runs(draw_group(chooser(1, number)))
        for index in indices:
            if index in done:
                continue
            result = {"index": index, **runs(draw_program(chooser(2, index)))}
            with path.open("a") as file:
                file.write(json.dumps(result) + "\n")
            if wrong := judged(result):
                print(index, wrong, harm(result), alarms(result)[:1], runs.group, flush=True)
                print("      ", result["program"], flush=True)
        keras.utils.clear_session(free_memory=True)


def main() -> None:
    """Run the programs, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["run", "page"])
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments.programs, arguments.results, arguments.first)
    else:
        PAGE.write_text(page(arguments.results))


if __name__ == "__main__":
    main()
