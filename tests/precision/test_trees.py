"""Verbs over nested structures: dense, half, sparse, missing, eager and compiled."""

import keras
import numpy as np
import pytest
from keras import ops
from oracle import COMPILED_MODES, MODES, compiled, number

import kmp
from kmp.precision import trees

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("mode", MODES)
def test_all_finite_sees_one_bad_number(mode, dtype, bad):
    tree = {"a": [ops.ones((2, 3), dtype)], "b": (ops.ones(4, "int32"), ops.ones((), dtype))}
    check = compiled(kmp.all_finite, mode)
    assert number(check(tree))
    tree["a"][0] = ops.cast(ops.array([[1, 1, 1], [1, bad, 1]], "float32"), dtype)
    assert not number(check(tree))


@pytest.mark.only("torch")
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_all_finite_of_float8(dtype):
    import torch

    good, bad = (torch.tensor([1.0, x]).to(getattr(torch, dtype)) for x in (2.0, NAN))
    assert kmp.all_finite(good) and not kmp.all_finite([good, bad])


@pytest.mark.parametrize("last", [INF, NAN])
def test_all_finite_looks_at_the_last_leaf(last):
    assert not number(kmp.all_finite([ops.ones(3), ops.array([1.0, last])]))


@pytest.mark.parametrize(
    "tree, expected",
    [
        ([], True),
        ({}, True),
        ([None, {"a": None}], True),
        ([np.array([1, 2]), True, 3], True),
        ([1.0, 2.0], True),
        ([1.0, NAN], False),
        (INF, False),
        (np.float32([1, 3e38]), True),
        ([None, np.float32([INF])], False),
        ([np.zeros((0, 3), "float32")], True),
        ([np.zeros((0, 3), "float32"), NAN], False),
    ],
    ids=str,
)
def test_all_finite_of_python_and_numpy(tree, expected):
    assert bool(number(kmp.all_finite(tree))) is expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("mode", MODES)
def test_the_largest_number_of_a_format_is_finite(mode, dtype):
    """Whatever sums or squares in order to check would overflow here."""
    largest = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38}[dtype]
    tree = [ops.cast(ops.full((64,), largest, "float32"), dtype)]
    assert number(compiled(kmp.all_finite, mode)(tree))


@pytest.mark.only("tensorflow")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [1.0, NAN])
def test_all_finite_of_sparse_gradients(mode, bad):
    import tensorflow as tf

    def check(values):
        return kmp.all_finite([tf.IndexedSlices(values, tf.constant([1, 1]), tf.constant([9, 2]))])

    values = tf.constant([[1.0, 2.0], [3.0, bad]])
    assert number(compiled(check, mode)(values)) == np.isfinite(bad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pred", [True, False])
def test_select_tree(mode, pred):
    """NaN in the leaf that is not chosen does no harm, and dtypes stay."""
    left = {"x": ops.array([1.0, 2.0]), "y": [ops.array(7, "int32"), ops.ones(2, "float16")]}
    right = keras.tree.map_structure(ops.zeros_like, left)
    (right if pred else left)["x"] = ops.array([NAN, INF])
    chosen = compiled(kmp.select_tree, mode)(ops.convert_to_tensor(pred), left, right)
    expected = left if pred else right
    keras.tree.assert_same_structure(chosen, expected)
    for x, y in zip(keras.tree.flatten(chosen), keras.tree.flatten(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(ops.convert_to_numpy(x), ops.convert_to_numpy(y))


@pytest.mark.parametrize("pred", [True, False])
def test_select_tree_keeps_named_tuples_and_none(pred):
    rule = kmp.DynamicLossScale()
    old = rule.init()
    new = rule.next(old, False)
    chosen, nothing = kmp.select_tree(pred, (new, None), (old, None))
    assert isinstance(chosen, kmp.ScaleState)
    assert nothing is None
    assert number(chosen.scale) == (2.0**14 if pred else 2.0**15)


@pytest.mark.parametrize(
    "left, right",
    [
        ([1.0], [1.0, 2.0]),
        ({"a": 1.0}, {"b": 1.0}),
        ([1.0, [2.0]], [1.0, 2.0]),
        ([1.0], [[2.0, 3.0]]),
        ([None, 1.0], [2.0, 1.0]),
        ([2.0, 1.0], [None, 1.0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("pred", [True, False])
def test_select_tree_refuses_different_structures(pred, left, right):
    with pytest.raises(ValueError, match=r"mismatch|Expected an instance|same (nested )?structure"):
        kmp.select_tree(pred, left, right)


def test_select_tree_refuses_a_mask():
    with pytest.raises(ValueError, match=r"(?s)boolean scalar.*shape=\(2,\).*ops.all\(pred\)"):
        kmp.select_tree(ops.array([True, False]), ops.ones(2), ops.zeros(2))


@pytest.mark.only("tensorflow", "jax")
@pytest.mark.parametrize("mode", COMPILED_MODES)
def test_select_tree_takes_a_traced_condition(mode):
    def largest(x, y):
        return kmp.select_tree(ops.sum(x) > ops.sum(y), {"a": x}, {"a": y})["a"]

    x, y = ops.array([1.0, 5.0]), ops.array([4.0, 1.0])
    np.testing.assert_array_equal(compiled(largest, mode)(x, y), [1.0, 5.0])


def test_multiply_leaves_none_and_integers():
    count, rule = ops.array([3], "int32"), kmp.StaticLossScale(2)
    doubled = rule.scale([None, count, ops.array([1.5])], rule.init())
    assert doubled[0] is None
    assert doubled[1] is count
    np.testing.assert_array_equal(ops.convert_to_numpy(doubled[2]), [3.0])


@pytest.mark.parametrize(
    "given, expected",
    [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32")],
)
def test_at_least_float32(given, expected):
    x = ops.ones(2, given)
    cast = trees.at_least_float32(x)
    assert keras.backend.standardize_dtype(cast.dtype) == expected
    assert (cast is x) == (given == expected)


def test_at_least_float32_of_a_python_number():
    assert keras.backend.standardize_dtype(trees.at_least_float32(3.0).dtype) == "float32"


@pytest.mark.parametrize(
    "x, expected",
    [(1.0, True), (1, False), (True, False), (None, False), (np.float16(1), True)],
    ids=repr,
)
def test_is_float(x, expected):
    assert trees.is_float(x) is expected


def test_complex_numbers_are_scaled_and_checked_by_both_parts():
    x = ops.convert_to_tensor(np.array([1 + 2j, 3 - 4j], "complex64"))
    product = kmp.StaticLossScale(0.5).scale(x, kmp.StaticLossScale(0.5).init())
    np.testing.assert_array_equal(ops.convert_to_numpy(product), [0.5 + 1j, 1.5 - 2j])
    assert number(kmp.all_finite(x))
    for bad in (complex(np.inf, 0), complex(0, np.nan)):
        assert not number(kmp.all_finite(ops.convert_to_tensor(np.array([bad], "complex64"))))
