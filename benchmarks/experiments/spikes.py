"""Does `spikes="skip"` leave sound runs alone, and does it save those with one bad batch?

    KERAS_BACKEND=jax python benchmarks/experiments/spikes.py sound     false skips, 120 runs
    KERAS_BACKEND=jax python benchmarks/experiments/spikes.py planted   one bad batch, 240 runs

Each prints tables in Markdown. A run is a loop of `stateless_apply`, 3,000 (or 1,200) steps long,
in one compiled program. None of these tasks was used to choose the rule's settings.
"""

import argparse
import os
import pathlib
import sysconfig

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import keras
import numpy as np
from keras import layers, ops

import kmp

SEEDS = 3
SOUND_STEPS, PLANTED_STEPS = 3_000, 1_200
OPTIMIZERS = {
    "SGD, momentum": lambda rate: keras.optimizers.SGD(10 * rate, momentum=0.9),
    "Adam": keras.optimizers.Adam,
    "AdamW": lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.01),
    "Lion": lambda rate: keras.optimizers.Lion(rate / 5),
    "Muon": lambda rate: keras.optimizers.Muon(rate),
}
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def teacher(random, rows):
    """Classes of a random network, with a tenth of the labels wrong."""
    x = random.normal(size=(rows, 20)).astype("float32")
    hidden = np.tanh(x @ np.random.default_rng(1).normal(size=(20, 30)))
    y = (hidden @ np.random.default_rng(2).normal(size=(30, 5))).argmax(axis=1)
    wrong = random.random(rows) < 0.1
    return x, np.where(wrong, random.integers(0, 5, rows), y)


def bars(random, rows):
    """Pictures of horizontal and vertical bars in noise."""
    x = random.normal(size=(rows, 12, 12, 1)).astype("float32")
    y = random.integers(0, 4, rows)
    for i, label in enumerate(y):
        place = random.integers(0, 12)
        where = (place, slice(None)) if label % 2 else (slice(None), place)
        x[i][where] += 3.0 if label < 2 else -3.0
    return x, y


