"""Updates of several weights together, and of a large one part by part.

Where nothing compiles an update, each of its hundred operations is called and writes its result.
For small weights the calls take most of the time, so the weights are joined. For large weights on a
CPU new memory takes most of it, so they are updated in parts that stay in its cache. The numbers
are the same as if each weight were updated by itself.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from keras import ops

from kmp._backend import backend
from kmp._backend.types import Tensor, Variable
from kmp.half_memory.rounding import starts_of


@dataclasses.dataclass(frozen=True)
class Member:
    """A weight whose update is computed element by element, through views alone.

    Attributes:
        view: of the weight.
        slots: the views of its slots, in the order in which the optimizer made them.
        rows: how many rows at least belong together, since they share scales.
        joins: whether it may be joined with others of its kind.
        kind: what is the same for all weights that are updated alike, but for their shapes.
    """

    view: Any
    slots: tuple[Any, ...]
    rows: int
    joins: bool
    kind: Any

    @property
    def length(self) -> int:
        """How many rows it has: the first axis."""
        return int(self.view.shape[0])

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(map(int, self.view.shape))

    def variables(self) -> list[Variable]:
        """All that the update reads and writes."""
        return [v for view in (self.view, *self.slots) for v in view.parts()]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows of a member."""

    member: Member
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Block:
    """What one update covers: rows of a weight, or several weights of one kind joined to a vector.

    An optimizer is given the views of the first member, which also hold those of the others.

    Attributes:
        pieces: the rows.
    """

    pieces: tuple[Piece, ...]

    @property
    def view(self) -> Any:
        """The weight that the optimizer is called with."""
        return self.pieces[0].member.view

    @property
    def views(self) -> tuple[Any, ...]:
        """That weight and its slots."""
        return self.view, *self.pieces[0].member.slots

    @property
    def kind(self) -> Any:
        """What is the same for all blocks that one program updates."""
        first = self.pieces[0]
        if not first.member.joins:
            return first.member.kind, first.stop - first.start, *self.view.shape[1:]
        numbers = sum((p.stop - p.start) * p.member.size // p.member.length for p in self.pieces)
        return first.member.kind, len(self.pieces) > 1, numbers > 1  # a vector of any length

    def gradient(self, gradients: Mapping[int, Tensor]) -> Tensor:
        """float32, from the gradients of the weights, by the ids of their views."""
        rows = [(gradients[id(p.member.view)], slice(p.start, p.stop)) for p in self.pieces]
        return ops.cast(self.read(rows), "float32")

    def read(self, rows: Sequence[tuple[Any, slice]]) -> Tensor:
        """Rows of tensors or variables; a vector of those that may be joined."""
        found = backend.read_rows(rows)
        return ops.reshape(found, (-1,)) if self.pieces[0].member.joins else found

    def rows(self, view: Any, part: str) -> list[tuple[Variable, slice]]:
        """Where the numbers of a view of the first member lie: in which variables, and rows."""
        found = []
        for view_of_piece, piece in zip(self._peers(view), self.pieces, strict=True):
            variable, length = getattr(view_of_piece, part), piece.member.length
            rows = int(variable.shape[0])  # there are fewer scales than numbers
            start, stop = (i * rows // length for i in (piece.start, piece.stop))
            found.append((variable, slice(start, stop)))
        return found

    def starts(self, key: Tensor) -> dict[int, Tensor]:
        """Of the random numbers that its views need, by the number of their `Draw`.

        Args:
            key: of the seed and the step.
        """
        found: dict[int, Tensor] = {}
        for view in self.views:
            if view.at_random and view.draw.number not in found:
                found[view.draw.number] = starts_of(self._draws(view), key)
        return found

    def _draws(self, view: Any) -> list[tuple[int, int, int]]:
        """The random numbers of each piece: their number, the first element and how many."""
        found = []
        for view_of_piece, piece in zip(self._peers(view), self.pieces, strict=True):
            of_row = piece.member.size // piece.member.length
            count = (piece.stop - piece.start) * of_row
            found.append((view_of_piece.draw.number, piece.start * of_row, count))
        return found

    def _peers(self, view: Any) -> list[Any]:
        places = {id(x): i for i, x in enumerate(self.views)}
        place = places[id(view)]
        return [(p.member.view, *p.member.slots)[place] for p in self.pieces]


def blocks_of(members: Sequence[Member], limit: int, small: int) -> list[Block]:
    """Join small members of one kind, and take large ones part by part.

    Args:
        members: weights.
        limit: how many numbers a block has, about.
        small: how many numbers a member has at most that is joined.
    """
    blocks: list[Block] = []
    open_pieces: dict[Any, list[Piece]] = {}
    for member in members:
        if not member.joins or member.size > small:
            blocks += _parts_of(member, limit)
            continue
        pieces = open_pieces.setdefault(member.kind, [])
        if sum(p.member.size for p in pieces) + member.size > limit:
            blocks.append(Block(tuple(pieces)))
            pieces.clear()
        pieces.append(Piece(member, 0, member.length))
    return blocks + [Block(tuple(pieces)) for pieces in open_pieces.values()]


def _parts_of(member: Member, limit: int) -> list[Block]:
    together = member.size // member.length * member.rows  # numbers that must not be parted
    rows = max(1, limit // together) * member.rows
    starts = range(0, member.length, rows)
    return [Block((Piece(member, i, min(i + rows, member.length)),)) for i in starts]
