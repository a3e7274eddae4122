"""Which blocks of a model to compute again, so that a training step fits in the memory there is."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
from keras import Layer

from kmp._backend import backend
from kmp._backend.types import Tree
from kmp._common import is_number, table
from kmp._keras import check_model, path_of
from kmp._keras.blocks import blocks_of, chosen_by, recompute_only, recomputed_in
from kmp._keras.training import build_for_training, check_compiled
from kmp.debug.memory import bytes_of, state_bytes
from kmp.half_memory import HalfMemory

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class PlannedStep(NamedTuple):
    """One training step that was compiled, and not run.

    Attributes:
        batch_size: int, samples in its batch.
        blocks: int, how many of the blocks are computed again.
        bytes: int, the most that it holds at once, by XLA: weights, slots, gradients, activations.
        operations: float, floating-point operations over those of the step without recomputation.
    """

    batch_size: int
    blocks: int
    bytes: int
    operations: float


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What `memory_plan` found; it prints as a table.

    Attributes:
        budget: bytes.
        blocks: tuple of str, the paths of all blocks that could be computed again.
        steps: tuple of `PlannedStep`, each that was compiled; the last of them is the plan.
        advice: tuple of str, what else would make the step smaller, if it does not fit; what costs
            least comes first.

    Example:

    >>> step = PlannedStep(8, 1, 900, 1.2)
    >>> plan = MemoryPlan(1000, ("a", "b"), (PlannedStep(8, 0, 1500, 1.0), step), ())
    >>> plan.fits, plan.paths
    (True, ('a',))
    """

    budget: int
    blocks: tuple[str, ...]
    steps: tuple[PlannedStep, ...]
    advice: tuple[str, ...]

    @property
    def step(self) -> PlannedStep:
        """The step as planned."""
        return self.steps[-1]

    @property
    def fits(self) -> bool:
        """Whether the step as planned is within the budget."""
        return self.step.bytes <= self.budget

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the blocks to compute again, for `kmp.recompute`."""
        return self.blocks[: self.step.blocks]

    def __str__(self) -> str:
        header = ["batch", "computed again", "GB by XLA", "operations"]
        rows = [
            [
                str(step.batch_size),
                f"{step.blocks} of {len(self.blocks)}",
                f"{step.bytes / 1e9:.3g}",
                f"{step.operations:.2f}",
            ]
            for step in self.steps
        ]
        verdict = "fits" if self.fits else "does not fit"
        lines = [table([header, *rows], left=0), f"It {verdict} in {self.budget / 1e9:.3g} GB."]
        if self.fits and self.paths:
            lines.append("kmp.recompute(model, lambda layer, path: path in plan.paths)")
        return "\n".join([*lines, *self.advice])


def memory_plan(
    model: keras.Model,
    x: Tree,
    y: Tree,
    budget: str | float,
    filter_fn: Callable[[Layer, str], bool] | None = None,
    device: Any = None,
) -> MemoryPlan:
    """Choose how many blocks to compute again, so that a training step fits in a budget.

    XLA plans the memory of a whole step before it runs: weights, slots, gradients, activations and
    scratch space. The step is compiled with no block computed again, and with one of each kind.
    What that saves is nearly the same for each further block, so the number that is needed is
    known; that step is compiled too, and its number is XLA's own. Blocks are taken from the front:
    the last are in memory anyway when the backward pass begins.

    Nothing runs, and the model stays as it is. Needs the JAX backend, and no accelerator: what it
    finds holds for PyTorch and TensorFlow in its order, not in its bytes.

    Args:
        model: built and compiled `keras.Model`.
        x: one batch, of arrays or `jax.ShapeDtypeStruct`s, of which only shapes and dtypes count.
        y: its targets, likewise.
        budget: bytes, or a number with a unit, such as "24 GB".
        filter_fn: which layers are blocks, as in `kmp.recompute`.
        device: what to compile for: "t4", "l4", "h100" or "v5e", none of which has to be here, or a
            `jax.Device`. The default device if left out, which must not be a CPU. NVIDIA's need
            the extra `h100`, a TPU the extra `tpu`.

    Returns:
        `MemoryPlan`; print it.

    Raises:
        NotImplementedError: on TensorFlow and PyTorch, which cannot plan a step.
        TypeError: if `model` is no Keras model.
        ValueError: if it is not built or compiled, `budget` is no number of bytes above 0,
            `device` is a CPU or unknown, or a `keras.distribution` is set: the plan is for one
            device.

    Example:

    ```
    plan = kmp.debug.memory_plan(model, x[:32], y[:32], budget="24 GB", device="l4")
    print(plan)
    kmp.recompute(model, lambda layer, path: path in plan.paths)
    ```

    Source: XLA's buffer assignment, by `jax.stages.Compiled.memory_analysis`.
    """
    budget = _bytes_of(budget)
    _check(model, device)
    blocks = blocks_of(model) if filter_fn is None else chosen_by(filter_fn, model)
    build_for_training(model, x, y)
    planner = _Planner(model, blocks, device)
    before = recomputed_in(model)
    try:
        advice = planner.plan(x, y, budget)
    finally:
        recompute_only(before, model, backend)
    return MemoryPlan(budget, tuple(map(path_of, blocks)), tuple(planner.steps), advice)


class _Planner:
    """Compiles steps of a model with more and fewer blocks computed again.

    Args:
        model: built for training.
        blocks: those that may be computed again, in the order of the model.
        device: the device to compile for, or None.
    """

    def __init__(self, model: keras.Model, blocks: Sequence[Layer], device: Any):
        self.steps: list[PlannedStep] = []
        self._model, self._blocks, self._device = model, blocks, device
        self._operations: float | None = None  # of the first step, without recomputation

    def plan(self, x: Tree, y: Tree, budget: int) -> tuple[str, ...]:
        """Compile until a step is within the budget; if none is, return what else to do."""
        step = self._with_first(0, x, y)
        if step.bytes > budget and self._blocks:
            savings = self._savings(x, y, step.bytes)
            while step.bytes > budget and step.blocks < len(self._blocks):
                number = self._enough(step.blocks, step.bytes - budget, savings)
                step = self._with_first(number, x, y)
        if step.bytes <= budget:
            return ()
        return (
            self._smaller_batch(x, y, step.bytes, budget),
            *_smaller_state(self._model, step, budget),
        )

    def _with_first(self, number: int, x: Tree, y: Tree) -> PlannedStep:
        """The step with the first so many blocks computed again, which is noted."""
        done = [step for step in self.steps if step.blocks == number]
        if not done:
            self.steps.append(self._compile(self._blocks[:number], x, y))
        return done[0] if done else self.steps[-1]

    def _compile(self, blocks: Sequence[Layer], x: Tree, y: Tree) -> PlannedStep:
        recompute_only(blocks, self._model, backend)
        planned = backend.planned_step(self._model, x, y, self._device)
        assert planned is not None
        self._operations = self._operations or planned.operations
        share = planned.operations / self._operations
        return PlannedStep(_samples(x), len(blocks), planned.bytes, share)

    def _savings(self, x: Tree, y: Tree, whole: int) -> dict[Any, int]:
        """The bytes that one block of each kind saves."""
        savings: dict[Any, int] = {}
        for i, block in enumerate(self._blocks):
            kind = _kind_of(block)
            if kind not in savings:
                step = self._compile([block], x, y) if i else self._with_first(1, x, y)
                savings[kind] = max(whole - step.bytes, 0)
        return savings

    def _enough(self, number: int, excess: int, savings: dict[Any, int]) -> int:
        """How many blocks should save `excess` bytes more than the first `number` do."""
        for i, block in enumerate(self._blocks[number:], number + 1):
            excess -= savings[_kind_of(block)]
            if excess <= 0:
                return i
        return len(self._blocks)

    def _smaller_batch(self, x: Tree, y: Tree, whole: int, budget: int) -> str:
        """The largest half, quarter, ... of the batch that fits.

        `whole` are the bytes with all of it. A sample takes nearly as many in any batch, so that
        few sizes need to be compiled.
        """
        size = samples = _samples(x)
        a_sample = 0.0
        while size > 1:
            size //= 2
            if whole - a_sample * (samples - size) > budget and size > 1 and a_sample:
                continue
            found = self._compile(self._blocks, *_first((x, y), size)).bytes
            if found <= budget:
                return (
                    f"A batch of {size} fits, at {_gigabytes(found)} by XLA: with as many more "
                    "gradient_accumulation_steps, which keep a copy of the gradients, the updates "
                    "are those of this batch."
                )
            a_sample = (whole - found) / (samples - size)
        return "No smaller batch fits, not even of a single sample."


def _smaller_state(model: keras.Model, step: PlannedStep, budget: int) -> list[str]:
    """What weights and slots in fewer bytes would save of a step."""
    now = sum(bytes_of(v.shape, v.dtype) for v in model.variables + model.optimizer.variables)
    lines = []
    for way, dtype, memory in _WAYS:
        saved = now - state_bytes(model, dtype, memory)
        if saved > 0:
            left = step.bytes - saved
            verdict = "which fits" if left <= budget else "which is still too much"
            lines.append(f"{way}: about {_gigabytes(left)}, {verdict}.")
    return lines


_WAYS = (
    ('kmp.scaled(..., slot_dtype="int8")', "float32", HalfMemory(slot_dtype="int8")),
    (
        'The policy "bfloat16" and kmp.scaled(..., slot_dtype="int8", master_weights=24)',
        "bfloat16",
        HalfMemory(slot_dtype="int8", master_weights=24),
    ),
)


def _kind_of(block: Layer) -> Any:
    """Equal for blocks that save as much."""
    return type(block), tuple((tuple(v.shape), v.dtype) for v in block.weights)


def _samples(x: Tree) -> int:
    return int(keras.tree.flatten(x)[0].shape[0])


def _first(data: Tree, size: int) -> Tree:
    """What stands for the first samples of arrays; of these only shapes and dtypes count."""

    def first(x: Any) -> keras.KerasTensor:
        return keras.KerasTensor((size, *x.shape[1:]), keras.backend.standardize_dtype(x.dtype))

    return keras.tree.map_structure(first, data)


def _gigabytes(number: int) -> str:
    return f"{number / 1e9:.3g} GB"


def _bytes_of(budget: Any) -> int:
    """The bytes of a budget such as 8e9 or "24 GB"."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]i?B)\s*", str(budget))
    number = budget if is_number(budget) else None
    if match and match[2] in _UNITS and match[1].count(".") <= 1 and match[1] != ".":
        number = float(match[1]) * _UNITS[match[2]]
    if number is None or not 0 < number < math.inf:
        raise ValueError(
            "`budget` of memory_plan must be a number of bytes above 0, or one with a unit. "
            f'Received: budget={budget!r}. Write budget="24 GB", for example.'
        )
    return int(number)