def text(random, rows):
    """Letters of modules of Python's own library, to predict the next one."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    code = "".join((folder / f"{name}.py").read_text() for name in ("argparse", "typing", "ast"))
    letters = np.frombuffer(code.encode("ascii", "replace"), "uint8") % 128
    starts = random.integers(0, len(letters) - 33, rows)
    windows = letters[starts[:, None] + np.arange(33)]
    return windows[:, :32].astype("int32"), windows[:, 1:].astype("int32")


def rare_words(random, rows):
    """Ids after Zipf's law: most rows of an embedding are met a few times only."""
    ids = np.minimum(random.zipf(1.2, size=(rows, 6)), 2_000) - 1
    return ids.astype("int32"), ((ids % 7).sum(axis=1) // 6).clip(0, 2)


def heavy_tails(random, rows):
    """Targets with noise of Student's t with 3 degrees of freedom."""
    x = random.normal(size=(rows, 10)).astype("float32")
    return x, (np.sin(x[:, :1]) + x[:, 1:2] + random.standard_t(3, size=(rows, 1))).astype(
        "float32"
    )


def rare_labels(random, rows):
    """One row in 800 is positive."""
    y = (random.random(rows) < 1 / 800).astype("int32")
    x = random.normal(size=(rows, 10)).astype("float32")
    x[:, :3] += 1.5 * y[:, None]
    return x, y


def walks(random, rows):
    """Random walks whose steps grow in bursts, to predict the next step."""
    scale = np.exp(np.cumsum(random.normal(0, 0.3, size=(rows, 17)), axis=1))
    steps = (scale * random.normal(size=(rows, 17))).astype("float32")
    return np.cumsum(steps[:, :16], axis=1)[..., None] / 10, steps[:, 16:] / 10


def constant_rows(random, rows):
    """To reconstruct sparse rows, one in five of which is empty."""
    x = random.normal(size=(rows, 30)) * (random.random((rows, 30)) < 0.1)
    x[random.random(rows) < 0.2] = 0
    return x.astype("float32"), x.astype("float32")


def dense(units, outputs):
    """Two hidden layers and an output."""
    return [layers.Dense(units, "relu"), layers.Dense(units, "relu"), layers.Dense(outputs)]


# Data, layers, loss, learning rate of Adam, batch.
TASKS = {
    "teacher and student": (teacher, lambda: dense(64, 5), CROSS_ENTROPY, 1e-3, 32),
    "pictures, BatchNormalization": (
        bars,
        lambda: [
            layers.Conv2D(8, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(4),
        ],
        CROSS_ENTROPY,
        1e-3,
        32,
    ),
    "text, GRU": (
        text,
        lambda: [
            layers.Embedding(128, 32),
            layers.GRU(48, return_sequences=True),
            layers.Dense(128),
        ],
        CROSS_ENTROPY,
        2e-3,
        16,
    ),
    "rare words": (
        rare_words,
        lambda: [layers.Embedding(2_000, 16), layers.Flatten(), *dense(32, 3)],
        CROSS_ENTROPY,
        2e-3,
        32,
    ),
    "heavy tails": (heavy_tails, lambda: dense(32, 1), keras.losses.MeanSquaredError(), 1e-3, 32),
    "rare labels": (rare_labels, lambda: dense(32, 2), CROSS_ENTROPY, 1e-3, 64),
    "walks, LSTM": (
        walks,
        lambda: [layers.LSTM(24), layers.Dense(1)],
        keras.losses.MeanSquaredError(),
        1e-3,
        32,
    ),
    "sparse rows": (constant_rows, lambda: dense(32, 30), keras.losses.MeanSquaredError(), 1e-3, 8),
}


class Runs:
    """Runs of one task with one optimizer, compiled once."""

    def __init__(self, task, optimizer, steps, **settings):
        data, make_layers, self.loss, rate, self.batch = TASKS[task]
        self.steps, self.data = steps, data
        sample, _ = data(np.random.default_rng(0), 2)
        self.model = keras.Sequential([keras.Input(sample.shape[1:], dtype=sample.dtype)])
        for layer in make_layers():
            self.model.add(layer)
        inner = OPTIMIZERS[optimizer](rate)
        for name in ("global_clipnorm",):
            if name in settings:
                setattr(inner, name, settings.pop(name))
        self.optimizer = kmp.scaled(inner, "none", **settings)
        self.optimizer.build(self.model.trainable_variables)
        self.state = [v.value for v in self.optimizer.variables]
        self.run = jax.jit(self._run)

    def _run(self, weights, others, state, x, y):
        def step(carry, batch):
            weights, others, state = carry

            def loss_of(weights):
                outputs, changed = self.model.stateless_call(
                    weights, others, batch[0], training=True
                )
                return self.loss(batch[1], outputs), changed

            (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
            weights, state = self.optimizer.stateless_apply(state, gradients, weights)
            return (weights, others, state), loss

        return jax.lax.scan(step, (weights, others, state), (x, y))

    def batches(self, seed):
        x, y = self.data(np.random.default_rng(100 + seed), self.steps * self.batch)
        split = (self.steps, self.batch)
        return x.reshape(split + x.shape[1:]), y.reshape(split + y.shape[1:])

    def __call__(self, seed, x, y):
        """Train from a seed; returns the loss on fresh data, and the optimizer's report."""
        keras.utils.set_random_seed(seed)
        fresh = self.model.__class__.from_config(self.model.get_config())
        weights = [v.value for v in fresh.trainable_variables]
        others = [v.value for v in fresh.non_trainable_variables]
        (weights, others, state), _ = self.run(weights, others, self.state, x, y)
        for variable, value in zip(self.optimizer.variables, state, strict=True):
            variable.assign(value)
        report = self.optimizer.gradient_report()
        for variable, value in zip(self.optimizer.variables, self.state, strict=True):
            variable.assign(value)
        test_x, test_y = self.data(np.random.default_rng(7), 2_000)
        outputs, _ = self.model.stateless_call(weights, others, test_x)
        return float(self.loss(test_y, outputs)), report, np.asarray(ops.convert_to_numpy(outputs))


def sound():
    """Runs without a bad batch: whatever is left out is left out wrongly."""
    print("| task | optimizer | steps | left out | in the first 1,000 | loss | without the rule |")
    print("|---|---|--:|--:|--:|--:|--:|")
    total = early = steps = 0
    for task in TASKS:
        for optimizer in OPTIMIZERS:
            with_rule = Runs(task, optimizer, SOUND_STEPS, spikes="skip")
            without = Runs(task, optimizer, SOUND_STEPS)
            count = first = 0
            losses = []
            for seed in range(SEEDS):
                x, y = with_rule.batches(seed)
                mine, report, _ = with_rule(seed, x, y)
                theirs, _, _ = without(seed, x, y)
                count += report.skipped_spikes
                first += sum(event.step <= 1_000 for event in report.spikes)
                losses.append((mine, theirs))
            total, early, steps = total + count, early + first, steps + SEEDS * SOUND_STEPS
            mine, theirs = np.mean(losses, axis=0)
            row = f"{SEEDS * SOUND_STEPS} | {count} | {first} | {mine:.4g} | {theirs:.4g}"
            print(f"| {task} | {optimizer} | {row} |", flush=True)
    print(
        f"\nIn all {total} of {steps} steps, {early} of them in the first 1,000 of a run: ", end=""
    )
    print(f"{total / steps * 1e4:.2f} in 10,000.")


# Of a batch: inputs in another unit with wrong labels, and targets in another unit.
FAULTS = (1e2, 1e4, 1e8)
PLANTED = ("teacher and student", "heavy tails", "sparse rows", "walks, LSTM")
PLANTED_AT = (60, 600)
RIVALS = {
    "nothing": {},
    "global_clipnorm=1": {"global_clipnorm": 1.0},
    'spikes="skip"': {"spikes": "skip"},
}


def planted():
    """Runs with one bad batch, against the same run that never saw it."""
    harmed = dict.fromkeys(RIVALS, 0)
    bad_runs = caught = cases = 0
    worst: dict[str, list[float]] = {name: [] for name in RIVALS}
    for task in PLANTED:
        for optimizer in OPTIMIZERS:
            runs = {name: Runs(task, optimizer, PLANTED_STEPS, **kw) for name, kw in RIVALS.items()}
            shorter = Runs(task, optimizer, PLANTED_STEPS - 1)
            for seed, at in ((seed, at) for seed in range(2) for at in PLANTED_AT):
                x, y = runs["nothing"].batches(seed)
                never, _, _ = shorter(seed, np.delete(x, at, axis=0), np.delete(y, at, axis=0))
                for size in FAULTS:
                    bad_x, bad_y = x.copy(), y.copy()
                    if bad_y.dtype.kind == "f":
                        bad_y[at] = bad_y[at] * size
                    else:
                        bad_x[at], bad_y[at] = bad_x[at] * size, np.roll(bad_y[at], 1)
                    found = {name: run(seed, bad_x, bad_y) for name, run in runs.items()}
                    ratios = {name: loss / never for name, (loss, _, _) in found.items()}
                    ratios = {name: r if np.isfinite(r) else np.inf for name, r in ratios.items()}
                    cases += 1
                    if ratios["nothing"] <= 1.25:
                        continue
                    bad_runs += 1
                    caught += any(e.step == at + 1 for e in found['spikes="skip"'][1].spikes)
                    for name, ratio in ratios.items():
                        harmed[name] += ratio > 1.25
                        worst[name].append(ratio)
            print(f"{task}, {optimizer}: {bad_runs} harmful of {cases}", flush=True)
    print(
        f"\nOf {cases} bad batches {bad_runs} harm a run that does nothing (loss above 1.25 times"
    )
    print(f"that of the run that never saw it). {caught} of them are left out.\n")
    print("| | still harmed | median loss / never seen | largest |")
    print("|---|--:|--:|--:|")
    for name, ratios in worst.items():
        print(f"| {name} | {harmed[name]} | {np.median(ratios):.4g} | {np.max(ratios):.4g} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", choices=("sound", "planted"))
    keras.config.set_dtype_policy("float32")
    {"sound": sound, "planted": planted}[parser.parse_args().question]()
