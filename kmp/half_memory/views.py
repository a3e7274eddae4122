"""Half-precision variables as a Keras optimizer sees them: in float32."""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from keras import ops

from kmp._backend import backend
from kmp._backend.types import Tensor, Variable
from kmp.half_memory.codes import Code, Groups, decode, encode, scales_of
from kmp.half_memory.rounding import (
    Draw,
    bits_from,
    bits_of,
    key_of,
    part_of,
    round_to_24_bits,
    stochastic_round,
)
from kmp.half_memory.split import join, split

ROUNDING = ("stochastic", "nearest")
_NEAREST = 2**7  # in place of random bits: half a unit of 24 bits


@dataclasses.dataclass
class Standing:
    """Tensors that views read and write in place of their variables.

    Attributes:
        values: by the id of a view and the name of a part of it.
        starts: of random numbers, by the numbers of `Draw`; see `rounding.starts_of`.
    """

    values: dict[tuple[int, str], Tensor]
    starts: dict[int, Tensor]


@dataclasses.dataclass
class _Update:
    """What waits for the end of an update.

    Attributes:
        standing: what is in the place of variables; None: nothing.
        held: by the id of a view: the view, and the value that will be written.
        bits: random numbers that were drawn for one of the views, and are there for the others.
        key: what these are drawn by; None: that of the seed and the step.
    """

    standing: Standing | None
    held: dict[int, tuple[Any, Tensor]] = dataclasses.field(default_factory=dict)
    bits: dict[tuple[int, int], Tensor] = dataclasses.field(default_factory=dict)
    key: Tensor | None = None

    def write(self) -> None:
        """Round what is held, and write it."""
        coded = [(view, value) for view, value in self.held.values() if isinstance(view, CodedView)]
        largest = self._largest(coded) if coded else []
        for view, value in self.held.values():
            if not isinstance(view, CodedView):
                view.write(value)
        for (view, value), each in zip(coded, largest, strict=True):
            view.encode(value, each)

    def _largest(self, coded: Sequence[tuple["CodedView", Tensor]]) -> list[Tensor]:
        """The largest magnitudes that scales are made of, all before anything is rounded at random.

        Otherwise XLA would draw the random numbers in the kernel that reduces, where they take a
        GPU much time, and write them to memory for the kernel that encodes.
        """
        view, _ = coded[0]  # the slots of a weight are grouped alike
        largest = view.groups.largest(*(value for _, value in coded))
        if self.standing is None:
            *largest, self.key = backend.together([*largest, view.rounding.key()])
        # A group that is not finite in one slot counts as not finite in all: so XLA writes all
        # scales in one kernel.
        finite = functools.reduce(ops.logical_and, map(ops.isfinite, largest))
        return [ops.where(finite, x, float("inf")) for x in largest]


_of_thread = threading.local()  # several may trace at once


def _update() -> _Update | None:
    return getattr(_of_thread, "update", None)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How float32 becomes half precision again.

    Attributes:
        mode: one of `ROUNDING`. Stochastic rounding is for bfloat16; float16 is always rounded to
            nearest.
        seed: int32[], which random numbers are drawn.
        step: int[], the number of the update. A skipped step does not move it.
    """

    mode: str
    seed: Variable
    step: Variable

    def __call__(self, value: Tensor, dtype: str, view: Any) -> Tensor:
        """Round to `dtype`, with the random numbers of a view."""
        if self.mode == "nearest" or dtype != "bfloat16":
            return ops.cast(value, dtype)
        return stochastic_round(value, self.bits(value, view))

    def key(self) -> Tensor:
        """The key of this step's random numbers."""
        return key_of(ops.convert_to_tensor(self.seed), ops.convert_to_tensor(self.step))

    def bits(self, value: Tensor, view: Any) -> Tensor:
        """int32 in the shape of a value, random from 0 to 65535."""
        update, key = _update(), (id(self.seed), view.draw.number)
        bits = update.bits.get(key) if update else None
        if bits is None:
            bits = self._bits(value, view, update)
            if update:
                update.bits[key] = bits
        return part_of(bits, view.draw.part)

    def _bits(self, value: Tensor, view: Any, update: _Update | None) -> Tensor:
        if update is not None and update.standing is not None:
            starts = update.standing.starts[view.draw.number]
            return ops.reshape(bits_from(starts, math.prod(value.shape)), value.shape)
        key = self.key() if update is None or update.key is None else update.key
        return bits_of(tuple(value.shape), key, view.draw.number)


