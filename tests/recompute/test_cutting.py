"""The cuts of a row against all cuts that there are."""

import itertools

import numpy as np
import pytest

from kmp._keras.cutting import Part, _bytes_with, _ends_within, best_cut

pytestmark = pytest.mark.any_backend


def random_row(seed, length=8):
    random = np.random.default_rng(seed)
    row = []
    for i in range(length):
        outputs = [
            (int(random.integers(1, 9)), int(random.integers(i, length + 1)))
            for _ in range(random.integers(1, 3))
        ]
        kept = int(random.integers(0, 20))
        row.append(Part(str(i), kept, outputs, bool(random.random() < 0.8)))
    return row


def every_cut(row):
    """The ends of all cuts, with the bytes handed on and those in the largest segment."""
    may_end = [i for i in range(len(row) - 1) if row[i].may_end]
    for number in range(len(may_end) + 1):
        for chosen in itertools.combinations(may_end, number):
            ends = (*chosen, len(row) - 1)
            segment = [sum(i > end for end in ends) for i in range(len(row))]
            handed_on = sum(
                size
                for i, part in enumerate(row)
                for size, last in part.outputs
                if last >= len(row) or segment[last] != segment[i]
            )
            inside = [
                sum(p.kept for p, s in zip(row, segment, strict=True) if s == k)
                for k in range(len(ends))
            ]
            yield ends, handed_on, max(inside)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_handed_on_is_least(seed):
    row = random_row(seed)
    cuts = list(every_cut(row))
    for ends, handed_on, largest in cuts:
        assert _bytes_with(row, ends) == (largest, handed_on)
    for bound in (10, 20, 35, 60, 200):
        possible = [handed_on for _, handed_on, largest in cuts if largest <= bound]
        found = _ends_within(row, bound)
        assert bool(found) == bool(possible)
        if found:
            assert min(possible) == next(h for ends, h, _ in cuts if ends == found)


@pytest.mark.parametrize("seed", range(20))
def test_the_bytes_are_the_fewest(seed):
    row = random_row(seed)
    cuts = list(every_cut(row))
    found = best_cut(row)
    assert found.bytes == sum(_bytes_with(row, found.ends))
    assert found.bytes == min(handed_on + largest for _, handed_on, largest in cuts)
    for most in (1, 2, 3):
        assert len(best_cut(row, most).ends) <= most


def test_a_chain_of_equals_is_cut_into_the_square_root():
    row = [Part(str(i), 1, [(1, i + 1)], True) for i in range(100)]
    assert 9 <= len(best_cut(row).ends) <= 11
    assert best_cut(row).bytes == 20
