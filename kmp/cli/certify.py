"""Whether half precision trains as well as float32: the command `certify`."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

import keras

from kmp._common import table
from kmp.cli.building import parse_policy
from kmp.cli.costs import Spread, StepMemory, mebibytes, spread
from kmp.cli.equivalence import Equivalence, equivalence, student_t
from kmp.cli.ledger import Ledger, Training
from kmp.cli.options import CERTIFY_POLICIES, UsageError
from kmp.cli.runs import Run
from kmp.cli.tasks import Task

_HEADER = (
    *("policy", "metric (sd)", "difference [90% interval]", "p", "equivalent"),
    *("step ms", "speed [quartiles]", "memory MiB", "skipped"),
)


@dataclasses.dataclass(frozen=True)
class PolicyRuns:
    """The runs of a task under one policy.

    Attributes:
        policy: str.
        metrics: `[seeds]`, of the test data after training.
        step_ms: `Spread` of the milliseconds of a training step, over the seeds.
        speedup: `Spread` of float32's time over this policy's time, seed by seed.
        memory: the `bytes` that a training step holds at most, None if unknown, and the `source` of
            the number.
        steps: int, taken in all runs together.
        skipped_steps: int, how many of them kmp skipped.
        result: `Equivalence` to float32; None for float32 itself.
        counts: bool, whether the policy has float32 or bfloat16 parameters. One that keeps them in
            float16 is shown as a counter-example.
    """

    policy: str
    metrics: tuple[float, ...]
    step_ms: Spread
    speedup: Spread
    memory: StepMemory
    steps: int
    skipped_steps: int
    result: Equivalence | None
    counts: bool


@dataclasses.dataclass(frozen=True)
class Certificate:
    """A task under float32 and other policies; see `certify`.

    Attributes:
        task: the `Task`, with its metric and margin.
        runs: float32's `PolicyRuns`, and one for each of the others.
    """

    task: Task
    runs: tuple[PolicyRuns, ...]

    @property
    def equivalent(self) -> bool:
        """Whether float32 is finite, and all policies that count are equivalent to it."""
        pairs = [(each.counts, each.result) for each in self.runs]
        return self.reference_is_finite and all(x.equivalent for counts, x in pairs if counts and x)

    @property
    def reference_is_finite(self) -> bool:
        """Whether the metric of float32 is finite for all seeds."""
        return all(map(math.isfinite, self.runs[0].metrics))

    @property
    def cells(self) -> list[list[str]]:
        """The rows of a table, its header first."""
        rows = [
            [
                each.policy,
                _mean_and_deviation(each.metrics),
                *_verdict(each, self.task.relative),
                f"{each.step_ms.median:.3g}",
                "{:.2f}x [{:.2f}, {:.2f}]".format(*each.speedup),
                mebibytes(each.memory),
                f"{each.skipped_steps} of {each.steps}",
            ]
            for each in self.runs
        ]
        return [[*_HEADER], *rows]

    @property
    def title(self) -> str:
        """What was trained, how often, and with which margin."""
        task = self.task
        return (
            f"{task.name}: {task.metric}, {task.seeds} seeds, margin {task.stated_margin}, "
            f"{task.epochs} epochs in batches of {task.batch_size}"
        )

    def __str__(self) -> str:
        lines = [self.title, table(self.cells), f"Memory: {self.runs[0].memory.source}."]
        if not self.reference_is_finite:
            lines.append(
                "NOT FINITE: float32 itself. Nothing can be compared with it: look at the data, "
                "the loss and the learning rate."
            )
        return "\n".join(lines)


def certify(
    task: Task,
    policies: Sequence[str] = CERTIFY_POLICIES,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
    ledger: Ledger | None = None,
) -> Certificate:
    """Train a task in float32 and under other policies from the same seeds, and compare.

    For each seed all policies begin with the same weights and see the same batches in the same
    order, so that a difference of their metrics is due to the policy and to how rounding changes a
    trajectory. Two one-sided tests then decide whether the mean difference is zero up to the task's
    margin. The policies take turns within a seed. The first epoch, which compiles, is not timed if
    there are more. The global random seeds are set.

    On TensorFlow a compiled step draws other dropout masks in another dtype, as seen in 2.21: the
    differences are then those of two runs with different masks, and need more seeds.

    Args:
        task: a `kmp.cli.tasks.Task`. Its function is called under the global policy float32, and
            `kmp.to_mixed_precision` converts.
        policies: what `parse_policy` takes. Those with float32 or bfloat16 parameters count. One
            with float16 parameters is trained as Keras does it, without loss scaling, as a
            counter-example: the task's function is called under it.
        progress: called with what begins now, the number of finished trainings, and that of all.
        ledger: keeps each training as it finishes; those that it holds are not repeated.

    Returns:
        A `Certificate`; print it.

    Raises:
        UsageError: the task's function returns something else than (model, train, test), or its
            metric is not among those that the model evaluates.
        ModuleNotFoundError: SciPy is not installed.

    Example:

    >>> def build(seed):
    ...     x = np.random.default_rng(seed).normal(size=(32, 4)).astype("float32")
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("adam", "mse")
    ...     return model, (x, x[:, :1]), (x, x[:, :1])
    >>> task = Task("line", build, "loss", 0.02, True, epochs=1, batch_size=16, seeds=2)
    >>> certificate = certify(task, ["float32"])
    >>> certificate.equivalent, certificate.runs[1].result.mean
    (True, 0.0)
    """
    student_t()  # found missing now rather than after all the training
    ledger = Ledger() if ledger is None else ledger
    names = ["float32", *policies]
    trainings: list[list[Training]] = [[] for _ in names]
    done, total = 0, task.seeds * len(names)
    for seed in range(task.seeds):
        for i in range(len(names)):
            i = (i + seed) % len(names)  # each policy comes first in turn
            training = ledger.take(task, names[i], seed)
            if training is None:
                progress(f"seed {seed + 1} of {task.seeds}, {names[i]}", done, total)
                training = _train(task, names[i], seed)
                ledger.add(task, names[i], seed, training)
            trainings[i].append(training)
            done += 1
    pairs = zip(names, trainings, strict=True)
    runs = [_policy_runs(task, name, own, trainings[0]) for name, own in pairs]
    return Certificate(task, tuple(runs))


def _policy_runs(
    task: Task, policy: str, own: Sequence[Training], full: Sequence[Training]
) -> PolicyRuns:
    """The trainings under one policy beside those in float32, seed by seed."""
    pairs = list(zip(own, full, strict=True))
    differences = [_difference(a.metric, b.metric, task.relative) for a, b in pairs]
    return PolicyRuns(
        policy=policy,
        metrics=tuple(each.metric for each in own),
        step_ms=spread([each.step_ms for each in own]),
        speedup=spread([b.step_ms / a.step_ms for a, b in pairs]),
        memory=own[0].memory,
        steps=sum(each.steps for each in own),
        skipped_steps=sum(each.skipped_steps for each in own),
        result=None if own is full else equivalence(differences, task.margin),
        counts=parse_policy(policy)[0].param_dtype in ("float32", "bfloat16"),
    )


def _train(task: Task, policy: str, seed: int) -> Training:
    """Build, train and evaluate once."""
    run = Run(lambda: task.build(seed), policy, seed)
    if len(run.data) != 2 or not all(isinstance(x, tuple) and len(x) == 2 for x in run.data):
        raise UsageError(
            "The function that builds must return (model, (x, y), (x_test, y_test)). Received: "
            f"a tuple of {1 + len(run.data)}. Write return model, (x, y), (x_test, y_test) with "
            "arrays as model.fit takes them."
        )
    (x, y), test = run.data
    keras.utils.set_random_seed(seed)  # of the order of the batches
    seconds = run.fit(x, y, task.batch_size, task.epochs, shuffle=True)
    metrics = run.model.evaluate(*test, batch_size=256, verbose=0, return_dict=True)
    if task.metric not in metrics:
        raise UsageError(
            f"`metric` must be one of those that the model evaluates: {sorted(metrics)}. "
            f"Received: metric={task.metric!r}."
        )
    batch = (keras.tree.map_structure(lambda a: a[: task.batch_size], tree) for tree in (x, y))
    unknown = StepMemory(None, "measured only for the first seed")
    return Training(
        metric=float(metrics[task.metric]),
        steps=run.steps,
        skipped_steps=run.skipped_steps,
        step_ms=1e3 * statistics.median(seconds[1:] or seconds) * task.epochs / run.steps,
        memory=run.memory(*batch) if seed == 0 else unknown,
    )


def _difference(own: float, full: float, relative: bool) -> float:
    if not relative or own == full:
        return own - full
    return (own - full) / full if full else math.inf


def _mean_and_deviation(values: Sequence[float]) -> str:
    finite = [x for x in values if math.isfinite(x)]
    if len(finite) < len(values):
        return f"not finite in {len(values) - len(finite)} of {len(values)}"
    return f"{statistics.fmean(values):.4f} ({statistics.stdev(values):.4f})"


def _verdict(runs: PolicyRuns, relative: bool) -> list[str]:
    """Table cells: the difference with its interval, the p-value, and the verdict."""
    result = runs.result
    if result is None:
        return ["", "", ""]
    style = "{:+.2%} [{:+.2%}, {:+.2%}]" if relative else "{:+.4f} [{:+.4f}, {:+.4f}]"
    interval = style.format(*result[:3]) if math.isfinite(result.mean) else "-"
    p_value = "<0.0001" if result.p_value < 1e-4 else f"{result.p_value:.4f}"
    word = "yes" if result.equivalent else "no"
    return [interval, p_value, word if runs.counts else f"{word} (counter-example)"]
