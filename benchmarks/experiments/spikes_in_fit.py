"""Part `fit` of spikes.py: planted batches in `model.fit`, and the section of its page.

Each run is one epoch with one bad batch. The runs that share a backend, a task, an optimizer and a
rule share what is compiled: weights and the optimizer's state go back to their start before each.
"""

from typing import NamedTuple

import keras
import numpy as np
from spike_rules import WITH_RIVALS, TellsLoss, following, olmo, zclip
from spike_tasks import FAULTS, HARMED, OPTIMIZERS, TASKS, spoil

import kmp

BATCHES = 300
PLACES = (60, 180)  # each with a seed of its own
NORMALIZED = "pictures, BatchNormalization"
FIT_TASKS = ("teacher and student", "heavy tails", NORMALIZED)
WAITS = {NORMALIZED: 100}  # steps before `spikes="skip"` guards a task, if not 16
OURS = 'spikes="skip"'
PEERS = {"OLMo-core": olmo(), "ZClip": zclip()}
RULES = ("never seen", "nothing", "global_clipnorm=1", *PEERS, "DivergenceGuard", OURS)


def rules(optimizer):
    """The rules that are tried with an optimizer."""
    rivals = ("global_clipnorm=1", *PEERS)
    return [rule for rule in RULES if rule not in rivals or optimizer in WITH_RIVALS]


class Fit:
    """A model that is compiled once, and trained from the same start as often as it is called."""

    def __init__(self, task, optimizer, rule):
        self.data, self.layers, loss, rate, self.batch = TASKS[task]
        self.rule = rule
        self.model = self.new_model()
        inner = OPTIMIZERS[optimizer](rate)
        if rule in PEERS:
            inner = following(PEERS[rule], inner, BATCHES)
        elif rule == "global_clipnorm=1":
            inner.global_clipnorm = 1.0
        elif rule == "DivergenceGuard":
            inner = kmp.scaled(inner, "none")
        elif rule == OURS:
            inner = kmp.scaled(inner, "none", spikes="skip")
        self.model.compile(inner, loss)
        self.optimizer = self.model.optimizer
        self.optimizer.build(self.model.trainable_variables)
        self.start = [keras.ops.convert_to_numpy(v) for v in self.optimizer.variables]

    def new_model(self):
        """A model of the task, with fresh weights."""
        sample, _ = self.data(np.random.default_rng(0), 2)
        kind = TellsLoss if self.rule in PEERS else keras.Sequential
        return kind([keras.Input(sample.shape[1:], dtype=sample.dtype), *self.layers()])

    def batches(self, seed):
        """The inputs and the targets of a run, `[rows, ...]`."""
        return self.data(np.random.default_rng(100 + seed), BATCHES * self.batch)

    def __call__(self, seed, at, size):
        """Train with a bad batch, `size` times too large, as number `at`; returns a result."""
        x, y = self.batches(seed)
        bad = slice(at * self.batch, (at + 1) * self.batch)
        if self.rule == "never seen":
            x, y = np.delete(x, bad, axis=0), np.delete(y, bad, axis=0)
        else:
            x[bad], y[bad] = spoil(x[bad], y[bad], size)
        keras.utils.set_random_seed(seed)
        self.model.set_weights(self.new_model().get_weights())
        for variable, value in zip(self.optimizer.variables, self.start, strict=True):
            variable.assign(value)
        callbacks = []
        if self.rule == "DivergenceGuard":
            callbacks = [kmp.callbacks.DivergenceGuard("rollback")]
        elif self.rule == OURS:
            callbacks = [kmp.callbacks.GradientHealth(verbose=0)]
        self.model.fit(x, y, self.batch, 1, 0, callbacks, shuffle=False)
        test_x, test_y = self.data(np.random.default_rng(7), 2_000)
        quality = float(self.model.evaluate(test_x, test_y, 2_000, verbose=0))
        return {"quality": quality} | self.acted(at, callbacks)

    def acted(self, at, callbacks):
        """Whether the rule acted on the bad batch, and on how many others."""
        if self.rule in PEERS:
            acted = keras.ops.convert_to_numpy(self.optimizer.acted)
            return {"caught": bool(acted[at]), "others": int(acted.sum() - acted[at])}
        if self.rule == "DivergenceGuard":
            return {"caught": bool(callbacks[0].rollbacks)}
        if self.rule == OURS:
            report = self.optimizer.gradient_report()
            skipped = at + 1 in [event.step for event in report.spikes]
            held = report.held_statistics
            others = report.skipped_spikes - skipped + max(held - 1, 0)
            return {"caught": bool(skipped or held), "held": held, "others": others}
        return {}


def fit(is_kept, keep):
    """Run all on the backend of this process."""
    for task in FIT_TASKS:
        for optimizer in OPTIMIZERS:
            for rule in rules(optimizer):
                names = ("fit", keras.backend.backend(), task, optimizer, rule)
                if is_kept(*names):
                    continue
                train = Fit(task, optimizer, rule)
                sizes = FAULTS[:1] if rule == "never seen" else FAULTS
                runs = [
                    train(seed, at, size) | {"at": at, "size": size}
                    for seed, at in enumerate(PLACES)
                    for size in sizes
                ]
                keep(names, runs=runs)


