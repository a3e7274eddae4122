"""float32 as a bfloat16 number and what it leaves over: nothing is lost, whatever the bits are."""

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import ops

from kmp.half_memory.split import join, split

pytestmark = [pytest.mark.gpu, pytest.mark.core]

SIGN = np.uint32(1 << 31)
EDGES = np.array(
    [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000],
    "uint32",
)
BITS = np.random.default_rng(0).integers(2**32, size=1 << 18, dtype="uint32")
BITS = np.concatenate([EDGES, EDGES | SIGN, BITS])
NUMBERS = BITS[(BITS & ~SIGN) <= 0x7F800000].view("float32")
NANS = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF], "uint32")
NANS = np.concatenate([NANS, NANS | SIGN]).view("float32")


def bits_of(x):
    return np.array(ops.convert_to_numpy(x)).view("uint32")


def parts(x, dtype="int16"):
    weight, remainder = split(ops.convert_to_tensor(x), dtype)
    assert keras.backend.standardize_dtype(weight.dtype) == "bfloat16"
    assert keras.backend.standardize_dtype(remainder.dtype) == dtype
    return weight, remainder


def as_float32(weight):
    return np.array(ops.convert_to_numpy(ops.cast(weight, "float32")))


def test_every_number_is_joined_bit_for_bit():
    np.testing.assert_array_equal(bits_of(join(*parts(NUMBERS))), NUMBERS.view("uint32"))


def test_the_weight_is_the_nearest_and_of_two_the_larger():
    found = as_float32(parts(NUMBERS)[0])
    with np.errstate(over="ignore"):
        nearest = NUMBERS.astype(ml_dtypes.bfloat16).astype("float32")  # of two the even one
    tie = (NUMBERS.view("uint32") & 0xFFFF) == 0x8000
    np.testing.assert_array_equal(found[~tie], nearest[~tie])
    assert np.all(np.abs(found[tie]) > np.abs(NUMBERS[tie]))


def test_a_nan_stays_one_for_the_model_too():
    """All bits of a GPU's NaN are set: it would carry into the sign, and be -0."""
    weight, remainder = parts(NANS)
    assert np.isnan(as_float32(weight)).all()
    assert np.isnan(ops.convert_to_numpy(join(weight, remainder))).all()


@pytest.mark.parametrize("dtype", ["int16", "int8"])
def test_a_remainder_of_another_weight_leaves_the_weight_as_it_was_assigned(dtype):
    """As after `load_weights`: zeros with a negative remainder, or infinity with one, were NaN."""
    with np.errstate(over="ignore"):
        weights = np.concatenate([NUMBERS[:4096], [0, -0.0, np.inf, -np.inf, 3.0]])
        weights = weights.astype("float32").astype(ml_dtypes.bfloat16)
    weight = ops.convert_to_tensor(weights.astype("float32"))
    limits = np.iinfo(dtype)
    for each in (limits.min, -1, 1, limits.max):
        stale = ops.full(weight.shape, each, dtype)
        whole = join(ops.cast(weight, "bfloat16"), stale)
        np.testing.assert_array_equal(as_float32(parts(whole, dtype)[0]), weights.astype("float32"))
        assert not np.isnan(ops.convert_to_numpy(whole)).any()
