"""What of a model to compute again, so that a training step fits in the memory there is."""

import dataclasses
import itertools
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
from kmp._keras.blocks import (
    Pieces,
    chosen_pieces,
    other_pieces,
    policy_in,
    recompute_only,
    recomputed_in,
)
from kmp._keras.optimizer import (
    chooses_by_function,
    inner_optimizer_of,
    is_several,
    parts_of,
)
from kmp._keras.segments import Segment
from kmp._keras.training import build_for_training, check_compiled, notes_placements
from kmp.debug.memory import in_half, state_bytes
from kmp.half_memory import HalfMemory
from kmp.scaling import LossScaleOptimizer, scaled

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class PlannedStep(NamedTuple):
    """One training step that was compiled, and not run.

    Attributes:
        batch_size: int, samples in its batch.
        blocks: int, how many of the blocks are computed again; those of one path count as one.
        bytes: int, the most that it holds at once, by XLA: weights, slots, gradients, activations.
        operations: float, floating-point operations, divided by those of the step without
            recomputation.
        memory: str, the arguments of `kmp.scaled` with which it holds less; empty if the optimizer
            is as it was compiled.
    """

    batch_size: int
    blocks: int
    bytes: int
    operations: float
    memory: str = ""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What `memory_plan` found; it prints as a table.

    Attributes:
        budget: bytes.
        blocks: tuple of str, the paths of all blocks that could be computed again; for segments,
            the names with which they end.
        steps: tuple of `PlannedStep`, each step that was compiled; the last of them is the plan.
        advice: tuple of str, what else would make the step smaller, if it does not fit; what costs
            least comes first.
        call: str, the line with which the blocks, or segments, are computed again.

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
    call: str = ""

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
        """The paths of the blocks to compute again, for `kmp.recompute`; see `__str__`."""
        return self.blocks[: self.step.blocks]

    def __str__(self) -> str:
        """The steps, and the lines to write."""
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
        if any(step.memory for step in self.steps):
            header.append("kmp.scaled")
            for row, step in zip(rows, self.steps, strict=True):
                row.append(step.memory)
        verdict = "fits" if self.fits else "does not fit"
        lines = [table([header, *rows], left=0), f"It {verdict} in {self.budget / 1e9:.3g} GB."]
        if self.fits and self.step.memory:
            lines.append(f"model.compile(kmp.scaled(..., {self.step.memory}), ...)")
        if self.fits and self.paths:
            lines.append(self.call)
        return "\n".join([*lines, *self.advice])


def _call_of_recompute(in_segments: bool, policy: Any) -> str:
    chosen = "segments=plan.paths" if in_segments else "lambda layer, path: path in plan.paths"
    name = getattr(policy, "__name__", repr(policy))
    return f"kmp.recompute(model, {chosen}{'' if policy is None else f', policy={name}'})"