_BaseView: Any = backend.BaseView  # a type checker takes no attribute for a base


class Float32View(_BaseView):
    """A variable in half precision that reads as float32, and rounds what is assigned to it.

    It has no memory of its own. Within `one_update` the assigned values stay in float32, and are
    rounded once at the end.

    Args:
        variable: the variable.
        rounding: how to round.
        draw: its random numbers.

    Attributes:
        PARTS: the names of the variables that hold it.
    """

    PARTS: tuple[str, ...] = ("variable",)

    def __init__(self, variable: Variable, rounding: Rounding, draw: Draw):
        self.variable, self.rounding, self.draw = variable, rounding, draw
        self._dtype, self._autocast = "float32", False

    def __getattr__(self, name: str) -> Any:
        """Name, path, shape, layout, constraint and so on are those of the variable."""
        if name.startswith("__") or "variable" not in vars(self):  # while it is copied
            raise AttributeError(name)
        return getattr(self.variable, name)

    @property
    def value(self) -> Tensor:
        """float32, what was assigned in this update or the variable's value."""
        update = _update()
        if update and id(self) in update.held:
            return update.held[id(self)][1]
        return self.read()

    def assign(self, value: Any) -> Tensor:
        """Assign a value of the variable's shape; within `one_update`, at its end."""
        value = ops.cast(value, "float32")
        update = _update()
        if update is None:
            self.write(value)
        else:
            update.held[id(self)] = (self, value)
        return value

    @property
    def at_random(self) -> bool:
        """Whether it is rounded at random."""
        return self.rounding.mode == "stochastic" and self.variable.dtype == "bfloat16"

    def parts(self) -> list[Variable]:
        """The variables that hold it."""
        return [getattr(self, name) for name in self.PARTS]

    def read(self) -> Tensor:
        """float32, the variable's value."""
        return ops.cast(self._get("variable"), "float32")

    def write(self, value: Tensor) -> None:
        """Round a float32 value into the variable."""
        self._set("variable", self.rounding(value, self.variable.dtype, self))

    def _get(self, part: str) -> Tensor:
        """The value of one of the variables, or what stands in its place."""
        update = _update()
        if update is None or update.standing is None:
            return ops.convert_to_tensor(getattr(self, part))
        return update.standing.values[id(self), part]

    def _set(self, part: str, value: Tensor) -> None:
        update = _update()
        if update is None or update.standing is None:
            getattr(self, part).assign(value)
        else:
            update.standing.values[id(self), part] = value

    def restore(self, value: Tensor) -> None:
        """Write a float32 value that was read elsewhere: rounded to nearest, at no step."""
        self.variable.assign(ops.cast(value, self.variable.dtype))


