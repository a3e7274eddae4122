"""Whether half precision trains as well as float32: `python -m kmp certify`."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras

from kmp import _backend
from kmp._common import table
from kmp.cli.building import build_under
from kmp.cli.costs import Spread, StepMemory, mebibytes, skipped_steps, spread, step_memory
from kmp.cli.equivalence import Equivalence, equivalence
from kmp.cli.tasks import Task
from kmp.precision.policy import get_policy

POLICIES = ("mixed_float16", "mixed_bfloat16", "float16")

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
        speedup: `Spread` of float32's time over this one's, seed by seed.
        memory: the `bytes` that a training step holds at most, None where nobody knows, and the
            `source` that says so.
        steps: int, taken in all runs together.
        skipped_steps: int, how many of them kmp skipped.
        result: `Equivalence` to float32; None for float32 itself.
        counts: bool, whether kmp vouches for the policy. It does not for one that keeps its
            parameters in half precision, which is shown as a counter-example.
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
        """Whether all policies that count are equivalent to float32."""
        return all(each.result.equivalent for each in self.runs if each.counts and each.result)

    @property
    def cells(self) -> list[list[str]]:
        """The rows of a table, its header first."""
        rows = [[*_HEADER]]
        for each in self.runs:
            rows.append(
                [
                    each.policy,
                    _mean_and_deviation(each.metrics),
                    *_verdict(each, self.task.relative),
                    f"{each.step_ms.median:.3g}",
                    "{:.2f}x [{:.2f}, {:.2f}]".format(*each.speedup),
                    mebibytes(each.memory),
                    f"{each.skipped_steps} of {each.steps}",
                ]
            )
        return rows

    @property
    def title(self) -> str:
        """What was trained, how often, and what equal means."""
        task = self.task
        return (
            f"{task.name}: {task.metric}, {task.seeds} seeds, margin {task.stated_margin}, "
            f"{task.epochs} epochs in batches of {task.batch_size}"
        )

    def __str__(self) -> str:
        memory = f"Memory: {self.runs[0].memory.source}."
        return "\n".join([self.title, table(self.cells), memory])


def certify(
    task: Task,
    policies: Sequence[str] = POLICIES,
    say: Callable[[str], None] = lambda text: None,
) -> Certificate:
    """Train a task in float32 and under other policies from the same seeds, and compare.

    For each seed all policies begin with the same weights and see the same batches, in the same
    order, so that the difference of their metrics is due to the policy, and to what rounding does
    to a trajectory. Two one-sided tests then decide whether it is zero up to the task's margin. The
    policies take turns within a seed; the first epoch, which compiles, is not timed if there are
    more. The global random seeds are set.

    On TensorFlow a compiled step draws other dropout masks in another dtype, as seen in 2.21: the
    differences are then those of two runs with other masks, and need more seeds.

    Args:
        task: a `kmp.cli.certify.Task`. Its function is called under the global policy float32, and
            `kmp.to_mixed_precision` converts; for a policy with half parameters, under that one.
        policies: what `kmp.get_policy` takes. Those with float32 parameters count; any other is
            trained as Keras does it, without loss scaling, as a counter-example.
        say: called with a line about what is being done.

    Returns:
        A `Certificate`; print it.

    Raises:
        ValueError: the task's function returns something else than (model, train, test), or its
            metric is not among those that the model evaluates.

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
    names = ["float32", *policies]
    runs: list[list[_Run]] = [[] for _ in names]
    for seed in range(task.seeds):
        for i in range(len(names)):
            i = (i + seed) % len(names)  # each policy comes first in turn
            say(f"{task.name}: seed {seed + 1} of {task.seeds}, {names[i]}")
            runs[i].append(_Run(task, names[i], seed))
    full = runs[0]
    results = []
    for name, own in zip(names, runs, strict=True):
        differences = [
            _difference(a.metric, b.metric, task.relative) for a, b in zip(own, full, strict=True)
        ]
        results.append(
            PolicyRuns(
                policy=name,
                metrics=tuple(run.metric for run in own),
                step_ms=spread([run.step_ms for run in own]),
                speedup=spread([b.step_ms / a.step_ms for a, b in zip(own, full, strict=True)]),
                memory=own[0].memory,
                steps=sum(run.steps for run in own),
                skipped_steps=sum(run.skipped_steps for run in own),
                result=None if own is full else equivalence(differences, task.margin),
                counts=get_policy(name).param_dtype == "float32",
            )
        )
    return Certificate(task, tuple(results))


class _Run:
    """One training, and what came of it."""

    def __init__(self, task: Task, policy: str, seed: int):
        before = _backend.device_memory() if seed == 0 else None
        built = build_under(lambda: task.build(seed), policy, seed)
        if len(built) != 3 or not all(isinstance(x, tuple) and len(x) == 2 for x in built[1:]):
            raise ValueError(
                "The function that builds must return (model, (x, y), (x_test, y_test)). Received: "
                f"a tuple of {len(built)}. Write return model, (x, y), (x_test, y_test) with "
                "arrays as model.fit takes them."
            )
        model, (x, y), test = built
        clock = _Clock()
        keras.utils.set_random_seed(seed)  # of the order of the batches
        model.fit(
            x, y, batch_size=task.batch_size, epochs=task.epochs, verbose=0, callbacks=[clock]
        )
        metrics = model.evaluate(*test, batch_size=256, verbose=0, return_dict=True)
        if task.metric not in metrics:
            raise ValueError(
                f"`metric` must be one of those that the model evaluates: {sorted(metrics)}. "
                f"Received: metric={task.metric!r}."
            )
        samples = len(keras.tree.flatten(x)[0])
        steps = -(-samples // task.batch_size)
        self.metric = float(metrics[task.metric])
        self.steps = steps * task.epochs
        self.step_ms = 1e3 * statistics.median(clock.seconds[1:] or clock.seconds) / steps
        self.skipped_steps = skipped_steps(model)
        if seed == 0:
            x, y = (keras.tree.map_structure(lambda a: a[: task.batch_size], t) for t in (x, y))
            self.memory = step_memory(model, x, y, before)


class _Clock(keras.callbacks.Callback):
    """Seconds of each epoch; at its end Keras has the loss on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self.start)


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
    """Cells: the difference with its interval, p, and whether that is equivalent."""
    result = runs.result
    if result is None:
        return ["", "", ""]
    style = "{:+.2%} [{:+.2%}, {:+.2%}]" if relative else "{:+.4f} [{:+.4f}, {:+.4f}]"
    interval = style.format(*result[:3]) if math.isfinite(result.mean) else "-"
    p_value = "<0.0001" if result.p_value < 1e-4 else f"{result.p_value:.4f}"
    word = "yes" if result.equivalent else "no"
    return [interval, p_value, word if runs.counts else f"{word} (counter-example)"]
