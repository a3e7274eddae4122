"""Does `spikes="skip"` leave sound runs alone, and does it save those with one bad batch?

    python benchmarks/experiments/spikes.py

runs the first three parts below, each in a process of its own, and writes docs/lab/spikes.md. What
is done is kept in build/spikes.jsonl, so that a run that was stopped goes on.

    KERAS_BACKEND=jax python benchmarks/experiments/spikes.py sound     120 runs without a bad batch
    KERAS_BACKEND=jax python benchmarks/experiments/spikes.py planted   240 runs with one bad batch
    KERAS_BACKEND=... python benchmarks/experiments/spikes.py fit       `fit` with callbacks
    python benchmarks/experiments/spikes.py programs   the models of compat/; needs `.[programs]`

The runs of the first two parts are loops in one compiled program, the seeds side by side. None of
these tasks was used to choose the rule's settings.
"""

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
from typing import NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import layers

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
KEPT = pathlib.Path("build/spikes.jsonl")
PAGE = pathlib.Path("docs/lab/spikes.md")


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


class Peer(NamedTuple):
    """A rule of the field: the factor of a step's gradients, 0 to leave it out."""

    init: object  # () -> state
    next: object  # (state, norm, loss, step) -> (state, factor)


def olmo(length=128, sigmas=6):
    """OLMo-core's `SkipStepOptimizer`: the last 128 losses and norms, mean and 6 deviations."""

    def deviates(history, known, value):
        mean = jnp.sum(jnp.where(known, history, 0)) / known.sum()
        squares = jnp.where(known, (history - mean) ** 2, 0)
        return value - mean > sigmas * jnp.sqrt(jnp.sum(squares) / (known.sum() - 1))

    def following(state, norm, loss, step):
        known = jnp.arange(length) < step
        acts = [deviates(h, known, x) for h, x in zip(state, (norm, loss), strict=True)]
        skips = (acts[0] | acts[1]) & (step + 1 >= length // 2)
        state = [h.at[step % length].set(x) for h, x in zip(state, (norm, loss), strict=True)]
        return state, 1.0 - skips

    return Peer(lambda: [jnp.zeros(length), jnp.zeros(length)], following)


def zclip(alpha=0.97, threshold=2.5, warmup=25):
    """ZClip (Kumar et al. 2025): clips to fewer deviations the further a norm is away."""

    def following(state, norm, loss, step):
        first, mean, variance = state
        first = jnp.where(step < warmup, first.at[step % warmup].set(norm), first)
        mean = jnp.where(step == warmup, first.mean(), mean)
        variance = jnp.where(step == warmup, first.var(), variance)
        deviation = jnp.sqrt(variance)
        score = (norm - mean) / (deviation + 1e-6)
        clips = (score > threshold) & (step >= warmup) & (deviation > 1e-6)
        limit = mean + threshold * deviation * threshold / jnp.where(clips, score, threshold)
        seen = jnp.where(clips, limit, norm)
        new_mean = alpha * mean + (1 - alpha) * seen
        new_variance = alpha * variance + (1 - alpha) * (seen - new_mean) ** 2
        state = (
            first,
            jnp.where(step >= warmup, new_mean, mean),
            jnp.where(step >= warmup, new_variance, variance),
        )
        return state, jnp.where(clips, limit / norm, 1.0)

    return Peer(lambda: (jnp.zeros(warmup), jnp.zeros(()), jnp.zeros(())), following)


RULES = {
    "nothing": ({}, None),
    "global_clipnorm=1": ({"global_clipnorm": 1.0}, None),
    "OLMo-core": ({}, olmo()),
    "ZClip": ({}, zclip()),
    'spikes="skip"': ({"spikes": "skip"}, None),
}

# The optimizers that the rules of others are tried with; nothing, and kmp's, with all.
WITH_RIVALS = ("SGD, momentum", "Adam")


def compared(optimizer):
    """The rules that are tried with an optimizer, by name."""
    ours = ("nothing", 'spikes="skip"')
    return {k: v for k, v in RULES.items() if k in ours or optimizer in WITH_RIVALS}


class Runs:
    """Runs of one task with one optimizer and one rule, side by side in one compiled program."""

    def __init__(self, task, optimizer, steps, arguments, peer=None):
        data, make_layers, self.loss, rate, self.batch = TASKS[task]
        self.steps, self.data, self.peer = steps, data, peer
        sample, _ = data(np.random.default_rng(0), 2)
        self.model = keras.Sequential([keras.Input(sample.shape[1:], dtype=sample.dtype)])
        for layer in make_layers():
            self.model.add(layer)
        arguments = dict(arguments)
        inner = OPTIMIZERS[optimizer](rate)
        if "global_clipnorm" in arguments:
            inner.global_clipnorm = arguments.pop("global_clipnorm")
        self.optimizer = kmp.scaled(inner, "none", **arguments)
        self.optimizer.build(self.model.trainable_variables)
        self.state = [v.value for v in self.optimizer.variables]
        counter = self.optimizer.skipped_spikes
        self.counter = next(
            (i for i, v in enumerate(self.optimizer.variables) if v is counter), None
        )
        self.run = jax.jit(jax.vmap(self._run))

    def _run(self, weights, others, x, y, bad):
        def step(carry, batch):
            weights, others, state, memory = carry
            x, y, number = batch

            def loss_of(weights):
                outputs, changed = self.model.stateless_call(weights, others, x, training=True)
                return self.loss(y, outputs), changed

            (loss, changed), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
            factor = jnp.where(number == bad, 0.0, 1.0)  # `bad` is -1 unless it is never seen
            if self.peer:
                norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
                memory, factor = self.peer.next(memory, norm, loss, number)
                gradients = [g * jnp.where(factor > 0, factor, 1.0) for g in gradients]
            new_weights, new_state = self.optimizer.stateless_apply(state, gradients, weights)
            new = (new_weights, changed, new_state)
            old = (weights, others, state)
            kept = jax.tree.map(lambda a, b: jnp.where(factor > 0, a, b), new, old)
            acted = factor < 1
            if self.counter is not None:
                acted |= new_state[self.counter] > state[self.counter]
            return (*kept, memory), acted

        memory = self.peer.init() if self.peer else ()
        numbers = jnp.arange(len(x))
        (weights, others, _, _), acted = jax.lax.scan(
            step, (weights, others, self.state, memory), (x, y, numbers)
        )
        return weights, others, acted

    def batches(self, seeds):
        """Return the inputs and targets of the runs of these seeds, `[runs, steps, batch, ...]`."""
        rows = [drawn(self.data, 100 + seed, self.steps * self.batch) for seed in seeds]
        split = (len(seeds), self.steps, self.batch)
        x, y = (np.stack(each) for each in zip(*rows, strict=True))
        return x.reshape(split + x.shape[2:]), y.reshape(split + y.shape[2:])

    def __call__(self, seeds, x, y, bad=-1):
        """Train from seeds; returns the quality on fresh data, and bool[runs, steps], acted on."""
        weights, others = [], []
        for seed in seeds:
            keras.utils.set_random_seed(seed)
            fresh = self.model.__class__.from_config(self.model.get_config())
            weights.append([v.value for v in fresh.trainable_variables])
            others.append([v.value for v in fresh.non_trainable_variables])
        stack = functools.partial(jax.tree.map, lambda *each: jnp.stack(each))
        bad = jnp.full(len(seeds), bad)
        weights, others, acted = self.run(stack(*weights), stack(*others), x, y, bad)
        rare = self.data is rare_labels
        test_x, test_y = self.data(np.random.default_rng(7), 40_000 if rare else 2_000)

        def predicted(weights, others):
            return self.model.stateless_call(weights, others, test_x)[0]

        outputs = np.asarray(jax.jit(jax.vmap(predicted))(weights, others))
        if rare:
            return [auc(test_y, z[:, 1] - z[:, 0]) for z in outputs], np.asarray(acted)
        return [float(self.loss(test_y, z)) for z in outputs], np.asarray(acted)


@functools.lru_cache(maxsize=SEEDS)
def drawn(data, seed, rows):
    """Draw rows of a task's data."""
    return data(np.random.default_rng(seed), rows)


def auc(labels, scores):
    """The share of pairs of a positive and a negative row that the scores order rightly."""
    ranks = np.argsort(np.argsort(scores)) + 1.0
    positive = labels == 1
    pairs = positive.sum() * (~positive).sum()
    excess = ranks[positive].sum() - positive.sum() * (positive.sum() + 1) / 2
    return float(excess / pairs) if np.isfinite(scores).all() else 0.5


def sound():
    """Runs without a bad batch: whatever is acted on is acted on wrongly."""
    for task in TASKS:
        for optimizer in OPTIMIZERS:
            for rule, (arguments, peer) in compared(optimizer).items():
                if is_kept("sound", task, optimizer, rule):
                    continue
                runs = Runs(task, optimizer, SOUND_STEPS, arguments, peer)
                x, y = runs.batches(range(SEEDS))
                quality, acted = runs(range(SEEDS), x, y)
                keep(
                    ("sound", task, optimizer, rule),
                    quality=quality,
                    acted=acted.sum(axis=1).tolist(),
                    early=acted[:, :1_000].sum(axis=1).tolist(),
                )


# Of a batch: inputs in another unit with wrong labels, and targets in another unit.
FAULTS = (1e2, 1e4, 1e8)
PLANTED = ("teacher and student", "heavy tails", "sparse rows", "walks, LSTM")
PLANTED_AT = (60, 600)


def planted():
    """Runs with one bad batch, against the same run that never saw it."""
    cases = [(seed, size) for seed in range(2) for size in FAULTS]
    seeds = [seed for seed, _ in cases]
    for task in PLANTED:
        for optimizer in OPTIMIZERS:
            rules = compared(optimizer) | {"never seen": ({}, None)}
            for rule, (arguments, peer) in rules.items():
                if is_kept("planted", task, optimizer, rule):
                    continue
                runs = Runs(task, optimizer, PLANTED_STEPS, arguments, peer)
                quality, caught, others = [], [], []
                for at in PLANTED_AT:
                    x, y = runs.batches(seeds)
                    for i, (_, size) in enumerate(cases):
                        if y.dtype.kind == "f":
                            y[i, at] *= size
                        else:
                            x[i, at], y[i, at] = x[i, at] * size, np.roll(y[i, at], 1)
                    found, acted = runs(seeds, x, y, at if rule == "never seen" else -1)
                    quality += found
                    caught += acted[:, at].tolist()
                    others += np.delete(acted, at, axis=1).sum(axis=1).tolist()
                keep(
                    ("planted", task, optimizer, rule),
                    quality=quality,
                    caught=caught,
                    others=others,
                )


FIT_STEPS, FIT_BAD = 400, 150
FIT_TASKS = ("teacher and student", "pictures, BatchNormalization")
FIT_RULES = ("never seen", "nothing", "DivergenceGuard", 'spikes="skip"')


def fit():
    """The same in `fit`, with callbacks, on the backend of this process."""
    for task in FIT_TASKS:
        data, make_layers, loss, rate, batch = TASKS[task]
        x, y = data(np.random.default_rng(3), FIT_STEPS * batch)
        fresh = data(np.random.default_rng(7), 2_000)
        bad = slice(FIT_BAD * batch, (FIT_BAD + 1) * batch)
        for optimizer in OPTIMIZERS:
            for rule in FIT_RULES:
                names = ("fit", keras.backend.backend(), task, optimizer, rule)
                if is_kept(*names):
                    continue
                bad_x, bad_y = x.copy(), y.copy()
                bad_x[bad], bad_y[bad] = x[bad] * 1e4, np.roll(y[bad], 1)
                if rule == "never seen":
                    bad_x, bad_y = np.delete(x, bad, axis=0), np.delete(y, bad, axis=0)
                keras.utils.set_random_seed(0)
                model = keras.Sequential([keras.Input(x.shape[1:]), *make_layers()])
                inner = OPTIMIZERS[optimizer](rate)
                spikes = "skip" if "spikes" in rule else None
                model.compile(kmp.scaled(inner, "none", spikes=spikes), loss)
                callbacks = [kmp.callbacks.GradientHealth(verbose=0)]
                if rule == "DivergenceGuard":
                    callbacks.append(kmp.callbacks.DivergenceGuard("rollback"))
                model.fit(bad_x, bad_y, batch, 1, 0, callbacks, shuffle=False)
                report = model.optimizer.gradient_report()
                keep(
                    names,
                    quality=[float(model.evaluate(*fresh, verbose=0))],
                    caught=[bool(report.skipped_spikes or report.held_statistics)],
                )


PROGRAMS = (
    *("gpt2", "llama", "mixtral", "bert", "t5", "vit", "swin", "resnet", "deeplab", "whisper"),
    *("dlrm", "deep_cross", "two_towers", "ranking", "vae", "unet", "translation", "ctc"),
)
PROGRAM_EPOCHS, PROGRAM_BATCHES = 40, 24


def programs():
    """Other people's models, which learn a few batches of noise by heart: no step is a spike."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "compat"))
    import catalogue
    import program as batches
    import runs

    def data(model_program, seed):
        found = []
        for batches.SEED in range(seed * PROGRAM_BATCHES, (seed + 1) * PROGRAM_BATCHES):
            found.append(model_program.batch())
        return keras.tree.map_structure(
            lambda *parts: np.concatenate(parts) if np.ndim(parts[0]) else parts[0], *found
        )

    for name in PROGRAMS:
        for seed in range(SEEDS):
            if is_kept("programs", name, seed):
                continue
            found = catalogue.program(name)
            model = runs.made(
                found, "float32", lambda x: kmp.scaled(x, "none", spikes="skip"), jit_compile="auto"
            )
            shape = {"batch_size": batches.BATCH, "epochs": PROGRAM_EPOCHS, "shuffle": False}
            model.fit(*data(found, seed), **shape, verbose=0)
            report = found.optimizer(model).gradient_report()
            keep(("programs", name, seed), acted=[int(report.skipped_spikes)])


def kept():
    """What has been run: a dictionary of results by the names of the run."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return {tuple(names): result for names, result in map(json.loads, lines)}


def is_kept(*names):
    """Whether the run of these names is done."""
    return names in kept()


def keep(names, **result):
    """Note the result of a run."""
    KEPT.parent.mkdir(exist_ok=True)
    with KEPT.open("a") as file:
        file.write(json.dumps([names, result]) + "\n")
    print(*names, result, flush=True)


KNOWN = ("OLMo-core", "ZClip", 'spikes="skip"')  # the rules that tell what they act on
HARMED = 1.25  # times the loss of the run that never saw the batch


def page():
    """The page, of what has been run."""
    results = kept()
    parts = (_sound_part, _programs_part, _planted_part, _fit_part)
    lines = [__doc_of_page__, *(line for part in parts for line in part(results))]
    PAGE.write_text("\n".join(lines) + "\n")


def _sound_part(results):
    runs = {names[1:]: found for names, found in results.items() if names[0] == "sound"}
    tasks = list(dict.fromkeys(names[:2] for names in runs))
    yield "## Sound runs\n"
    yield (
        f"{len(TASKS)} tasks, {len(OPTIMIZERS)} optimizers (the rules of others with "
        f"{' or '.join(WITH_RIVALS)} only), {SEEDS} seeds, {SOUND_STEPS:,} steps each. Whatever "
        "is acted on here, left out or clipped by ZClip, is acted on wrongly. Early: in the first "
        f"1,000 steps. Worse: runs whose loss on fresh data is more than {HARMED} times that "
        "without a rule.\n"
    )
    yield "| rule | runs | acted on, per 10,000 | early | runs above 1 in 10,000 | worse |"
    yield "|---|--:|--:|--:|--:|--:|"
    for rule in RULES:
        acted, early, worse, total = [], 0, 0, 0
        for task, optimizer in tasks:
            if rule not in compared(optimizer):
                continue
            found, plain = runs[task, optimizer, rule], runs[task, optimizer, "nothing"]
            acted += found["acted"]
            early += sum(found["early"])
            if task != "rare labels":
                pairs = list(zip(found["quality"], plain["quality"], strict=True))
                worse += sum(not a <= HARMED * b for a, b in pairs)
                total += len(pairs)
        often = sum(n * 10_000 > SOUND_STEPS for n in acted)
        rate = sum(acted) / (len(acted) * SOUND_STEPS) * 10_000
        shown = f"{rate:.2f} | {early} | {often}" if rule in KNOWN else "- | - | -"
        yield f"| {rule} | {len(acted)} | {shown} | {worse} of {total} |"
    yield (
        "\nOn rare labels, where one row in 800 is positive, the spikes are the signal. AUC on "
        "fresh rows, the mean of the seeds:\n"
    )
    yield "| rule | " + " | ".join(OPTIMIZERS) + " |"
    yield "|---|" + "--:|" * len(OPTIMIZERS)
    for rule in RULES:
        found = [runs.get(("rare labels", name, rule)) for name in OPTIMIZERS]
        cells = [f"{np.mean(each['quality']):.3f}" if each else "-" for each in found]
        yield f"| {rule} | " + " | ".join(cells) + " |"
    ours = {k[:2]: v for k, v in runs.items() if k[2] == 'spikes="skip"' and sum(v["acted"])}
    if ours:
        yield (
            '\nWhat `spikes="skip"` left out: '
            + "; ".join(
                f"{sum(found['acted'])} in {task}, {name}" for (task, name), found in ours.items()
            )
            + "."
        )


def _programs_part(results):
    runs = {names[1:]: found for names, found in results.items() if names[0] == "programs"}
    acted = sum(sum(found["acted"]) for found in runs.values())
    where = {name: None for (name, _), found in runs.items() if sum(found["acted"])}
    named = ", ".join(dict.fromkeys(name for name, _ in runs))
    steps = PROGRAM_EPOCHS * PROGRAM_BATCHES
    yield (
        f"\nOther people's models ({named}; most are of keras-hub and keras-rs), with Adam, learn "
        f"{PROGRAM_BATCHES} batches of noise by heart in {steps} steps, {SEEDS} seeds "
        f"each: {acted} of {len(runs) * steps:,} steps were left out"
        f"{', in ' + ', '.join(where) if where else ''}."
    )


def _planted_part(results):
    runs = {names[1:]: found for names, found in results.items() if names[0] == "planted"}
    tasks = list(dict.fromkeys(names[:2] for names in runs))
    harmful, ratios = {}, {}
    for names in tasks:
        never = np.array(runs[*names, "never seen"]["quality"])
        for rule in RULES:
            if rule in compared(names[1]):
                ratio = np.array(runs[*names, rule]["quality"]) / never
                ratios[*names, rule] = np.where(np.isfinite(ratio), ratio, np.inf)
        harmful[names] = ratios[*names, "nothing"] > HARMED
    total = sum(each.sum() for each in harmful.values())
    yield "\n## One bad batch\n"
    yield (
        f"{sum(map(len, harmful.values()))} runs of {PLANTED_STEPS:,} steps, each with one bad "
        f"batch, at step {' or '.join(map(str, PLANTED_AT))}: its inputs (with wrong labels) or "
        f"its targets are multiplied by {', '.join(f'{x:g}' for x in FAULTS)}. {total} of them are "
        f"harmful: if nothing is done, the loss on fresh data is more than {HARMED} times that of "
        "the same run that never saw the batch.\n"
    )
    yield (
        "| rule | harmful runs | acted on | still harmed | largest loss / never seen | harmed, of "
        "the harmless | other steps acted on, a run |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for rule in RULES:
        tried = [names for names in tasks if rule in compared(names[1])]
        bad = np.concatenate([harmful[names] for names in tried])
        ratio = np.concatenate([ratios[*names, rule] for names in tried])
        caught = np.concatenate([runs[*names, rule]["caught"] for names in tried])
        others = np.concatenate([runs[*names, rule]["others"] for names in tried])
        known = rule in KNOWN
        yield (
            f"| {rule} | {bad.sum()} | {caught[bad].sum() if known else '-'} | "
            f"{(ratio[bad] > HARMED).sum()} | {ratio[bad].max():.3g} | "
            f"{(ratio[~bad] > HARMED).sum()} of {(~bad).sum()} | "
            f"{f'{others.mean():.1f}' if known else '-'} |"
        )


def _fit_part(results):
    runs = {names[1:]: found for names, found in results.items() if names[0] == "fit"}
    backends = list(dict.fromkeys(names[0] for names in runs))
    yield "\n## In `fit`, with callbacks\n"
    yield (
        f"One epoch of {FIT_STEPS} steps on {', '.join(backends)}, with `kmp.callbacks."
        f"GradientHealth`; the inputs of batch {FIT_BAD} are multiplied by 1e4, its labels wrong. "
        "Loss on fresh data over that of the run that never saw the batch.\n"
    )
    yield "| task | rule | runs | harmed | median | largest | acted on |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for task in FIT_TASKS:
        for rule in FIT_RULES[1:]:
            ratios, caught = [], 0
            for (backend, name, optimizer, used), found in runs.items():
                if name == task and used == rule:
                    (mine,) = found["quality"]
                    (never,) = runs[backend, name, optimizer, "never seen"]["quality"]
                    ratios.append(mine / never if np.isfinite(mine) else np.inf)
                    caught += found["caught"][0]
            harmed = sum(r > HARMED for r in ratios)
            cells = f"{np.median(ratios):.3g} | {max(ratios):.3g}"
            acted = caught if "spikes" in rule else "-"
            yield f"| {task} | {rule} | {len(ratios)} | {harmed} | {cells} | {acted} |"


__doc_of_page__ = """# Leaving out spikes: what it catches, and what it leaves alone

Written by `python benchmarks/experiments/spikes.py`, on a CPU. The rule is that of
[`spikes="skip"`](../limits.md); the others are `global_clipnorm` of Keras, the rules of OLMo-core
(mean and 6 standard deviations of the last 128 losses and norms) and of ZClip (2.5, 0.97, 25), as
their sources have them, and `kmp.callbacks.DivergenceGuard`. No task here was used to choose the
rule's settings.
"""

PARTS = {"sound": sound, "planted": planted, "fit": fit, "programs": programs}


def everything():
    """Run all parts, each in a process of its own, then write the page."""
    for part, backend in (
        ("sound", "jax"),
        ("planted", "jax"),
        *(("fit", backend) for backend in ("jax", "tensorflow", "torch")),
    ):
        environment = dict(os.environ, KERAS_BACKEND=backend)
        subprocess.run([sys.executable, __file__, part], env=environment, check=True)
    page()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=(*PARTS, "page"))
    keras.config.set_dtype_policy("float32")
    {None: everything, "page": page, **PARTS}[parser.parse_args().part]()