class SplitView(Float32View):
    """A bfloat16 variable and a remainder, in which updates add up: together they are a float32.

    Args:
        variable: bfloat16 variable.
        remainder: int16 variable of the same shape, or int8, with which the float32 has 24 bits.
            Zeros belong to any value of `variable`.
        rounding: how to round to 24 bits.
        draw: its random numbers.
    """

    PARTS = ("variable", "remainder")

    def __init__(self, variable: Variable, remainder: Variable, rounding: Rounding, draw: Draw):
        super().__init__(variable, rounding, draw)
        self.remainder = remainder

    @property
    def at_random(self) -> bool:
        """Whether it is rounded at random."""
        return self.rounding.mode == "stochastic" and self.remainder.dtype == "int8"

    def read(self) -> Tensor:
        """float32, what both parts are."""
        return join(self._get("variable"), self._get("remainder"))

    def write(self, value: Tensor) -> None:
        """Assign both parts."""
        self._assign(value, self.rounding.bits(value, self) if self.at_random else None)

    def restore(self, value: Tensor) -> None:
        """Assign both parts of a float32 value that was read elsewhere, at no step."""
        self._assign(value, None)

    def _assign(self, value: Tensor, bits: Tensor | None) -> None:
        if self.remainder.dtype == "int8":
            if bits is None:
                bits = ops.full(value.shape, _NEAREST, "int32")
            value = round_to_24_bits(value, bits)
        weight, remainder = split(value, self.remainder.dtype)
        self._set("variable", weight)
        self._set("remainder", remainder)


class CodedView(Float32View):
    """A slot of 8 bits a number, and the scales of its groups.

    Args:
        variable: int8 or uint8 variable, the codes.
        scales: bfloat16 variable.
        code: what the codes stand for.
        groups: which of them share a scale.
        rounding: whose random numbers it draws.
        draw: its random numbers.
    """

    PARTS = ("variable", "scales")

    def __init__(
        self,
        variable: Variable,
        scales: Variable,
        code: Code,
        groups: Groups,
        rounding: Rounding,
        draw: Draw,
    ):
        super().__init__(variable, rounding, draw)
        self.scales, self.code, self.groups = scales, code, groups

    @property
    def at_random(self) -> bool:
        """Whether it is rounded at random."""
        return True

    def read(self) -> Tensor:
        """float32, what the codes stand for."""
        scales = backend.once_decided(self._get("scales"))  # a TPU writes each once a number
        return decode(self._get("variable"), scales, self.code, self.groups)

    def write(self, value: Tensor) -> None:
        """Encode a value, at random."""
        self.encode(value, *self.groups.largest(value))

    def encode(self, value: Tensor, largest: Tensor) -> None:
        """Encode a value, at random, whose groups have these largest magnitudes."""
        bits = self.rounding.bits(value, self)
        self._assign(value, largest, (ops.cast(bits, "float32") + 0.5) * 2.0**-16)

    def restore(self, value: Tensor) -> None:
        """Encode a float32 value that was read elsewhere: to nearest, at no step."""
        (largest,) = self.groups.largest(value)
        self._assign(value, largest, 0.5)

    def _assign(self, value: Tensor, largest: Tensor, uniform: Any) -> None:
        scales = scales_of(largest)
        self._set("variable", encode(value, scales, self.code, self.groups, uniform))
        self._set("scales", scales)


class MasterView(Float32View):
    """A variable in float16 whose updates add up in a float32 copy of it, the master.

    What float16 leaves over of a float32 does not fit into 16 bits: its exponent is shorter.

    Args:
        variable: the variable.
        master: float32 variable of the same shape.
    """

    def __init__(self, variable: Variable, master: Variable):
        super().__init__(variable, Rounding("nearest", None, None), Draw(0, 0))
        self.master = master

    def read(self) -> Tensor:
        """float32, the master, or the variable where that was assigned since by somebody else."""
        weight = ops.convert_to_tensor(self.variable)
        master = ops.convert_to_tensor(self.master)
        in_step = ops.equal(ops.cast(master, self.variable.dtype), weight)
        return ops.where(in_step, master, ops.cast(weight, "float32"))

    def write(self, value: Tensor) -> None:
        """Assign the master, and round it into the variable."""
        self.master.assign(value)
        super().write(value)

    restore = write


@contextlib.contextmanager
def one_update(standing: Standing | None = None) -> Iterator[None]:
    """Within, views keep what they are assigned in float32; at the end they round and write it.

    If an exception is raised, nothing is written.

    Args:
        standing: what the views read and write in place of their variables.
    """
    outer, _of_thread.update = _update(), _Update(standing)
    try:
        yield
        _of_thread.update.write()
    finally:
        _of_thread.update = outer