def _check(model: Any, device: Any) -> None:
    check_compiled(model, "memory_plan")
    check_model(model, "memory_plan")
    if keras.backend.backend() != "jax":
        raise NotImplementedError(
            "memory_plan needs the JAX backend: no other compiles a whole step before it runs. "
            f"Received: the {keras.backend.backend()} backend. Set KERAS_BACKEND=jax for the "
            "plan; kmp.recompute then saves memory on any backend."
        )
    if device not in (None, *backend.planned_devices) and not hasattr(device, "platform"):
        names = ", ".join(map(repr, backend.planned_devices))
        raise ValueError(
            f"`device` of memory_plan must be one of {names}, or a jax.Device. Received: "
            f"device={device!r}."
        )
    target = backend.platform() if device is None else getattr(device, "platform", device)
    if target == "cpu":
        raise ValueError(
            "memory_plan must be told a `device`: XLA's compiler for CPUs undoes recomputation. "
            f'Received: device={device!r}. Write device="h100", for example, for which '
            "pip install 'kmp[jax,h100]' brings the compiler, and no GPU is needed."
        )
    if keras.distribution.distribution() is not None:
        raise ValueError(
            "memory_plan plans for one device. Received: a model while keras.distribution has "
            f"{keras.distribution.distribution()!r}. Write "
            "keras.distribution.set_distribution(None) first, and build the model again."
        )
