"""What a precision costs and gains on a model: `python -m kmp bench`."""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from kmp import _backend
from kmp._backend.types import Tree
from kmp._common import table
from kmp.cli import architectures as _architectures
from kmp.cli.building import build_under
from kmp.cli.costs import Spread, StepMemory, mebibytes, skipped_steps, spread, step_memory
from kmp.debug.stats import sqnr_of
from kmp.summaries import SummaryWriter

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """A model under one policy; see `bench`.

    Attributes:
        policy: str.
        step_ms: `Spread` of the milliseconds of a training step, over the rounds.
        speedup: `Spread` of float32's time over this one's in the same round.
        first_step_s: float, seconds of the first step: tracing, compilation, and the step itself.
        memory: the `bytes` that a training step holds at most, None where nobody knows, and the
            `source` that says so.
        output_sqnr: float, dB of the outputs against those of float32, before training.
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
    steps: int
    skipped_steps: int
    final_loss: float


def bench(
    build: Callable[[], tuple],
    policies: Sequence[str] = POLICIES,
    *,
    batch_size: int = 32,
    steps: int = 20,
    rounds: int = 10,
    say: Callable[[str], None] = lambda text: None,
) -> list[BenchResult]:
    """Train the same model on the same batches under several policies, and measure.

    Each policy begins with the same weights. A round is one `fit` of `steps` steps under each
    policy, in an order that rotates, so that what else the machine does meets all of them; `fit`
    returns when the loss is on the host. The first step and one round are not counted. A step's
    time is that of the whole `fit` divided by its steps, feeding the data included. The global
    random seeds are set to 0.

    Args:
        build: takes nothing and returns `(model, x, y)`: a built and compiled `keras.Model`, and
            arrays as `fit` takes them. It is called under the global policy float32, once for each
            policy; `kmp.to_mixed_precision` then converts, and kmp scales the loss under float16.
        policies: what `kmp.get_policy` takes; float32, which the others are compared with, comes
            first.
        batch_size: samples in a step.
        steps: in one round.
        rounds: to take the median of, at least two.
        say: called with a line about what is being done.

    Returns:
        A `BenchResult` for each policy.

    Raises:
        ValueError: an argument is out of range, or `build` returns something else.

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
    runs = {policy: _Run(build, policy, batch_size, steps, say) for policy in policies}
    full = runs["float32"]
    times: dict[str, list[float]] = {policy: [] for policy in policies}
    for i in range(-1, rounds):  # the first one warms up
        say(f"round {i + 1} of {rounds}" if i >= 0 else "warming up")
        order = list(policies[i % len(policies) :]) + list(policies[: i % len(policies)])
        for policy in order:
            seconds = runs[policy].fit(steps)
            if i >= 0:
                times[policy].append(seconds / steps)
    return [
        BenchResult(
            policy=policy,
            step_ms=spread([1e3 * x for x in times[policy]]),
            speedup=spread([a / b for a, b in zip(times["float32"], times[policy], strict=True)]),
            first_step_s=run.first_step_s,
            memory=run.memory,
            output_sqnr=sqnr_of(full.outputs, run.outputs),
            steps=1 + (1 + rounds) * steps,
            skipped_steps=skipped_steps(run.model),
            final_loss=run.loss,
        )
        for policy, run in runs.items()
    ]


class _Run:
    """A model under a policy, its batches, and what its first step has shown."""

    def __init__(
        self,
        build: Callable[[], tuple],
        policy: str,
        batch_size: int,
        steps: int,
        say: Callable[[str], None],
    ):
        say(f"{policy}: building")
        before = _backend.device_memory()
        self.model, x, y = _model_and_data(build, policy)
        self.batch_size = batch_size
        self.x, self.y = (_repeated(tree, batch_size * steps) for tree in (x, y))
        first = _repeated(x, batch_size)
        self.outputs = self.model.predict_on_batch(first)
        say(f"{policy}: first step")
        start = time.perf_counter()
        self.fit(1)
        self.first_step_s = time.perf_counter() - start
        say(f"{policy}: memory")
        self.memory = step_memory(self.model, first, _repeated(y, batch_size), before)

    def fit(self, steps: int) -> float:
        """Take so many steps; the seconds until the loss is here."""
        number = steps * self.batch_size
        x, y = (keras.tree.map_structure(lambda a: a[:number], t) for t in (self.x, self.y))
        start = time.perf_counter()
        history = self.model.fit(x, y, batch_size=self.batch_size, shuffle=False, verbose=0)
        self.loss = float(history.history["loss"][-1])
        return time.perf_counter() - start


def _model_and_data(build: Callable[[], tuple], policy: str) -> tuple[Any, Tree, Tree]:
    built = build_under(build, policy, seed=0)
    if len(built) != 3:
        raise ValueError(
            "The function that builds must return (model, x, y). Received: a tuple of "
            f"{len(built)}. Write return model, x, y with arrays as model.fit takes them."
        )
    return built


def _repeated(tree: Tree, number: int) -> Tree:
    """The first `number` samples, beginning again where there are fewer."""
    return keras.tree.map_structure(
        lambda a: np.asarray(a)[np.arange(number) % len(a)],
        tree,
    )


def _train_something_else() -> None:
    """Let the imports and small programs that come with any first step not count for anyone's."""
    model = _architectures.mlp(2, [2], 1)
    model.compile("adam", "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    model.predict_on_batch(np.ones((2, 2)))


def _check(policies: Sequence[str], batch_size: int, steps: int, rounds: int) -> None:
    if "float32" not in policies or len(set(policies)) < len(policies):
        raise ValueError(
            "`policies` must be different names, float32 among them, which the others are compared "
            f"with. Received: policies={list(policies)}. Write for example {list(POLICIES)}."
        )
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("steps", steps, 1),
        ("rounds", rounds, 2),
    ):
        if not isinstance(value, int) or value < least:
            raise ValueError(
                f"`{name}` must be a whole number of at least {least}. Received: {name}={value!r}."
            )


def bench_table(results: Sequence[BenchResult]) -> str:
    """What `python -m kmp bench` prints of the results."""
    header = ["policy", "step ms [quartiles]", "speed [quartiles]", "first step s", "memory MiB"]
    rows = [[*header, "SQNR dB", "skipped", "final loss"]]
    for each in results:
        rows.append(
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
        )
    return f"{table(rows)}\nMemory: {results[0].memory.source}."


def write_hparams(
    results: Sequence[BenchResult], log_dir: str, settings: dict[str, bool | float | str]
) -> None:
    """Write a run for each policy, whose settings and numbers TensorBoard's tab HParams compares.

    Args:
        results: of `bench`.
        log_dir: path of a directory; each policy has a directory of its own in it.
        settings: what was measured, and where.
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
