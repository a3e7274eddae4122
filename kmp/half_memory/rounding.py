"""Rounding float32 to bfloat16 at random, so that a sum of small updates arrives on average.

The random numbers come from a counter and not from a state: each is a hash of a seed, a step, a
weight and the place of the element in it. So all replicas and a resumed run draw the same ones,
a sharded variable draws its own part where it lies, and XLA fuses them into the update.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from keras import ops

from kmp._backend import backend
from kmp._backend.types import Tensor

_LARGEST = 0x7F7FFFFF  # the last float32 before inf; its upper half is the last bfloat16
_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: spreads consecutive numbers


def stochastic_round(x: Tensor, bits: Tensor) -> Tensor:
    """Round to one of the two neighbours in bfloat16, to the nearer one more often.

    The chance of each neighbour is such that the mean of many roundings is `x`. A number that
    bfloat16 can hold stays, as do inf and NaN. A finite number beyond the largest bfloat16 becomes
    that one.

    Args:
        x: float32[...].
        bits: int32[...], random in the lower 16 bits.

    Returns:
        bfloat16[...].

    Example:

    >>> x = ops.full((1000,), 1 + 2.0**-9)  # a quarter of the way from 1 to the next bfloat16
    >>> rounded = stochastic_round(x, random_bits((1000,), 0, 0, 0))
    >>> sorted({float(each) for each in rounded})
    [1.0, 1.0078125]

    Source: Zamirai et al. 2020, *Revisiting BFloat16 Training*, section 4.
    """
    return ops.cast(_at_random(x, bits, 16), "bfloat16")


def round_to_24_bits(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to one of the two neighbours that are zero in the lower 8 bits, as above.

    Args:
        x: float32[...].
        bits: int32[...], random in the lower 8 bits; or 128, to round to nearest.

    Returns:
        float32[...].
    """
    return _at_random(x, bits, 8)


def _at_random(x: Tensor, bits: Tensor, below: int) -> Tensor:
    """float32 whose lower bits, so many of them, are zero."""
    lower = 2**below - 1
    # From here on no noise: it would reach infinity, or make another number of it or of NaN. (A NaN
    # that arithmetic makes has bits in the upper half.)
    end = float(np.uint32(_LARGEST & ~lower).view("float32"))
    return backend.bitcast(backend.add_noise(x, bits, lower, end), "float32")


@dataclasses.dataclass(frozen=True)
class Draw:
    """Which 16 random bits round a number: a weight and two of its slots share 32.

    Attributes:
        number: a number of the 32 bits among those of one step.
        part: the lower half (0), the upper one (1), or which bits of the two differ (2). Each is
            uniform, and each two of them are independent.
    """

    number: int
    part: int


def part_of(bits: Tensor, part: int) -> Tensor:
    """int32, which has a part of random bits, as `Draw` says, in its lower 16."""
    if part == 0:
        return bits
    upper = ops.right_shift(bits, 16)
    return upper if part == 1 else ops.bitwise_xor(bits, upper)


def random_bits(shape: Sequence[int], seed: Tensor, step: Tensor, number: int) -> Tensor:
    """Random numbers that depend on nothing but the arguments and the place of each element.

    Args:
        shape: of the result.
        seed: int32[].
        step: int32[].
        number: which of those of one step.

    Returns:
        int32[shape], uniform over all 32 bits.

    Example:

    >>> [int(x) for x in random_bits((2,), 0, 1, 0)] == [int(x) for x in random_bits((2,), 0, 1, 0)]
    True

    Source: Salmon et al. 2011, *Parallel Random Numbers: As Easy as 1, 2, 3* (counters in place of
    a state); the hash is the finalizer of Appleby's MurmurHash3, applied twice.
    """
    return bits_of(shape, keys_of(seed, step), number)


def bits_of(shape: Sequence[int], keys: tuple[Tensor, Tensor], number: int) -> Tensor:
    """What `random_bits` draws for a seed and a step that have these keys."""
    key, other = keys
    inner, outer = _of_number(number)
    hashed = backend.hash_bits(_indices(shape) + (key ^ inner))
    return backend.hash_bits(ops.bitwise_xor(hashed, other + outer))


def counters_of(
    draws: Sequence[tuple[int, int, int]], keys: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """What `bits_from` makes parts of what `random_bits` draws from, one part after the other.

    Args:
        draws: for each part the number, the first element and how many.
        keys: of the seed and the step.

    Returns:
        Two of int32[]; of int32[sum of elements] if there are several parts.
    """
    key, other = keys
    begun, outer, before = [], [], 0
    for number, first, count in draws:
        of_inner, of_outer = _of_number(number)
        begun.append((key ^ of_inner) + _signed(first - before))
        outer.append(other + of_outer)
        before += count
    if len(draws) == 1:
        return begun[0], outer[0]
    counts = ops.convert_to_tensor([count for *_, count in draws], "int32")
    return ops.repeat(ops.stack(begun), counts), ops.repeat(ops.stack(outer), counts)


def bits_from(counters: tuple[Tensor, Tensor], number: int) -> Tensor:
    """int32[number], random bits, from what `counters_of` has returned."""
    begun, outer = counters
    hashed = backend.hash_bits(ops.arange(number, dtype="int32") + begun)
    return backend.hash_bits(ops.bitwise_xor(hashed, outer))


def keys_of(seed: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """int32 scalars of a step, the same for all numbers: XLA computes them once."""
    key = backend.hash_bits(backend.hash_bits(ops.cast(seed, "int32")) + ops.cast(step, "int32"))
    return key, backend.hash_bits(key + _signed(_GOLDEN))


def _of_number(number: int) -> tuple[int, int]:
    """What is mixed into each of the two rounds."""
    inner, outer = (_signed(_hash_number(_GOLDEN * (2 * number + i))) for i in (1, 2))
    return inner, outer


def _indices(shape: Sequence[int]) -> Tensor:
    """int32[shape]: the number of each element, modulo 2**32.

    As a sum over the axes: each device computes the part of a sharded variable that it holds.
    """
    indices = ops.zeros((1,) * len(shape), "int32")
    for axis, size in enumerate(shape):
        along = ops.arange(size, dtype="int32") * _signed(math.prod(shape[axis + 1 :]))
        indices = indices + ops.reshape(along, (size, *[1] * (len(shape) - axis - 1)))
    return indices


def _hash_number(x: int) -> int:
    """`backend.hash_bits` of a Python number."""
    x %= 2**32
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def _signed(x: int) -> int:
    """`x` modulo 2**32 as an int32. (TensorFlow's and JAX's uint32 lack operations of int32.)"""
    return (x + 2**31) % 2**32 - 2**31