def memory_plan(
    model: keras.Model,
    x: Tree,
    y: Tree,
    budget: str | float,
    filter_fn: Callable[[Layer, str], bool] | None = None,
    device: Any = None,
    segments: int | Sequence[str] | None = None,
    policy: Any = None,
) -> MemoryPlan:
    """Choose how many blocks to compute again, so that a training step fits in a budget.

    XLA plans the memory of a whole step before it runs: weights, slots, gradients, activations and
    scratch space. The step is compiled with no block computed again, with the first, with the
    second as well, and with one of each other kind. Each further block saves nearly as much as one
    of its kind that was compiled, so the number of blocks that is needed is known; that step is
    compiled too, and its bytes are XLA's own count. Blocks are taken from the front, because the
    last are in memory anyway when the backward pass begins. A model without blocks is cut into
    segments, as in `kmp.recompute`, and so is a model whose blocks do not save enough. Segments
    save in proportion to what their layers put out.

    Computing again costs operations and changes no number. Only if it is not enough, the plan puts
    the slots of the optimizer in int8, or its slots and its remainders of bfloat16 weights. If
    nothing fits, the plan is the smallest step: where blocks are small, computing all of them again
    may take more memory than computing some.

    Nothing runs, and the model stays as it is. The JAX backend is needed, but no accelerator. For
    PyTorch and TensorFlow the order of the steps that it finds holds, but not their bytes.

    Args:
        model: built and compiled `keras.Model`.
        x: one batch, of arrays or `jax.ShapeDtypeStruct`s, of which only shapes and dtypes count.
        y: its targets, likewise; None if `fit` is given none.
        budget: bytes, or a number with a unit, such as "24 GB".
        filter_fn: which layers are blocks, as in `kmp.recompute`.
        device: what to compile for: "t4", "l4", "h100" or "v5e", none of which has to be here, or a
            `jax.Device`. The default device if left out, which must not be a CPU. NVIDIA's need
            the extra `h100`, a TPU the extra `tpu`.
        segments: how to cut the model, as in `kmp.recompute`.
        policy: what is kept inside all the same, as in `kmp.recompute`. With "dots_saveable" it
            costs hardly any operations, and saves less.

    Returns:
        `MemoryPlan`; print it.

    Raises:
        NotImplementedError: on TensorFlow and PyTorch, which cannot plan a step, and under Keras
            before 3.12, whose step cannot be compiled for a device that is not here.
        TypeError: if `model` is not a Keras model.
        ValueError: if it is not built or compiled, `budget` is not a number of bytes above 0,
            `device` is a CPU or unknown, JAX has no such `policy`, or a `keras.distribution` is
            set, since the plan is for one device.

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
    pieces = chosen_pieces(model, filter_fn, segments, "memory_plan")
    chosen = None if policy is None else backend.recompute_policy(policy)
    build_for_training(model, x, y)
    before, policy_before, optimizer = recomputed_in(model), policy_in(model), model.optimizer
    try:
        planner = _Planner(model, pieces, device, policy, chosen)
        planner.fit(x, y, budget)
        others = other_pieces(model, pieces) if filter_fn is None and segments is None else ()
        if planner.steps[-1].bytes > budget and others:
            model.optimizer = optimizer
            other = _Planner(model, others, device, policy, chosen, planner)
            other.fit(x, y, budget)
            planner = min(other, planner, key=lambda each: each.steps[-1].bytes)
        advice = planner.otherwise(x, y, budget)
    finally:
        model.optimizer = optimizer
        recompute_only(before, model, backend, policy_before)
    return MemoryPlan(budget, planner.names, tuple(planner.steps), advice, planner.call)


class _Planner:
    """Compiles steps of a model with more and fewer blocks computed again.

    Args:
        model: built for training.
        pieces: what may be computed again, in the order of the model.
        device: the device to compile for, or None.
        policy: of recomputation as the user wrote it, or None.
        chosen: the same as the backend takes it.
        first: one that has compiled the step without recomputation.
    """

    def __init__(
        self,
        model: keras.Model,
        pieces: Pieces,
        device: Any,
        policy: Any = None,
        chosen: Any = None,
        first: "_Planner | None" = None,
    ):
        groups = _by_name(pieces)
        self._model, self._groups, self._device = model, list(groups.values()), device
        self._policy = chosen
        self._memory = ""  # what the optimizer is given instead of what it was compiled with
        self._optimizer = model.optimizer  # with that
        self._savings: list[float] | None = None  # of each group
        # Of the step without recomputation.
        self._operations: float | None = first._operations if first else None
        self._whole: PlannedStep | None = first._whole if first else None
        self.steps: list[PlannedStep] = [self._whole] if self._whole else []
        self.call = _call_of_recompute(_are_segments(pieces), policy)
        self.names = tuple(groups)

    def fit(self, x: Tree, y: Tree, budget: int) -> None:
        """Compile until a step is within the budget; the last is that, or the smallest."""
        step = self._search(x, y, budget, 0)
        now = _state(self._model, _memory_of(self._model.optimizer))
        for words, memory in _ways(self._model):
            saved = now - _state(self._model, memory)
            if step.bytes > budget >= step.bytes - saved:
                self._take(words, memory)
                step = self._search(x, y, budget, saved)

    def otherwise(self, x: Tree, y: Tree, budget: int) -> tuple[str, ...]:
        """What else to do if the last step is not within the budget."""
        step = self.steps[-1]
        if step.bytes <= budget:
            return ()
        self._model.optimizer = self._optimizer
        states, ways = _smaller_state(self._model, step, budget), _ways(self._model)
        batch = self._smaller_batch(x, y, step, budget)
        if batch is None and not self._memory:
            self._take(*ways[-1])
            batch = self._smaller_batch(x, y, step, budget)
        return (batch or "No smaller batch fits, not even of a single sample.", *states)

    def _take(self, words: str, memory: HalfMemory) -> None:
        """Plan with another optimizer from now on."""
        self._memory, self._optimizer = words, _with_memory(self._model, memory)
        self._model.optimizer = self._optimizer

    def _search(self, x: Tree, y: Tree, budget: int, saved: int) -> PlannedStep:
        """Compile with more and more pieces until it fits; the smallest step if none does.

        Args:
            saved: what the optimizer as it is now saves of every step.
        """
        if self._whole is None:
            self._whole = self._with_first(0, x, y)
        number, excess = 0, self._whole.bytes - saved - budget
        plain = [each for each in self.steps if not each.memory]
        fit = [each.blocks for each in plain if each.bytes - saved <= budget]
        if excess <= 0 or not self._groups:
            excess = self._with_first(0, x, y).bytes - budget
        while excess > 0 and number < len(self._groups):
            number = self._enough(number, excess, self._savings_of_each(x, y))
            excess = self._with_first(number, x, y).bytes - budget
        if excess > 0 and fit:  # a number is known that fits, and the estimate missed it
            excess = self._with_first(min(fit), x, y).bytes - budget
        return self._smallest(x, y, budget) if excess > 0 else self.steps[-1]

    def _smallest(self, x: Tree, y: Tree, budget: int) -> PlannedStep:
        """The step of fewest bytes with this optimizer, or one that fits; it becomes the last.

        Where blocks are small beside what XLA adds to compute them again, more of them may take
        more. Then the gaps on both sides of the best number are halved until they are closed.
        """
        while True:
            steps = [each for each in self.steps if each.memory == self._memory]
            best = min(steps, key=lambda step: (step.bytes, step.blocks))
            below = [each.blocks for each in steps if each.blocks < best.blocks]
            above = [each.blocks for each in steps if each.blocks > best.blocks]
            gaps = [(max(below), best.blocks)] if below and above else []
            gaps += [(best.blocks, min(above))] if above else []
            start, stop = max(gaps, key=lambda gap: gap[1] - gap[0], default=(0, 0))
            if best.bytes <= budget or stop - start < 2:
                return self._with_first(best.blocks, x, y)
            self._with_first((start + stop) // 2, x, y)

    def _with_first(self, number: int, x: Tree, y: Tree) -> PlannedStep:
        """The step with the first `number` groups computed again, which is noted as the last."""
        for step in self.steps:
            if (step.blocks, step.memory) == (number, self._memory):
                self.steps.remove(step)
                self.steps.append(step)  # the last is the plan
                return step
        self.steps.append(self._compile(self._groups[:number], x, y))
        return self.steps[-1]

    def _compile(self, groups: Sequence[Pieces], x: Tree, y: Tree) -> PlannedStep:
        pieces: Any = list(itertools.chain(*groups))
        recompute_only(pieces, self._model, backend, self._policy)
        planned = backend.planned_step(self._model, x, y, self._device)
        assert planned is not None
        self._operations = self._operations or planned.operations
        share = planned.operations / self._operations
        return PlannedStep(_samples(x), len(groups), planned.bytes, share, self._memory)

    def _savings_of_each(self, x: Tree, y: Tree) -> list[float]:
        """The bytes that each group should save, judged by a compiled group that is like it.

        The first group has the input of the model, which is kept anyway. So the second is compiled
        too if it is like the first, and others of its kind save as much for their size.
        """
        if self._savings is None:
            assert self._whole is not None
            whole, one = self._whole.bytes, self._with_first(1, x, y).bytes
            kinds = [_kind_of(each) for each in self._groups]
            sizes = [_size_of(each) for each in self._groups]
            rates = {kinds[0]: max(whole - one, 0) / sizes[0]}
            if kinds[1:2] == kinds[:1]:
                rates[kinds[0]] = max(one - self._with_first(2, x, y).bytes, 0) / sizes[1]
            for group, kind, size in zip(self._groups, kinds, sizes, strict=True):
                if kind not in rates:
                    alone = self._compile([group], x, y).bytes
                    rates[kind] = max(whole - alone, 0) / size
            self._savings = [rates[kind] * size for kind, size in zip(kinds, sizes, strict=True)]
            self._savings[0] = max(whole - one, 0)
        return self._savings

    def _enough(self, number: int, excess: float, savings: Sequence[float]) -> int:
        """How many pieces should save `excess` bytes more than the first `number` do."""
        for i, saved in enumerate(savings[number:], number + 1):
            excess -= saved
            if excess <= 0:
                return i
        return len(savings)

    def _smaller_batch(self, x: Tree, y: Tree, step: PlannedStep, budget: int) -> str | None:
        """The largest half, quarter, ... of the batch that fits; None if none does.

        Several small batches are accumulated to the whole one again, for which the optimizer keeps
        a sum of gradients. `step` is the one with the whole batch. A sample takes nearly as many
        bytes in any batch, so few sizes need to be compiled.
        """
        sums = sum(v.value.nbytes for v in self._model.trainable_variables)
        whole, groups = step.bytes + sums, self._groups[: step.blocks]
        size = samples = _samples(x)
        a_sample = 0.0
        while size > 1:
            size //= 2
            if whole - a_sample * (samples - size) > budget and size > 1 and a_sample:
                continue
            other = _accumulating(self._optimizer, round(samples / size), self._model)
            try:
                self._model.optimizer = other
                found = self._compile(groups, *_first((x, y), size)).bytes
            except Exception as error:  # a loss, or an Input, that is written for one size
                return (
                    f"No smaller batch can be planned: with {size} samples the step raises "
                    f"{type(error).__name__}."
                )
            finally:
                self._model.optimizer = self._optimizer
            if found <= budget:
                calls = [f"kmp.scaled(..., {self._memory})"] if self._memory else []
                calls += [self.call] if groups else []
                also = f" with {' and '.join(calls)}" if calls else ""
                return (
                    f"A batch of {size} with {_accumulation_of(other)} fits{also}, at "
                    f"{_gigabytes(found)} by XLA. Except for batch statistics, the updates are "
                    "those of this batch."
                )
            a_sample = max((whole - found) / (samples - size), 0)
        return None


# What the optimizer may keep in less; what changes least comes first.
_SLOTS = 'slot_dtype="int8"'
_REMAINDERS = f"{_SLOTS}, master_weights=24"


def _ways(model: keras.Model) -> list[tuple[str, HalfMemory]]:
    """Arguments of `kmp.scaled` that make weights and slots of this dtype smaller."""
    memory = _memory_of(model.optimizer) or HalfMemory()
    found = [(_SLOTS, dataclasses.replace(memory, slot_dtype="int8"))]
    if memory.master_weights and any(v.dtype == "bfloat16" for v in model.trainable_variables):
        smallest = dataclasses.replace(memory, slot_dtype="int8", master_weights=24)
        found.append((_REMAINDERS, smallest))
    return found


def _memory_of(optimizer: Any) -> HalfMemory | None:
    return getattr(optimizer, "half_memory", None)


def _with_memory(model: keras.Model, memory: HalfMemory) -> LossScaleOptimizer:
    """The optimizer of a model as `kmp.scaled` makes it with these arguments, and built."""
    optimizer, arguments = model.optimizer, dataclasses.asdict(memory)
    if isinstance(optimizer, LossScaleOptimizer):
        other = type(optimizer).from_config({**optimizer.get_config(), **arguments})
    else:
        inner = inner_optimizer_of(optimizer)
        rule = "none" if inner is optimizer else "dynamic"
        other = scaled(type(inner).from_config(inner.get_config()), rule, **arguments)
    other.build(model.trainable_variables)
    return other


def _accumulating(optimizer: Any, times: int, model: keras.Model) -> Any:
    """An optimizer for a model like this one, which accumulates as many times more gradients."""
    other = type(optimizer).from_config(optimizer.get_config())
    for part in parts_of(other):
        part.gradient_accumulation_steps = times * (part.gradient_accumulation_steps or 1)
    other.build(model.trainable_variables)
    return other


def _accumulation_of(optimizer: Any) -> str:
    """What to write, so that an optimizer accumulates as this one does."""
    numbers = sorted({part.gradient_accumulation_steps for part in parts_of(optimizer)})
    where = " in its optimizers" if is_several(optimizer) else ""
    return f"gradient_accumulation_steps={' and '.join(map(str, numbers))}{where}"


def _state(model: keras.Model, memory: HalfMemory | None) -> int:
    """Bytes of weights and slots with their dtypes."""
    return state_bytes(model, lambda v: v.dtype, memory)


def _smaller_state(model: keras.Model, step: PlannedStep, budget: int) -> list[str]:
    """Lines that say how small a step would be with weights and slots in fewer bytes."""
    now, lines = _state(model, _memory_of(model.optimizer)), []
    small = HalfMemory(slot_dtype="int8", master_weights=24)
    ways = [(f"kmp.scaled(..., {words})", _state(model, memory)) for words, memory in _ways(model)]
    half = state_bytes(model, in_half(model), small)
    ways.append((f'The policy "bfloat16" and kmp.scaled(..., {_REMAINDERS})', half))
    for words, state in ways:
        left = step.bytes - (now - state)
        if left < step.bytes:
            verdict = "which fits" if left <= budget else "which is still too much"
            lines.append(f"{words}: about {_gigabytes(left)}, {verdict}.")
    return lines


def _are_segments(pieces: Pieces) -> bool:
    return any(isinstance(piece, Segment) for piece in pieces)


def _by_name(pieces: Pieces) -> dict[str, Pieces]:
    """The pieces that the printed line can only choose together, such as blocks of one path."""
    groups: dict[str, Any] = {}
    for piece in pieces:
        name = piece.last if isinstance(piece, Segment) else path_of(piece)
        groups.setdefault(name, []).append(piece)
    return groups


def _kind_of(group: Pieces) -> Any:
    """Equal for groups that save as much for their size."""
    if isinstance(group[0], Segment):
        return Segment
    return tuple((type(x), *((tuple(v.shape), v.dtype) for v in x.weights)) for x in group)


def _size_of(group: Pieces) -> int:
    """Of a segment, what it keeps for the gradient unless it is computed again."""
    return sum(x.saved for x in group if isinstance(x, Segment)) or 1


def _samples(x: Tree) -> int:
    return int(keras.tree.flatten(x)[0].shape[0])


def _first(data: Tree, size: int) -> Tree:
    """What stands for the first samples of arrays; of these only shapes and dtypes count."""

    def first(x: Any) -> keras.KerasTensor | None:
        if x is None:  # a model whose loss needs no targets
            return None
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
    if notes_placements(model):
        raise NotImplementedError(
            "memory_plan needs Keras 3.12 or newer: before, a step says where each variable lies, "
            "and cannot be compiled for a device that is not here. Received: Keras "
            f"{keras.__version__}. Plan where pip install 'keras>=3.12' has run; kmp.recompute "
            "then saves memory under any version."
        )
    if chooses_by_function(model.optimizer):
        raise ValueError(
            "memory_plan makes other optimizers like the model's from its config. Received: "
            f"{inner_optimizer_of(model.optimizer)!r}, whose parts a function chooses. Choose them "
            "by a keras.optimizers.OptimizerMap instead."
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
