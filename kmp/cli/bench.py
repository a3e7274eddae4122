"""What a precision costs and gains on a model: the command `bench`."""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence

import keras
import numpy as np

from kmp._backend.types import Tree
from kmp._common import table
from kmp.cli import architectures
from kmp.cli.costs import Spread, StepMemory, mebibytes, spread
from kmp.cli.options import BENCH_POLICIES, UsageError
from kmp.cli.runs import Run
from kmp.debug.stats import sqnr_of
from kmp.summaries import SummaryWriter


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """A model under one policy; see `bench`.

    Attributes:
        policy: str.
        step_ms: `Spread` of the milliseconds of a training step, over the rounds.
        speedup: `Spread` of float32's time over this policy's time in the same round.
        first_step_s: float, seconds of the first step: tracing, compilation, and the step itself.
        memory: the `bytes` that a training step holds at most, None if unknown, and the `source` of
            the number.
        output_sqnr: float, dB of the outputs against those of float32, before training.
        outputs_finite: bool, whether those outputs hold neither NaN nor an infinity.
        steps: int, how many were taken in all.
        skipped_steps: int, how many of them kmp skipped.
        final_loss: float, mean loss of the last round's steps.
    """

    policy: str
    step_ms: Spread
    speedup: Spread
    first_step_s: float
    memory: StepMemory
    output_sqnr: float
    outputs_finite: bool
    steps: int
    skipped_steps: int
    final_loss: float

    @property
    def finite(self) -> bool:
        """Whether the outputs before training and the final loss are finite."""
        return self.outputs_finite and math.isfinite(self.final_loss)


