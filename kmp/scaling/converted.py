"""State from the file of an optimizer that held it in other dtypes, or in other variables."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp._backend.types import Tensor, Variable
from kmp._common import warn
from kmp._keras.optimizer import trainable_variables_of
from kmp.half_memory import (
    MASTER,
    REMAINDER,
    SCALES,
    SHORT_REMAINDER,
    Float32View,
    decoded,
    join,
    numbers_of,
)
from kmp.precision.trees import is_float

_EXACT = (REMAINDER, SHORT_REMAINDER, MASTER)  # each gives, with the weight, the weight's float32


_NUMBERED = re.compile(r"variable(_\d+)?")  # an unnamed variable, numbered across the process


def is_same_slot(stored: list[Any], live: list[Any]) -> bool:
    """Whether names and shapes agree; any two names that Keras numbered itself do."""
    numbered = [_NUMBERED.fullmatch(name) for name in (stored[0], live[0])]
    return stored[1:] == live[1:] and (stored[0] == live[0] or all(numbered))


@dataclasses.dataclass(frozen=True)
class Layout:
    """A description of the inner optimizer's variables, in a file or in a live optimizer.

    Attributes:
        slots: a list for each variable: its name, without that of the weight, then its shape.
        rows: the rows of the weights that the remainders and masters among the variables belong to;
            None if the file does not say.
        weights: the paths of the weights; None if the file does not say.
        owners: the row of the weight that each variable belongs to, None where it is the
            optimizer's own.
    """

    slots: list[list[Any]]
    rows: list[int] | None
    weights: list[str] | None = None
    owners: list[int | None] = dataclasses.field(default_factory=list)

    @property
    def exact(self) -> list[int]:
        """The places of remainders and masters."""
        return [i for i, (name, *_) in enumerate(self.slots) if name in _EXACT]

    @property
    def numbers(self) -> list[int]:
        """The places of the other variables, without scales: each scale follows its codes."""
        others = {*self.exact, *self._scales}
        return [i for i in range(len(self.slots)) if i not in others]

    @property
    def _scales(self) -> list[int]:
        names = [name for name, *_ in self.slots]
        pairs = enumerate(itertools.pairwise(names), start=1)
        return [i for i, (before, name) in pairs if name == before + SCALES]

    def has_scales(self, place: int) -> bool:
        """Whether the variable in a place holds codes, and the next one their scales."""
        return place + 1 in self._scales

    @functools.cached_property
    def by_weight(self) -> dict[str | None, dict[str, int]]:
        """The places of `numbers` by name, by the path of their weight."""
        assert self.weights is not None
        found: dict[str | None, dict[str, int]] = {path: {} for path in (None, *self.weights)}
        for place in self.numbers:
            owner = self.owners[place]
            path = None if owner is None else self.weights[owner]
            name = self.slots[place][0]
            while name in found[path]:  # each part of a MultiOptimizer has an iteration
                name += "'"
            found[path][name] = place
        return found

    def is_of_other_weights(self, other: "Layout") -> bool:
        """Whether some weights are those of `other`, with the same slots, and some are not.

        Where the places of all slots agree it is the same model, whatever its layers are called.
        """
        if self.weights is None or other.weights is None:
            return False
        pairs = zip(self._slots_of_numbers(), other._slots_of_numbers(), strict=False)
        sizes = [(len(x.numbers), len(x.weights or [])) for x in (self, other)]
        if sizes[0] == sizes[1] and all(is_same_slot(*pair) for pair in pairs):
            return False
        shared = self.shared_with(other)
        pairs_of_paths = [(None, None), *((theirs, ours) for ours, theirs in shared.items())]
        return bool(shared) and all(
            self._shapes(mine) == other._shapes(its) for mine, its in pairs_of_paths
        )

    def shared_with(self, live: "Layout") -> dict[str, str]:
        """The paths here of the weights of a live optimizer, by their paths there.

        A Sequential model that is loaded has weights without its name in their paths.
        """
        found: dict[str, str] = {}
        for path in live.weights or []:
            same = [x for x in self.weights or [] if x == path]
            same = same or [x for x in self.weights or [] if x.endswith(f"/{path}")]
            same = same or [x for x in self.weights or [] if f"/{path}".endswith(f"/{x}")]
            if len(same) == 1:
                found[path] = same[0]
        return found if len(set(found.values())) == len(found) else {}

    def _slots_of_numbers(self) -> list[list[Any]]:
        return [self.slots[i] for i in self.numbers]

    def _shapes(self, path: str | None) -> dict[str, list[int]]:
        return {name: self.slots[i][1:] for name, i in self.by_weight[path].items()}

    def places_for(self, live: "Layout") -> list[int | None]:
        """For each of the `numbers` of a live optimizer its place here; None if it has none."""
        if not self.is_of_other_weights(live):
            return list(self.numbers)
        shared = self.shared_with(live)
        pairs = [(None, None), *shared.items()]
        places = {
            place: self.by_weight[here][name]
            for there, here in pairs
            for name, place in live.by_weight[there].items()
        }
        return [places.get(i) for i in live.numbers]

    def holds_as(self, other: "Layout") -> bool:
        """Whether the variables of both hold the same things in the same way."""
        parts = [
            [(i, x.slots[i]) for i in (*x.exact, *x._scales)]  # names and shapes
            for x in (self, other)
        ]
        same_rows = None in (self.rows, other.rows) or self.rows == other.rows
        return parts[0] == parts[1] and same_rows


def layout_of(optimizer: Any) -> Layout:
    """The layout of a live optimizer, by `kmp.scaled`.

    A slot's name, such as "velocity", follows the path of its variable, which another instance of
    the same model may have numbered differently: the path is left out.
    """
    prefixes = {p.replace("/", "_") + "_": i for i, p in enumerate(optimizer.variable_paths)}
    inner = optimizer.inner_optimizer
    slots: list[list[Any]] = []
    owners: list[int | None] = []
    for variable in inner.variables:
        # One path may begin another: the longest is meant.
        found = [x for x in prefixes if variable.name.startswith(x)]
        prefix = max(found, key=len, default="")
        slots.append([variable.name.removeprefix(prefix), *map(int, variable.shape)])
        owners.append(prefixes.get(prefix))
    places = {id(v): i for i, v in enumerate(trainable_variables_of(inner))}
    views = optimizer.stored.weights if optimizer.stored else {}
    held = [views[id(v)].variable for v in inner.variables if id(v) in views]
    rows = [places[id(v)] for v in held]
    return Layout(slots, rows, list(optimizer.variable_paths), owners)


def load(optimizer: Any, stored: Layout, store: Mapping[str, Any]) -> None:
    """Assign what a file of another layout holds to the inner optimizer, and the weights' float32.

    If the file is of other weights, this is what it holds for those that it shares.

    Args:
        optimizer: the live one. Its weights have been loaded already.
        stored: the layout of the file.
        store: of the inner optimizer, whose variables are numbered.
    """
    inner = optimizer.inner_optimizer
    arrays = [to_numpy(store[str(i)]) for i in range(len(stored.slots))]
    places = stored.places_for(layout_of(optimizer))
    for place, target in zip(places, numbers_of(inner, optimizer.stored), strict=True):
        if place is None:
            continue
        parts = arrays[place : place + 1 + stored.has_scales(place)]
        _load_number([ops.convert_to_tensor(x) for x in parts], target)
    _load_weights(optimizer, stored, arrays)


def _load_number(parts: Sequence[Tensor], target: Any) -> None:
    """Assign what a file has of a slot, its values or codes and scales, to a variable or a view."""
    held = target.parts() if isinstance(target, Float32View) else [target]
    if len(parts) > 1 and [tuple(x.shape) for x in parts] == [tuple(v.shape) for v in held]:
        for variable, part in zip(held, parts, strict=True):  # encoding again would change them
            variable.assign(ops.cast(part, variable.dtype))
        return
    number = decoded(*parts) if len(parts) > 1 else parts[0]
    if isinstance(target, Float32View):
        target.restore(ops.cast(number, "float32"))
    else:
        target.assign(ops.cast(number, target.dtype))


def _load_weights(optimizer: Any, stored: Layout, arrays: Sequence[np.ndarray]) -> None:
    """Assign the float32 value of each weight, if the file has it or the optimizer keeps it now."""
    weights = trainable_variables_of(optimizer.inner_optimizer)
    views = optimizer.stored.weights.values() if optimizer.stored else ()
    targets = {id(view.variable): view for view in views}
    exact: dict[int, Tensor] = {}
    for row, place in zip(_rows(optimizer, stored), stored.exact, strict=False):
        if row is None:
            continue
        exact[id(weights[row])] = _exact(weights[row], ops.convert_to_tensor(arrays[place]))
    for weight in weights:
        value = exact.get(id(weight), ops.cast(weight, "float32"))
        if id(weight) in targets:
            targets[id(weight)].restore(value)
        elif id(weight) in exact and weight.dtype == "float32":
            weight.assign(value)


def _rows(optimizer: Any, stored: Layout) -> Sequence[int | None]:
    """The rows of the weights that remainders and masters in a file belong to.

    None for those of weights that the optimizer does not update.
    """
    if stored.rows is not None:
        live = layout_of(optimizer)
        if not stored.is_of_other_weights(live):
            return stored.rows
        shared = stored.shared_with(live)
        rows_of = {
            shared[path]: row for row, path in enumerate(live.weights or []) if path in shared
        }
        return [rows_of.get((stored.weights or [])[row]) for row in stored.rows]
    number, live_rows = len(stored.exact), layout_of(optimizer).rows or []
    for rows in (live_rows, list(range(len(optimizer.variable_paths)))):
        if len(rows) == number:
            return rows
    warn(
        f"The float32 masters of {optimizer.name!r} are not loaded, and the weights stay rounded: "
        "the file does not say which weights they belong to. Load it into a model with the dtypes "
        "that it was saved with, and then convert that with kmp.to_mixed_precision."
    )
    return []


def _exact(weight: Variable, rest: Tensor) -> Tensor:
    """float32, from a weight as it was loaded, and its remainder (integers) or its master."""
    rounded = ops.cast(weight, "float32")
    if not is_float(rest):
        return join(ops.cast(weight, "bfloat16"), rest)
    # Something else may have assigned the weight, but not yet its master: then the weight counts.
    halves = [ops.cast(ops.cast(rest, half), "float32") for half in ("bfloat16", "float16")]
    in_step = ops.logical_or(*(ops.equal(half, rounded) for half in halves))
    return ops.where(in_step, rest, rounded)


def to_numpy(value: Any) -> np.ndarray:
    """The numbers of a stored value: on torch, Keras reads bfloat16 into tensors on the GPU."""
    return keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else np.asarray(value)
