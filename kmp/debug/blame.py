"""From what a replay recorded to the one place to blame: the first in the order of execution."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kmp._backend import backend
from kmp._backend.types import Gradient, Variable
from kmp._keras.calls import Call
from kmp.debug.replay import Loss
from kmp.debug.stats import TensorStats, floats, has_nonfinite, measure, tensor_stats


@dataclasses.dataclass(frozen=True, eq=False)
class Blame:
    """Who, and in which part of it.

    Attributes:
        phase: "forward", "loss" or "backward".
        call: the call that is to blame; None for the batch, the loss and what no layer owns.
        part: "data", "cast", "layer", "code", "loss", "weights", "model", "add_loss" or
            "regularizer".
        after: the child after which its own code went wrong, in the order of execution.
        before: the child before which it did.
        inputs: what came in, in the direction of the pass.
        outputs: what came out.
        variables: paths of the variables whose gradients are not finite.
        place: the call at which the gradient was seen that is not finite.
        role: whether at its "input" or "output".
        owner: path of the layer that a term of the loss belongs to.
        scaled: whether the loss is finite, and is not when it is multiplied by the loss scale.
    """

    phase: str
    call: Call | None
    part: str
    after: Call | None = None
    before: Call | None = None
    inputs: tuple[TensorStats, ...] = ()
    outputs: tuple[TensorStats, ...] = ()
    variables: tuple[str, ...] = ()
    place: Call | None = None
    role: str = ""
    owner: str = ""
    scaled: bool = False


def first_bad_value(calls: Sequence[Call]) -> Blame | None:
    """The first place of a forward pass whose numbers are not finite.

    Numbers that later layers, or the loss, turn into finite ones are intended: a mask of -inf
    before a softmax. A batch that is not finite itself is to blame, unless a call turned finite
    numbers into others.
    """
    values = _Values(calls)
    data = None
    events = [(call.span[0], call, "input") for call in calls]
    events += [(call.span[1], call, "output") for call in calls]
    for time, call, role in sorted(events, key=lambda event: event[0]):
        if not values.is_bad(call) or values.is_answered(call):
            continue
        blame = _blame_at(values, time, call, role)
        if blame is None:
            continue
        if blame.part == "data":
            data = blame
        elif data is None or not has_nonfinite(values.of(blame.call.passed)):
            return _moved_to_loss(blame)
    return data


def first_nan_weights(calls: Sequence[Call]) -> Blame | None:
    """The first call that turns finite numbers into inf or NaN, and has NaN in its weights.

    Nobody intends that, whatever later layers make of it: on TensorFlow, max pooling turns NaN into
    the lowest number of the dtype; on torch, fused attention turns it into 0, and only gradients
    are NaN.
    """
    for call in sorted(calls, key=lambda call: call.span[1]):
        inputs, outputs = measure(call.received), measure(call.outputs)
        if not has_nonfinite(outputs) or has_nonfinite(inputs):
            continue
        if any(stats.nans for stats in measure(getattr(call.layer, "variables", []))):
            return Blame("forward", call, "layer", inputs=inputs, outputs=outputs)
    return None


def _blame_at(values: "_Values", time: int, call: Call, role: str) -> Any:
    """Who made the numbers at one end of a call inf or NaN; None if only the other end shows it."""
    outputs = values.of(call.outputs)
    if role == "output":
        last = _finished_before(call, time)
        if last is not None:
            return Blame("forward", call, "code", last, None, values.of(last.outputs), outputs)
        if isinstance(call.layer, Loss):
            return None
        return Blame("forward", call, "layer", inputs=values.of(call.received), outputs=outputs)
    passed, received = values.of(_given(call)), values.of(call.received)
    if has_nonfinite(passed) and call.parent is None:
        return Blame("forward", None, "data", outputs=passed)
    if has_nonfinite(passed):
        parent: Any = call.parent
        last = _finished_before(parent, time)
        inputs = values.of(last.outputs if last else parent.received)
        return Blame("forward", parent, "code", last, call, inputs, passed)
    if has_nonfinite(received) and not isinstance(call.layer, Loss):
        return Blame("forward", call, "cast", inputs=passed, outputs=received)
    return None


def _given(call: Call) -> Any:
    """What the caller passed; for the loss only the targets and their weights, not the outputs."""
    if not isinstance(call.layer, Loss):
        return call.passed
    (_, y, _, sample_weight), _ = call.passed
    return y, sample_weight


def maker_of(calls: Sequence[Call], outputs: Any) -> Call | None:
    """The first call that returned any of the outputs; those around it only hand it on."""
    wanted = {id(x) for x in floats(outputs)}
    made = [
        call
        for call in calls
        if not is_in_loss(call) and wanted.intersection(map(id, floats(call.outputs)))
    ]
    return min(made, key=lambda call: call.span[1], default=None)


def is_in_loss(call: Call) -> bool:
    """Whether a call is that of the loss, or one that the loss makes."""
    while call.parent is not None:
        call = call.parent
    return isinstance(call.layer, Loss)


def _moved_to_loss(blame: Blame) -> Blame:
    """A place in the code of `compute_loss` belongs to the loss, and to no layer."""
    if blame.call is None or not isinstance(blame.call.layer, Loss):
        return blame
    phase = "loss" if blame.phase == "forward" else blame.phase
    return dataclasses.replace(blame, phase=phase, call=None, part="loss")


class _Values:
    """The statistics of what a forward pass computed, each structure measured once."""

    def __init__(self, calls: Sequence[Call]):
        self._stats: dict[int, tuple[Any, tuple[TensorStats, ...]]] = {}
        self._answered: dict[int, bool] = {}
        self._users: dict[int, list[Call]] = {}
        for call in calls:
            for tensor in floats(call.passed):
                self._users.setdefault(id(tensor), []).append(call)

    def of(self, tree: Any) -> tuple[TensorStats, ...]:
        """The statistics of the floats in a structure."""
        if id(tree) not in self._stats:
            self._stats[id(tree)] = (tree, measure(tree))  # kept, so that its id stays its own
        return self._stats[id(tree)][1]

    def is_bad(self, call: Call) -> bool:
        """Whether any output of the call is not finite."""
        return has_nonfinite(self.of(call.outputs))

    def is_answered(self, call: Call) -> bool:
        """Whether every layer that takes these outputs as they are leads to finite numbers."""
        if id(call) not in self._answered:
            takers = [u for x in floats(call.outputs) for u in self._users.get(id(x), [])]
            later = [u for u in takers if u.span[0] > call.span[1]]  # not itself, not its children
            self._answered[id(call)] = bool(later) and all(
                not self.is_bad(u) or self.is_answered(u) for u in later
            )
        return self._answered[id(call)]


def _finished_before(parent: Call, time: int) -> Call | None:
    """The child of `parent` that ended last before `time`."""
    ended = [child for child in parent.children if child.span[1] <= time]
    return max(ended, key=lambda child: child.span[1], default=None)


@dataclasses.dataclass
class Cotangents:
    """The gradients that a backward pass left at the watched places.

    Attributes:
        seen: (time in the forward pass, call, "input" or "output", statistics).
    """

    seen: list[tuple[int, Call, str, TensorStats]] = dataclasses.field(default_factory=list)

    def record(self, time: int, call: Call, role: str, gradient: Any) -> None:
        """Note a gradient."""
        self.seen.append((time, call, role, tensor_stats(gradient)))

    def at(self, call: Call, role: str) -> tuple[TensorStats, ...]:
        """What was seen at the call that stands in the place of `call`."""
        return tuple(s for _, c, r, s in self.seen if c.key == call.key and r == role)

    def first_bad(
        self, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> Blame | None:
        """The bad place that comes last in the forward pass, and so first in the backward pass.

        Returns:
            A `Blame`, or None if the gradients at all places and of all variables are finite.
        """
        bad = nonfinite_variables(gradients, variables)
        last = max((e for e in self.seen if e[3].nonfinite), key=lambda e: e[0], default=None)
        owner = self._owner_after(last[0] if last else 0, bad)
        if owner is not None and (last is None or owner.key != last[1].key):
            own = {id(v) for v in owner.layer.trainable_variables}
            paths = tuple(v.path for v in bad if id(v) in own)
            inputs = self.at(owner, "output")
            return Blame("backward", owner, "weights", inputs=inputs, variables=paths)
        paths = tuple(v.path for v in bad)
        if last is None:  # a variable outside of any layer's call
            return Blame("backward", None, "weights", variables=paths) if paths else None
        return _moved_to_loss(self._blame_at(last[1], last[2], paths))

    def _blame_at(self, call: Call, role: str, paths: tuple[str, ...]) -> Blame:
        outputs = self.at(call, role)
        if role == "output" and call.parent is not None:
            return self._code_after(call, outputs, paths)
        if role == "output":  # of the model
            return Blame("backward", None, "loss", None, None, (), outputs, paths, call, role)
        begun = [c for c in call.children if self.at(c, "input")]
        if begun:  # its own code before its first child
            first = begun[0]
            inputs = self.at(first, "input")
            return Blame("backward", call, "code", None, first, inputs, outputs, paths, call, role)
        inputs = self.at(call, "output")
        return Blame("backward", call, "layer", None, None, inputs, outputs, paths, call, role)

    def _code_after(self, call: Call, outputs: tuple, paths: tuple) -> Blame:
        parent: Any = call.parent
        later = [c for c in parent.children if c.span[0] > call.span[1] and self.at(c, "input")]
        next_call = later[0] if later else None
        inputs = self.at(next_call or parent, "input" if next_call else "output")
        return Blame(
            "backward", parent, "code", call, next_call, inputs, outputs, paths, call, "output"
        )

    def _owner_after(self, time: int, bad: list[Variable]) -> Call | None:
        """The last call after `time` that owns a variable in `bad`, the innermost that was seen."""
        owners: list[tuple[int, Call, set[int]]] = []
        for when, call, role, _ in self.seen:
            own = {id(v) for v in getattr(call.layer, "trainable_variables", [])}
            own &= {id(v) for v in bad}
            if role == "output" and own:
                owners.append((when, call, own))
        innermost = [
            (when, call)
            for when, call, own in owners
            if own - set().union(*(o for _, c, o in owners if c.key.startswith(f"{call.key}/")))
        ]
        when, owner = max(innermost, key=lambda x: x[0], default=(0, None))
        return owner if when > time else None


def nonfinite_variables(
    gradients: Sequence[Gradient], variables: Sequence[Variable]
) -> list[Variable]:
    """The variables whose gradient is not finite."""
    return [
        v
        for v, g in zip(variables, gradients, strict=True)
        if g is not None and has_nonfinite(measure(backend.gradient_rows(g)))
    ]