def bench(
    build: Callable[[], tuple],
    policies: Sequence[str] = BENCH_POLICIES,
    *,
    batch_size: int = 32,
    steps: int = 20,
    rounds: int = 10,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> list[BenchResult]:
    """Train the same model on the same batches under several policies, and measure.

    Each policy begins with the same weights. A round is one `fit` of `steps` steps under each
    policy, in an order that rotates, so that other load on the machine affects all of them alike.
    The first step and one round are not counted. The time of a step is that of the `fit`, from its
    start until the loss is on the host, divided by its steps; it includes feeding the data. The
    global random seeds are set to 0.

    Args:
        build: takes nothing and returns `(model, x, y)`: a built and compiled `keras.Model`, and
            arrays as `fit` takes them. It is called under the global policy float32, once for each
            policy; `kmp.to_mixed_precision` then converts, and kmp scales the loss under float16.
        policies: what `parse_policy` takes, float32 among them; the others are compared with it.
        batch_size: samples in a step.
        steps: steps in one round.
        rounds: rounds that are measured, at least two.
        progress: called with what begins now, the number of finished parts, and that of all parts.

    Returns:
        A `BenchResult` for each policy.

    Raises:
        UsageError: an argument is out of range, `build` returns something else, or the loss in
            float32 is not finite.

    Example:

    >>> def build():
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    ...     return model, np.ones((8, 4)), np.ones((8, 1))
    >>> full, half = bench(build, ["float32", "mixed_bfloat16"], steps=1, rounds=2)
    >>> full.output_sqnr, half.steps, half.skipped_steps
    (inf, 4, 0)
    """
    _check(policies, batch_size, steps, rounds)
    _train_something_else()
    total = len(policies) + rounds + 1
    prepared: dict[str, _Prepared] = {}
    data: Sequence[Tree] | None = None  # of the first call of `build`
    for policy in sorted(policies, key=lambda name: name != "float32"):  # a bad loss ends it early
        progress(f"{policy}: first step", len(prepared), total)
        prepared[policy] = _Prepared(build, policy, batch_size, steps, data)
        data = prepared[policy].run.data
    seconds: dict[str, list[float]] = {policy: [] for policy in policies}
    for i in range(rounds + 1):
        progress(f"round {i} of {rounds}" if i else "warming up", len(policies) + i, total)
        first = i % len(policies)
        for policy in [*policies[first:], *policies[:first]]:
            seconds[policy].append(prepared[policy].fit(steps) / steps)
    times = {policy: values[1:] for policy, values in seconds.items()}  # the first one warms up
    return [_result(prepared[policy], prepared["float32"], times) for policy in policies]


class _Prepared:
    """A run with its batches, and what its first step has shown.

    Args:
        build: as `bench` takes it.
        policy: one of those of `bench`.
        batch_size: samples in a step.
        steps: in a round.
        data: what to train on instead of what `build` returns now.
    """

    def __init__(
        self,
        build: Callable[[], tuple],
        policy: str,
        batch_size: int,
        steps: int,
        data: Sequence[Tree] | None,
    ):
        self.policy, self.batch_size = policy, batch_size
        self.run = Run(build, policy, seed=0)
        if data is not None:
            self.run.data = [*data]
        _check_data(self.run.data)
        self.x, self.y = (_repeated(tree, batch_size * steps) for tree in self.run.data)
        first = [_first(tree, batch_size) for tree in (self.x, self.y)]
        self.outputs = self.run.model.predict_on_batch(first[0])
        self.first_step_s = self.fit(1)
        self.memory = self.run.memory(*first)

    def fit(self, steps: int) -> float:
        """Take `steps` steps; return the seconds that they took."""
        x, y = (_first(tree, steps * self.batch_size) for tree in (self.x, self.y))
        seconds = sum(self.run.fit(x, y, self.batch_size))
        if self.policy == "float32" and not math.isfinite(self.run.loss):
            raise UsageError(_why_not_finite(self.run))
        return seconds


def _result(own: _Prepared, full: _Prepared, times: dict[str, list[float]]) -> BenchResult:
    return BenchResult(
        policy=own.policy,
        step_ms=spread([1e3 * x for x in times[own.policy]]),
        speedup=spread([a / b for a, b in zip(times["float32"], times[own.policy], strict=True)]),
        first_step_s=own.first_step_s,
        memory=own.memory,
        output_sqnr=sqnr_of(full.outputs, own.outputs),
        outputs_finite=_not_finite(own.outputs) == 0,
        steps=own.run.steps,
        skipped_steps=own.run.skipped_steps,
        final_loss=own.run.loss,
    )


def _why_not_finite(run: Run) -> str:
    """The message for a float32 loss that is not finite: the data, or the training?"""
    counts = {name: _not_finite(tree) for name, tree in zip("xy", run.data, strict=True)}
    bad = [f"{name} holds {count} numbers that are not finite" for name, count in counts.items()]
    bad = [text for text, count in zip(bad, counts.values(), strict=True) if count]
    advice = "x and y are finite: look at the loss and the learning rate"
    if bad:
        advice = f"{' and '.join(bad)}: clean the data"
    return (
        f"The loss in float32 must be finite. Received: {run.loss} after step {run.steps}, and "
        f"{advice}."
    )


def _not_finite(tree: Tree) -> int:
    """How many numbers of a structure are NaN or infinite."""
    arrays = [np.asarray(each) for each in keras.tree.flatten(tree)]
    numbers = [each for each in arrays if each.dtype.kind not in "OSU"]
    return sum(int((~np.isfinite(each.astype("float64"))).sum()) for each in numbers)


def _first(tree: Tree, number: int) -> Tree:
    """The first `number` samples."""
    return keras.tree.map_structure(lambda a: a[:number], tree)


def _repeated(tree: Tree, number: int) -> Tree:
    """The first `number` samples, beginning again where there are fewer."""
    return keras.tree.map_structure(
        lambda a: np.asarray(a)[np.arange(number) % len(a)],
        tree,
    )


def _train_something_else() -> None:
    """Train a tiny model, so that imports and small programs do not count for the first policy."""
    model = architectures.mlp(2, [2], 1)
    model.compile("adam", "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    model.predict_on_batch(np.ones((2, 2)))


def _check(policies: Sequence[str], batch_size: int, steps: int, rounds: int) -> None:
    if "float32" not in policies or len(set(policies)) < len(policies):
        raise UsageError(
            "`policies` must be different names, with float32 among them: the others are compared "
            f"with it. Received: policies={list(policies)}. Write for example "
            f"{list(BENCH_POLICIES)}."
        )
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("steps", steps, 1),
        ("rounds", rounds, 2),
    ):
        if not isinstance(value, int) or value < least:
            raise UsageError(
                f"`{name}` must be a whole number of at least {least}. Received: {name}={value!r}."
            )


def _check_data(data: Sequence[Tree]) -> None:
    advice = "Write return model, x, y with arrays as model.fit takes them."
    if len(data) != 2:
        raise UsageError(
            "The function that builds must return (model, x, y). Received: a tuple of "
            f"{1 + len(data)}. {advice}"
        )
    for name, tree in zip("xy", data, strict=True):
        for each in keras.tree.flatten(tree):
            shape = np.shape(each)
            if not shape or shape[0] == 0:
                raise UsageError(
                    f"`{name}` must hold arrays, of one sample or more. Received: "
                    f"{type(each).__name__} of shape {shape}. {advice}"
                )


def bench_table(results: Sequence[BenchResult]) -> str:
    """The table that `bench` prints, and below it what was not finite."""
    header = ["policy", "step ms [quartiles]", "speed [quartiles]", "first step s", "memory MiB"]
    header += ["SQNR dB", "skipped", "final loss"]
    rows = [
        [
            each.policy,
            "{:.3g} [{:.3g}, {:.3g}]".format(*each.step_ms),
            "{:.2f}x [{:.2f}, {:.2f}]".format(*each.speedup),
            f"{each.first_step_s:.2f}",
            mebibytes(each.memory),
            "-" if each.policy == "float32" else f"{each.output_sqnr:.1f}",
            f"{each.skipped_steps} of {each.steps}",
            f"{each.final_loss:.6g}",
        ]
        for each in results
    ]
    lines = [table([header, *rows]), f"Memory: {results[0].memory.source}."]
    for each in results:
        if not each.finite:
            what = "outputs before training" if not each.outputs_finite else "final loss"
            lines.append(
                f"NOT FINITE: {each.policy}, {what}. Its numbers are not those of a training that "
                "works; kmp.debug.locate_nonfinite(model, x, y) names the layer."
            )
    return "\n".join(lines)


def write_hparams(
    results: Sequence[BenchResult], log_dir: str, settings: dict[str, bool | float | str]
) -> None:
    """Write a run for each policy, so that TensorBoard's tab HParams compares them.

    Args:
        results: of `bench`.
        log_dir: path of a directory; each policy gets a directory in it.
        settings: names and values that describe the measurement, the same for each run.
    """
    for each in results:
        numbers = {
            "bench/step_ms": each.step_ms.median,
            "bench/speedup": each.speedup.median,
            "bench/first_step_s": each.first_step_s,
            "bench/skipped_steps": each.skipped_steps,
            "bench/final_loss": each.final_loss,
        }
        if each.policy != "float32":  # which the others are compared with
            numbers["bench/output_sqnr_db"] = each.output_sqnr
        if each.memory.bytes is not None:
            numbers["bench/memory_mib"] = each.memory.bytes / 2**20
        with SummaryWriter(os.path.join(log_dir, each.policy)) as writer:
            writer.hparams({"policy": each.policy, **settings})
            writer.scalars(numbers, step=each.steps)
