"""Does `spikes="skip"` leave sound runs alone, and does it save those with one bad batch?

    python benchmarks/experiments/spikes.py

runs the first three parts below, each in a process of its own, and writes docs/lab/spikes.md, where
a part that has not been run stays as it stands. What is done is kept in build/spikes.jsonl, so that
a run that was stopped goes on.

    KERAS_BACKEND=jax python benchmarks/experiments/spikes.py sound     120 runs without a bad batch
    KERAS_BACKEND=jax python benchmarks/experiments/spikes.py planted   240 runs with one bad batch
    KERAS_BACKEND=... python benchmarks/experiments/spikes.py fit       90 batches in `fit`, 7 rules
    python benchmarks/experiments/spikes.py programs   the models of compat/; needs `.[programs]`

The runs of the first two parts are loops in one compiled program, the seeds side by side. None of
these tasks was used to choose the rule's settings.
"""

import argparse
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import jax.numpy as jnp
import keras
import numpy as np
import spikes_in_fit
from spike_rules import WITH_RIVALS, olmo, zclip
from spike_tasks import FAULTS, HARMED, OPTIMIZERS, TASKS, rare_labels, spoil

import kmp

SEEDS = 3
SOUND_STEPS, PLANTED_STEPS = 3_000, 1_200
KEPT = pathlib.Path("build/spikes.jsonl")
PAGE = pathlib.Path("docs/lab/spikes.md")


RULES = {
    "nothing": ({}, None),
    "global_clipnorm=1": ({"global_clipnorm": 1.0}, None),
    "OLMo-core": ({}, olmo()),
    "ZClip": ({}, zclip()),
    'spikes="skip"': ({"spikes": "skip"}, None),
}


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
                        x[i, at], y[i, at] = spoil(x[i, at], y[i, at], size)
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


def fit():
    """The same in `fit`, with callbacks, on the backend of this process."""
    spikes_in_fit.fit(is_kept, keep)


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


def page():
    """Write the page, of what has been run. A part that has not been run stays as it stands."""
    present = PAGE.read_text() if PAGE.exists() else ""
    written = dict(re.findall(r"^(##+ .+?)$\n+(.+?)(?=^##|\Z)", present, re.MULTILINE | re.DOTALL))
    text = [__doc_of_page__.rstrip()]
    for part, (heading, lines) in SECTIONS.items():
        results = {names[1:]: found for names, found in kept().items() if names[0] == part}
        body = "\n".join(lines(results)) if results else written.get(heading, "Not run.")
        text += [heading, body.strip()]
    PAGE.write_text("\n\n".join(text) + "\n")


def _sound_part(runs):
    tasks = list(dict.fromkeys(names[:2] for names in runs))
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


def _programs_part(runs):
    acted = sum(sum(found["acted"]) for found in runs.values())
    where = {name: None for (name, _), found in runs.items() if sum(found["acted"])}
    named = ", ".join(dict.fromkeys(name for name, _ in runs))
    steps = PROGRAM_EPOCHS * PROGRAM_BATCHES
    yield (
        f"Other people's models ({named}; most are of keras-hub and keras-rs), with Adam, learn "
        f"{PROGRAM_BATCHES} batches of noise by heart in {steps} steps, {SEEDS} seeds "
        f"each: {acted} of {len(runs) * steps:,} steps were left out"
        f"{', in ' + ', '.join(where) if where else ''}."
    )


def _planted_part(runs):
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


SECTIONS = {
    "sound": ("## Sound runs", _sound_part),
    "programs": ("### Other people's models", _programs_part),
    "planted": ("## One bad batch", _planted_part),
    "fit": ("## One bad batch in `fit`", spikes_in_fit.section),
}

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
