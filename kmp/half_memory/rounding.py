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

_LOWER = 2**16 - 1
_LARGEST = 0x7F7FFFFF  # the last float32 before inf; its upper half is the last bfloat16
_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: spreads consecutive numbers


def stochastic_round(x: Tensor, bits: Tensor) -> Tensor:
    """Round to one of the two neighbours in bfloat16, to the nearer one more often.

    The chance of each neighbour is such that the mean of many roundings is `x`. A number that
    bfloat16 can hold stays, as do inf and NaN. A finite number beyond the largest bfloat16 becomes
    that one.

    Args:
        x: float32[...].
        bits: int32[...], random from 0 to 65535. PyTorch may write into them.

    Returns:
        bfloat16[...].

    Example:

    >>> x = ops.full((1000,), 1 + 2.0**-9)  # a quarter of the way from 1 to the next bfloat16
    >>> rounded = stochastic_round(x, part_of(random_bits((1000,), 0, 0, 0), 0))
    >>> sorted({float(each) for each in rounded})
    [1.0, 1.0078125]

    Source: Zamirai et al. 2020, *Revisiting BFloat16 Training*, section 4.
    """
    return ops.cast(_at_random(x, bits, 16), "bfloat16")


def round_to_24_bits(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to one of the two neighbours that are zero in the lower 8 bits, as above.

    Args:
        x: float32[...].
        bits: int32[...], of which the lower 8 bits are random; or 128, to round to nearest. PyTorch
            may write into them.

    Returns:
        float32[...].
    """
    bits &= 2**8 - 1
    return _at_random(x, bits, 8)


def _at_random(x: Tensor, noise: Tensor, below: int) -> Tensor:
    """Round to float32 whose lower `below` bits are zero."""
    lower = 2**below - 1
    # From this magnitude on no noise is added: it would reach infinity, or turn infinity or NaN
    # into another number. (A NaN that arithmetic makes has bits in the upper half.)
    end = float(np.uint32(_LARGEST & ~lower).view("float32"))
    return backend.bitcast(backend.add_noise(x, noise, ~lower, end), "float32")


@dataclasses.dataclass(frozen=True)
class Draw:
    """Which 16 random bits round a number: a weight and two of its slots share 32.

    Attributes:
        number: says which of the 32-bit draws of one step it is.
        part: the lower half (0), the upper one (1), or which bits of the two differ (2). Each is
            uniform, and each two of them are independent.
    """

    number: int
    part: int


def part_of(bits: Tensor, part: int) -> Tensor:
    """int32 from 0 to 65535 in memory of their own: a part of random bits, as `Draw` says."""
    if part == 0:
        return bits & _LOWER
    upper = ops.right_shift(bits, 16)
    if part == 2:
        upper ^= bits
    upper &= _LOWER
    return upper


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

    Source: Steele, Lea and Flood 2014, *Fast Splittable Pseudorandom Number Generators*: steps of
    the golden ratio, and a hash of where they lead, here the finalizer of Appleby's MurmurHash3.
    Salmon et al. 2011, *Parallel Random Numbers: As Easy as 1, 2, 3*: counters in place of a state.
    """
    return bits_of(shape, key_of(seed, step), number)


def bits_of(shape: Sequence[int], key: Tensor, number: int) -> Tensor:
    """What `random_bits` draws for a seed and a step that have this key."""
    return backend.hash_bits(_steps(shape) + _start(key, number))


def starts_of(draws: Sequence[tuple[int, int, int]], key: Tensor) -> Tensor:
    """Starts from which `bits_from` makes parts of what `random_bits` draws, one after the other.

    Args:
        draws: for each part the number, the first element and how many.
        key: of the seed and the step.

    Returns:
        int32[]; int32[sum of elements] if there are several parts.
    """
    starts, before = [], 0
    for number, first, count in draws:
        starts.append(_start(key, number) + _signed(_GOLDEN * (first - before)))
        before += count
    if len(draws) == 1:
        return starts[0]
    counts = ops.convert_to_tensor([count for *_, count in draws], "int32")
    return ops.repeat(ops.stack(starts), counts)


def bits_from(starts: Tensor, number: int) -> Tensor:
    """int32[number], random bits, from what `starts_of` has returned."""
    steps = ops.arange(number, dtype="int32")
    steps *= _signed(_GOLDEN)  # PyTorch needs no new memory for it
    steps += starts
    return backend.hash_bits(steps)


def key_of(seed: Tensor, step: Tensor) -> Tensor:
    """int32[] of a step, the same for all numbers: XLA computes it once."""
    return backend.hash_bits(backend.hash_bits(ops.cast(seed, "int32")) + ops.cast(step, "int32"))


def _start(key: Tensor, number: int) -> Tensor:
    """int32[]: where the numbers of a weight begin."""
    return key ^ _signed(_hash_number(_GOLDEN * (number + 1)))


def _steps(shape: Sequence[int]) -> Tensor:
    """int32[shape]: the golden ratio times the number of each element, modulo 2**32.

    As a sum over the axes: each device computes the part of a sharded variable that it holds.
    """
    steps = ops.zeros((1,) * len(shape), "int32")
    for axis, size in enumerate(shape):
        step = _signed(_GOLDEN * math.prod(shape[axis + 1 :]))
        along = ops.arange(size, dtype="int32") * step
        steps = steps + ops.reshape(along, (size, *[1] * (len(shape) - axis - 1)))
    return steps


def _hash_number(x: int) -> int:
    """`backend.hash_bits` of a Python number."""
    x %= 2**32
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def _signed(x: int) -> int:
    """`x` modulo 2**32 as an int32. (TensorFlow's and JAX's uint32 lack operations of int32.)"""
    return (x + 2**31) % 2**32 - 2**31