class Planted(NamedTuple):
    """A planted batch, and what a rule made of it."""

    backend: str
    task: str
    at: int
    size: float
    harmful: bool  # if nothing is done
    ratio: float  # the loss over that of the run that never saw it
    caught: bool
    others: int

    @property
    def is_guarded(self):
        """Whether `spikes="skip"` does not wait any more when it comes."""
        return self.at >= WAITS.get(self.task, 16)

    @property
    def harmed(self):
        """Whether the run ended worse than the one that never saw the batch."""
        return self.ratio > HARMED


def planted(results, rule):
    """What a rule made of its batches."""
    for (backend, task, optimizer, used), found in results.items():
        if used != rule:
            continue
        same = backend, task, optimizer
        never = {run["at"]: run["quality"] for run in results[*same, "never seen"]["runs"]}
        nothing = {(r["at"], r["size"]): r["quality"] for r in results[*same, "nothing"]["runs"]}
        for run in found["runs"]:
            at, size = run["at"], run["size"]
            losses = np.array([nothing[at, size], run["quality"]]) / never[at]
            harm, ratio = np.where(np.isfinite(losses), losses, np.inf).tolist()
            acted = run.get("caught", False), run.get("others", 0)
            yield Planted(backend, task, at, size, harm > HARMED, ratio, *acted)


def section(results):
    """The lines of the page."""
    backends = list(dict.fromkeys(names[0] for names in results))
    found = {rule: list(planted(results, rule)) for rule in RULES[1:]}
    ours = found[OURS]
    guarded = [run for run in ours if run.harmful and run.is_guarded]
    yield (
        f"One epoch of {BATCHES} steps on {', '.join(backends)}: {len(FIT_TASKS)} tasks, "
        f"{len(OPTIMIZERS)} optimizers (the rules of others with {' or '.join(WITH_RIVALS)} only), "
        f"a bad batch as above at step {' or '.join(map(str, PLACES))}. Of these {len(ours)} "
        f"batches {sum(run.harmful for run in ours)} are harmful. {len(guarded)} harmful ones come "
        'when `spikes="skip"` does not wait any more: it waits for 16 norms, and with '
        f"BatchNormalization for {WAITS[NORMALIZED]} steps. Beside nothing, `global_clipnorm` and "
        "the rules of others there is no kmp, only Keras's optimizer; OLMo-core's rule is told the "
        "loss as well. `DivergenceGuard` acts when it rolls back. Beside `spikes=` there is "
        "`GradientHealth`.\n"
    )
    yield "The batches that come when it does not wait any more, by backend:\n"
    yield from table(found, "backend", backends)
    yield "\nThe same by task, on all backends:\n"
    yield from table(found, "task", FIT_TASKS)
    early = [run for run in found["OLMo-core"] if run.harmed and run.at < 64]
    held = [run for run in ours if run.is_guarded and run.task == NORMALIZED]
    late = [run.ratio for run in held if run.size == 1e4]
    yield (
        f"\nOLMo-core's rule waits for 64 steps: {sum(run.is_guarded for run in early)} of its "
        f"harmed runs have the batch before. With BatchNormalization and inputs times 1e4 at step "
        f"{PLACES[1]} the median loss with `{OURS}` is {np.median(late):.3f} times that of never "
        f"seen, the largest {max(late):.3f}. No other rule helps there: `fit` has moved the "
        f"statistics before it asks the optimizer. In the first {WAITS[NORMALIZED]} steps "
        f"`{OURS}` does not hold them either. Of the batches at step {PLACES[0]} with "
        f"BatchNormalization harm the run: {', '.join(unguarded(found))}."
    )


def unguarded(found):
    """What the rules made of the batches before `spikes="skip"` guards a task."""
    for rule, runs in found.items():
        chosen = [run for run in runs if not run.is_guarded]
        yield f"{rule} {sum(run.harmed for run in chosen)} of {len(chosen)}"


def table(found, name, values):
    """A table of the rules by backend or by task."""
    yield (
        f"| rule | {name} | batches | harmful | acted on | still harmed | largest loss / never "
        "seen | harmed, of the harmless | other steps acted on, a run |"
    )
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|"
    for rule, runs in found.items():
        for value in values:
            chosen = [run for run in runs if run.is_guarded and getattr(run, name) == value]
            harmful = [run for run in chosen if run.harmful]
            harmless = [run for run in chosen if not run.harmful]
            tells = rule in (*PEERS, OURS)
            acted = sum(run.caught for run in harmful)
            yield (
                f"| {rule} | {value} | {len(chosen)} | {len(harmful)} | "
                f"{acted if tells or rule == 'DivergenceGuard' else '-'} | "
                f"{sum(run.harmed for run in harmful)} | "
                f"{max((run.ratio for run in harmful), default=1.0):.3g} | "
                f"{sum(run.harmed for run in harmless)} of {len(harmless)} | "
                f"{f'{np.mean([run.others for run in chosen]):.1f}' if tells else '-'} |"
            )
