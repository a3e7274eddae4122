"""Where to cut a row of computations so that little is in memory at once."""

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """One computation of a row.

    Attributes:
        name: str.
        kept: bytes of what it keeps for the gradient.
        outputs: for each tensor that it makes its bytes, and the number of the computation that
            needs it last: -1 if none does, their count if it is an output of the row.
        may_end: bool, whether a cut may come after it.
    """

    name: str
    kept: int
    outputs: Sequence[tuple[int, int]]
    may_end: bool


class Cut(NamedTuple):
    """A row that is cut into segments.

    Attributes:
        ends: the numbers of the computations after which a segment ends; the last of all is one.
        bytes: what is in memory at once: what the segments hand on, and the inside of the largest.
    """

    ends: tuple[int, ...]
    bytes: int


def best_cut(parts: Sequence[Part], most: int | None = None) -> Cut:
    """The cut with the fewest bytes in memory at once.

    Every segment keeps what it hands on to later ones; while its gradient is computed, what is
    inside is there as well. For a bound on the inside, the cut whose segments hand on least is
    found exactly, from the front. Then the bound is lowered below what that cut has inside, until
    what is handed on alone is more than the best cut takes. Of more than 200 computations the bound
    is lowered by an eighth at least, and the bytes may be up to an eighth more than the fewest.

    Args:
        parts: the computations, in their order.
        most: the most segments that there may be.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), section 4.4: a
    search over the bound.
    """
    whole = (len(parts) - 1,)
    best = Cut(whole, sum(_bytes_with(parts, whole)))
    bound = best.bytes
    while ends := _ends_within(parts, bound):
        inside, handed_on = _bytes_with(parts, ends)
        if handed_on >= best.bytes:
            break
        if most is None or len(ends) <= most:
            best = min(best, Cut(ends, inside + handed_on), key=lambda each: each.bytes)
        bound = inside - 1 if len(parts) <= 200 else min(inside - 1, bound * 7 // 8)
    return best


def _ends_within(parts: Sequence[Part], bound: int) -> tuple[int, ...]:
    """The ends of segments with at most `bound` bytes inside that hand on least; () if none do."""
    best: list[tuple[float, int]] = [(0.0, 0)]  # bytes handed on, and where the segment begins
    for stop in range(1, len(parts) + 1):
        inside, handed_on, found = 0, 0, (float("inf"), 0)
        for start in range(stop - 1, -1, -1):
            part = parts[start]
            inside += part.kept
            if inside > bound:
                break
            handed_on += sum(size for size, last in part.outputs if last >= stop)
            may_end = stop == len(parts) or parts[stop - 1].may_end
            if may_end and best[start][0] + handed_on < found[0]:
                found = (best[start][0] + handed_on, start)
        best.append(found)
    if best[-1][0] == float("inf"):
        return ()
    ends, stop = [], len(parts)
    while stop:
        ends.append(stop - 1)
        stop = best[stop][1]
    return tuple(reversed(ends))


def _bytes_with(parts: Sequence[Part], ends: Sequence[int]) -> tuple[int, int]:
    """The bytes inside the largest segment, and those that all of them hand on."""
    starts = [0, *(end + 1 for end in ends)]
    handed_on, largest = 0, 0
    for start, end in zip(starts, ends, strict=False):
        inside = parts[start : end + 1]
        largest = max(largest, sum(part.kept for part in inside))
        handed_on += sum(size for part in inside for size, last in part.outputs if last > end)
    return largest, handed_on
