"""Stochastic rounding: unbiased, bounded, without correlation, the same on every backend."""

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

from kmp.half_memory.rounding import part_of, random_bits, stochastic_round

pytestmark = pytest.mark.gpu

LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
NUMBER = 1 << 16


def rounded(x, seed=0, step=0, number=0):
    """Round float32 numbers, with other random bits for each, to float64."""
    x = np.asarray(x, "float32")
    bits = part_of(random_bits(x.shape, seed, step, number), 0)
    result = stochastic_round(ops.convert_to_tensor(x), bits)
    assert keras.backend.standardize_dtype(result.dtype) == "bfloat16"
    return ops.convert_to_numpy(ops.cast(result, "float32")).astype("float64")


def uniform(*counters, part=0, shape=(256, 256)):
    """The lower 16 bits, of which the rounding is made, around 0 and of variance 1."""
    bits = part_of(random_bits(shape, *counters), part)
    bits = ops.convert_to_numpy(bits).astype("int64").ravel()
    return (bits + 0.5 - 2.0**15) / 2.0**16 * np.sqrt(12)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exponent", [-120, -14, -1, 0, 3, 100])
@pytest.mark.parametrize("way", [2.0**-16, 0.1, 0.5, 0.9])
def test_is_unbiased(sign, exponent, way):
    low, step = 1.5 * 2.0**exponent, 2.0 ** (exponent - 7)
    x = np.float32(sign * (low + way * step))
    found = rounded(np.full(NUMBER, x), step=exponent + 200)
    assert set(found) <= {sign * low, sign * (low + step)}
    exact = (abs(float(x)) - low) / step  # as float32 holds it
    share = np.mean(np.abs(found) > low)
    assert abs(share - exact) <= 5 * np.sqrt(exact * (1 - exact) / NUMBER) + 2.0**-16


def test_what_bfloat16_holds_stays():
    values = np.arange(2**16, dtype="uint16").view(ml_dtypes.bfloat16).astype("float32")
    values = values[~np.isnan(values) & ((np.abs(values) > 2.0**-126) | (values == 0))]
    found = rounded(values)
    np.testing.assert_array_equal(found, values.astype("float64"))
    np.testing.assert_array_equal(np.signbit(found), np.signbit(values))


def test_infinity_and_nan_pass():
    found = rounded(np.array([np.inf, -np.inf, np.nan, -np.nan] * 1000))
    expected = np.array([np.inf, -np.inf, np.nan, np.nan] * 1000)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("x", [3.4e38, np.finfo("float32").max])
def test_a_finite_number_never_becomes_infinite(x):
    assert set(rounded(np.full(NUMBER, x))) == {LARGEST}
    assert set(rounded(np.full(NUMBER, -x))) == {-LARGEST}


def test_bits_are_uniform_and_uncorrelated():
    counters = [(s, t, p) for s in (0, 7) for t in (0, 1, 2, 1000) for p in range(4)]
    drawn = np.stack([uniform(*each, part=part) for each in counters for part in range(3)])
    number = drawn.shape[1]
    # A sum of independent terms of variance 1: six standard deviations, for 20,000 of them.
    bound = 6 * np.sqrt(number)
    assert np.all(np.abs(drawn.sum(1)) < bound)
    assert np.all(np.abs((drawn**2 - 1).sum(1)) < bound)
    upper = np.triu_indices(len(drawn), 1)
    for shift in (0, 1, 2, 256):  # parts, variables, steps and seeds; neighbours along both axes
        products = drawn[:, : number - shift] @ drawn[:, shift:].T
        assert np.all(np.abs(products[upper]) < bound), shift
        if shift:
            assert np.all(np.abs(np.diag(products)) < bound), shift


def test_all_bits_are_used():
    bits = ops.convert_to_numpy(random_bits((NUMBER,), 1, 2, 3)).view("uint32")
    ones = [(bits >> i & 1).mean() for i in range(32)]
    assert np.all(np.abs(np.array(ones) - 0.5) < 5 * 0.5 / np.sqrt(NUMBER))
    assert len(np.unique(bits)) == NUMBER  # the counter goes through a bijection


def test_bits_are_those_of_every_backend():
    """Written down once: replicas, backends and a resumed run draw the same."""
    bits = ops.convert_to_numpy(random_bits((2, 2), 3, 5, 7)).view("uint32")
    np.testing.assert_array_equal(bits, EXPECTED)


def murmur3(x):
    """The finalizer of MurmurHash3, in Python's integers."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= x >> shift
        x = x * factor % 2**32
    return x ^ x >> 16


def hashed(index, seed, step, number):
    """`random_bits` of one element, in Python's integers."""
    golden = 0x9E3779B9
    start = murmur3((murmur3(seed) + step) % 2**32) ^ murmur3(golden * (number + 1) % 2**32)
    return murmur3((index * golden + start) % 2**32)


EXPECTED = np.array([hashed(i, 3, 5, 7) for i in range(4)], "uint32").reshape(2, 2)


def test_small_updates_add_up():
    """200 updates of a fiftieth of a unit in the last place: nearest rounding loses them."""
    total = np.full(4096, 1.0, "float32")
    nearest = total.astype(ml_dtypes.bfloat16)
    update = np.float32(2.0**-7 / 50)
    for step in range(200):
        total = rounded(total + update, step=step).astype("float32")
        nearest = (nearest.astype("float32") + update).astype(ml_dtypes.bfloat16)
    assert np.all(nearest == 1)
    exact = 1 + 200 * float(update)
    # Each rounding has a variance below a unit squared times 1/50; those of 200 steps add up.
    error = 2.0**-7 * np.sqrt(200 / 50 / 4096)
    assert abs(total.mean() - exact) < 5 * error
