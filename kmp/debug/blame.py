"""From what a replay saw to the one call that is to blame: the first in the order of execution."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kmp import _backend
from kmp._backend.types import Gradient, Variable
from kmp.debug.replay import Call, Recorder, floats
from kmp.debug.stats import TensorStats, tensor_stats


@dataclasses.dataclass(frozen=True, eq=False)
class Blame:
    """Who, and in which part of it.

    Attributes:
        phase: "forward", "loss" or "backward".
        call: the call that is to blame; None for the batch, the loss and what no layer owns.
        part: "data", "cast", "layer", "code", "loss", "weights" or "model".
        after: the child after which its own code went wrong, in the order of execution.
        before: the child before which it did.
        inputs: what came in, in the direction of the pass.
        outputs: what came out.
        variables: paths of the variables whose gradients are not finite.
        place: the call at which the gradient was seen that is not finite.
        role: whether at its "input" or "output".
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


def measure(tree: Any) -> tuple[TensorStats, ...]:
    """The statistics of each float tensor in a structure."""
    return tuple(tensor_stats(x) for x in floats(tree))


def is_bad(stats: Sequence[TensorStats]) -> bool:
    """Tell whether any number is inf or NaN."""
    return any(s.nonfinite for s in stats)


def first_bad_value(recorder: Recorder) -> Blame | None:
    """The first place of a forward pass whose numbers are not finite.

    What later layers answer with finite numbers, such as a mask of -inf before a softmax, is meant.
    A batch that is not finite itself is to blame unless a call made such numbers of finite ones.
    """
    bad = _Bad(recorder.calls)
    data = None
    events = [(call.span[0], call, "input") for call in recorder.calls]
    events += [(call.span[1], call, "output") for call in recorder.calls]
    for time, call, role in sorted(events, key=lambda event: event[0]):
        if not bad.outputs_of(call) or bad.is_answered(call):
            continue
        blame = _blame_at(time, call, role)
        if blame is None:
            continue
        if blame.call is None:
            data = blame
        elif data is None or not is_bad(measure(blame.call.passed)):
            return blame
    return data


def _blame_at(time: int, call: Call, role: str) -> Blame | None:
    """Who made what is not finite at one end of a call, None if it shows only at the other."""
    outputs = measure(call.outputs)
    if role == "output":
        last = _finished_before(call, time)
        if last is not None:
            return Blame("forward", call, "code", last, None, measure(last.outputs), outputs)
        return Blame("forward", call, "layer", inputs=measure(call.received), outputs=outputs)
    passed, received = measure(call.passed), measure(call.received)
    if is_bad(passed) and call.parent is None:
        return Blame("forward", None, "data", outputs=passed)
    if is_bad(passed):
        parent: Any = call.parent
        last = _finished_before(parent, time)
        inputs = measure(last.outputs if last else parent.received)
        return Blame("forward", parent, "code", last, call, inputs, passed)
    if is_bad(received):
        return Blame("forward", call, "cast", inputs=passed, outputs=received)
    return None


class _Bad:
    """Which calls give numbers that are not finite, and which of these do no harm."""

    def __init__(self, calls: Sequence[Call]):
        self._bad = {id(call): is_bad(measure(call.outputs)) for call in calls}
        self._answered: dict[int, bool] = {}
        self._users: dict[int, list[Call]] = {}
        for call in calls:
            for tensor in floats(call.passed):
                self._users.setdefault(id(tensor), []).append(call)

    def outputs_of(self, call: Call) -> bool:
        """Tell whether any output is not finite."""
        return self._bad[id(call)]

    def is_answered(self, call: Call) -> bool:
        """Tell whether all layers that take the outputs as they are end in finite numbers."""
        if id(call) not in self._answered:
            takers = [u for x in floats(call.outputs) for u in self._users.get(id(x), [])]
            later = [u for u in takers if u.span[0] > call.span[1]]  # not itself, not its children
            self._answered[id(call)] = bool(later) and all(
                not self._bad[id(u)] or self.is_answered(u) for u in later
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

    def first_bad(self, gradients: Sequence[Gradient], variables: Sequence[Variable]):
        """The place that comes last in the forward pass, and so first in the backward pass.

        Returns:
            A `Blame`, or None if all of them and all gradients of variables are finite.
        """
        bad = nonfinite_variables(gradients, variables)
        last = max((e for e in self.seen if e[3].nonfinite), key=lambda e: e[0], default=None)
        owner = self._owner_after(last[0] if last else 0, bad)
        if owner is not None and (last is None or owner.key != last[1].key):
            own = {id(v) for v in owner.layer.trainable_variables}
            paths = tuple(v.path for v in bad if id(v) in own)
            return Blame(
                "backward", owner, "weights", inputs=self.at(owner, "output"), variables=paths
            )
        paths = tuple(v.path for v in bad)
        if last is None:  # a variable outside of any layer's call
            return Blame("backward", None, "weights", variables=paths) if paths else None
        call: Any = last[1]
        role = last[2]
        outputs = self.at(call, role)
        if role == "output" and call.parent is None:
            return Blame("backward", None, "loss", None, None, (), outputs, paths, call, role)
        if role == "output":
            return self._code_after(call, outputs, paths)
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
        if g is not None and is_bad(measure(_backend.gradient_rows(g)))
    ]
