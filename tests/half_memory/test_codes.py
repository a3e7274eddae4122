"""Slots of 8 bits: exact where a code stands, unbiased between two, and bounded over six orders."""

import keras
import numpy as np
import pytest
from keras import ops
from oracle import BACKEND, few

import kmp
from kmp._backend import backend
from kmp.half_memory.codes import (
    NON_NEGATIVE,
    SIGNED,
    Groups,
    decode,
    encode,
    groups_of,
    scales_of,
)
from kmp.half_memory.rounding import random_bits
from kmp.half_memory.views import one_update

pytestmark = pytest.mark.gpu

CODES = {"signed": SIGNED, "non-negative": NON_NEGATIVE}
GROUPS = Groups(0, 32)


def uniform(shape, step=0):
    bits = random_bits(shape, 0, step, 0)
    return (ops.cast(bits & (2**16 - 1), "float32") + 0.5) * 2.0**-16


def encoded(x, code, groups, u):
    scales = scales_of(*groups.largest(x))
    return encode(x, scales, code, groups, u), ops.cast(scales, "bfloat16")


def coded(x, code, u, groups=GROUPS):
    """What a number is once it is encoded and decoded, in float64."""
    parts = encoded(ops.convert_to_tensor(x), code, groups, u)
    return np.array(ops.convert_to_numpy(decode(*parts, code, groups))).astype("float64")


def table(code):
    """What each code stands for beside a scale of 1, in NumPy."""
    levels, power, offset = {"int8": (127, 12, 44), "uint8": (255, 20, 72)}[code.dtype]
    magnitudes = ((np.arange(levels + 1) + offset) / (levels + offset)) ** power
    magnitudes[0] = 0
    return np.concatenate([-magnitudes[:0:-1], magnitudes]) if code is SIGNED else magnitudes


@pytest.mark.core
@pytest.mark.parametrize("name", CODES)
def test_what_a_code_stands_for_stays(name):
    code, values = CODES[name], table(CODES[name])
    for scale in (2.0**-60, 1.0, 3.0):
        x = np.zeros((32, len(values)), "float32")
        x[0], x[1] = values * scale, scale
        np.testing.assert_allclose(coded(x, code, 0.5)[0], x[0], rtol=1e-5)
        decoded = coded(x, code, 0.5).astype("float32")
        np.testing.assert_array_equal(coded(decoded, code, 0.5), decoded)


@pytest.mark.parametrize("name", CODES)
def test_a_number_becomes_one_of_its_neighbours_and_the_mean_is_right(name):
    code, values = CODES[name], table(CODES[name])
    values = values[values >= 0]
    number = 1 << 14
    for share in (0.9, 0.11, 1e-3, 1e-6):
        x = np.full((32, number), share, "float32")
        x[0] = 1
        found = coded(x, code, uniform(x.shape))[1:].ravel()
        above = np.searchsorted(values, share)
        low, high = values[above - 1], values[above]
        assert np.all(np.isclose(found, low, rtol=1e-5) | np.isclose(found, high, rtol=1e-5))
        chance = (share - low) / (high - low)
        error = (high - low) * np.sqrt(chance * (1 - chance) / found.size)
        assert abs(found.mean() - share) < 5 * error + 1e-5 * share


def test_a_second_moment_above_zero_stays_above_zero():
    x = np.full((32, 64), 1e-36, "float32")
    x[0], x[1] = 1, 0
    found = coded(x, NON_NEGATIVE, 0.99)
    assert np.all(found[2:] > 0) and np.all(found[1] == 0)
    assert np.all(coded(x, SIGNED, 0.99)[2:] == 0)  # a momentum may


@pytest.mark.parametrize("largest", [2.0**-126, 2.0**-90, 3e38])
def test_scales_of_any_size(largest):
    x = np.full((32, 64), np.float32(largest))
    found = coded(x, SIGNED, 0.5)
    assert np.all(np.isfinite(found)) and np.all(found <= largest * 1.01)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_hidden(bad):
    x = np.ones((64, 64), "float32")
    x[3, 5] = bad
    found = coded(x, SIGNED, 0.5)
    assert np.isnan(found[:32, 5]).any() and np.isfinite(np.delete(found, 5, 1)).all()
    assert np.isfinite(found[32:]).all()


@pytest.mark.core
@pytest.mark.parametrize(
    ("shape", "shard", "by_row", "expected"),
    [
        ((512, 2048), (512, 2048), False, Groups(0, 32)),
        ((512, 2048), (512, 2048), True, Groups(1, 32)),
        ((3, 3, 64, 128), (3, 3, 64, 128), False, Groups(2, 32)),
        ((768, 12, 64), (768, 12, 64), False, Groups(0, 32)),
        ((50257, 768), (50257, 768), False, Groups(1, 32)),  # divided by 29 and 1733
        ((8000, 64), (2000, 64), False, Groups(0, 25)),  # no group lies on two devices
        ((8192,), (8192,), False, Groups(0, 32)),
        ((63, 64), (63, 64), False, None),  # fewer than 4096 numbers
        ((4099, 7), (4099, 7), False, None),  # no groups of 8
    ],
)
def test_which_numbers_share_a_scale(shape, shard, by_row, expected):
    if expected == Groups(1, 32) and not by_row:
        expected = Groups(0, 29)
    assert groups_of(shape, shard, by_row) == expected


def largest_step(orders, steps=400):
    """In learning rates: Adam on quadratics whose gradients span orders within each group."""
    random = np.random.default_rng(0)
    steepness = 10.0 ** -(orders * random.uniform(size=(64, 128)))
    steepness = ops.convert_to_tensor(steepness.astype("float32"))
    noise = lambda step: uniform(steepness.shape, 3 * step + 2) * 2 - 1  # noqa: E731

    def body(step, state):
        weight, momentum, velocity, largest = state
        momentum = decode(*momentum, SIGNED, GROUPS)
        velocity = decode(*velocity, NON_NEGATIVE, GROUPS)
        gradient = steepness * (weight - 1 + noise(step))
        momentum = momentum + 0.1 * (gradient - momentum)
        velocity = velocity + 0.001 * (gradient * gradient - velocity)
        t = ops.cast(step + 1, "float32")
        rate = ops.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        change = rate * momentum / (ops.sqrt(velocity) + 1e-30)
        coded = (
            encoded(momentum, SIGNED, GROUPS, uniform(weight.shape, 3 * step)),
            encoded(velocity, NON_NEGATIVE, GROUPS, uniform(weight.shape, 3 * step + 1)),
        )
        return weight - 1e-3 * change, *coded, ops.maximum(largest, ops.max(ops.abs(change)))

    zeros = ops.zeros(steepness.shape)
    start = [encoded(zeros, code, GROUPS, 0.5) for code in (SIGNED, NON_NEGATIVE)]
    *_, largest = ops.fori_loop(0, steps, body, (zeros, *start, ops.zeros(())))
    return float(largest)


@pytest.mark.only("jax")
@pytest.mark.parametrize("orders", few([3, 6], 6))
def test_steps_are_bounded_where_gradients_span_orders(orders):
    """Of codes that are squares and fourth powers, the largest was 39 learning rates at six."""
    assert largest_step(orders) < 3.5


def of(optimizer, shape=(64, 96), dtype="float32", name="kernel", **kwargs):
    variable = keras.Variable(np.ones(shape), dtype=dtype, name=name)
    scaled = kmp.scaled(optimizer, "none", slot_dtype="int8", **kwargs)
    scaled.build([variable])
    slots = scaled.inner_optimizer.variables[2:]
    return {v.name.removeprefix(f"{variable.path}_"): v for v in slots}


def test_slots_that_may_be_coded_are_and_others_are_not():
    adam = of(keras.optimizers.Adam(use_ema=True))
    assert {name: v.dtype for name, v in adam.items()} == {
        "average": "float32",
        "momentum": "int8",
        "momentum_scales": "bfloat16",
        "velocity": "uint8",
        "velocity_scales": "bfloat16",
    }
    assert tuple(adam["momentum_scales"].shape) == (2, 96)
    amsgrad = of(keras.optimizers.Adam(amsgrad=True))  # of two squares it keeps the larger
    assert (amsgrad["velocity"].dtype, amsgrad["velocity_hat"].dtype) == ("bfloat16",) * 2
    assert amsgrad["momentum"].dtype == "int8"
    row = of(keras.optimizers.Adam(), name="embeddings")
    assert tuple(row["momentum_scales"].shape) == (64, 3)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: keras.optimizers.Ftrl(), "bfloat16"),  # weights in disguise
        (lambda: keras.optimizers.RMSprop(centered=True), "bfloat16"),  # a small difference
    ],
)
def test_slots_that_would_carry_their_errors_into_weights_are_not_coded(make, dtype):
    assert {v.dtype for v in of(make()).values()} == {dtype}


def test_small_slots_and_those_of_float64_are_not_coded():
    assert {v.dtype for v in of(keras.optimizers.Adam(), shape=(8, 8)).values()} == {"bfloat16"}


def test_an_accumulator_begins_where_it_should():
    slots = of(keras.optimizers.Adagrad(initial_accumulator_value=0.1))
    parts = (ops.convert_to_tensor(v) for v in slots.values())
    first = ops.convert_to_numpy(decode(*parts, NON_NEGATIVE, Groups(0, 32)))
    np.testing.assert_allclose(first, 0.1, rtol=2.0**-8)


def test_a_second_moment_fades_as_in_float32():
    """Rounded to nearest it would stay: it fades by 0.1% a step, and a code's step is 6%."""
    variable = keras.Variable(np.ones((64, 64)), dtype="float32", name="kernel")
    scaled = kmp.scaled(keras.optimizers.Adam(), "none", slot_dtype="int8")
    scaled.build([variable])
    gradient = np.linspace(0.5, 1, 64 * 64).reshape(64, 64).astype("float32")
    (view,) = [v for v in scaled.stored.slots.values() if "velocity" in v.name]
    scaled.apply([ops.convert_to_tensor(gradient)], [variable])
    before = ops.convert_to_numpy(view.read()).mean()
    for _ in range(20):
        scaled.apply([ops.zeros((64, 64))], [variable])
    after = ops.convert_to_numpy(view.read()).mean()
    np.testing.assert_allclose(after / before, 0.999**20, atol=5e-3)


class Own(keras.optimizers.SGD):
    slots_of_8_bits = {"momentum": "signed"}  # noqa: RUF012


class Undeclared(keras.optimizers.SGD):
    pass


def test_classes_of_users_declare_their_own():
    assert of(Own(momentum=0.9))["momentum"].dtype == "int8"
    assert of(Undeclared(momentum=0.9))["momentum"].dtype == "bfloat16"
    with pytest.raises(ValueError, match=r"slots_of_8_bits\['momentum'\].*signed"):
        of(type("Wrong", (Own,), {"slots_of_8_bits": {"momentum": "int8"}})(momentum=0.9))


# What XLA makes kernels of


def test_maxima_of_several_tensors():
    x = np.abs(np.random.default_rng(0).normal(size=(2, 4, 8, 3))).astype("float32")
    x[0, 0, 0, 0], x[1, 1, :, 1] = np.inf, 0
    found = backend.maxima([ops.convert_to_tensor(each) for each in x], 1)
    np.testing.assert_array_equal([ops.convert_to_numpy(each) for each in found], x.max(2))


def test_a_group_that_is_not_finite_in_one_slot_is_so_in_all():
    variable = keras.Variable(np.ones((64, 64)), dtype="float32", name="kernel")
    scaled = kmp.scaled("adam", "none", slot_dtype="int8")
    scaled.build([variable])
    first, second = scaled.stored.slots.values()
    value = np.ones((64, 64), "float32")
    value[40, 5] = np.inf
    with one_update():
        first.assign(ops.convert_to_tensor(value))
        second.assign(ops.ones((64, 64)))
    expected = np.zeros((64, 64), bool)
    expected[32:, 5] = True
    for view in (first, second):
        np.testing.assert_array_equal(np.isnan(ops.convert_to_numpy(view.read())), expected)


@pytest.mark.skipif(BACKEND != "jax", reason="reads JAX's program")
@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
def test_one_reduction_finds_all_scales_and_random_numbers_come_after_it(policy):
    import jax

    variable = keras.Variable(np.ones((64, 64)), dtype=policy, name="kernel")
    scaled = kmp.scaled("adam", "none", slot_dtype="int8")
    scaled.build([variable])
    own = [v.value for v in scaled.variables]
    program = jax.make_jaxpr(scaled.stateless_apply)(own, [variable.value], [variable.value])
    of_two = [each for each in program.eqns if each.primitive.name == "reduce"]
    assert [len(each.outvars) for each in of_two if each.outvars[0].aval.shape] == [2]
    (barrier,) = [
        each
        for each in program.eqns
        if each.primitive.name == "optimization_barrier" and len(each.invars) == 3
    ]
    *largest, key = barrier.outvars
    assert [x.aval.shape for x in largest] == [(2, 64)] * 2
    used = [x for each in program.eqns for x in each.invars]
    assert all(any(x is y for y in used) for x in (*largest, key))


@pytest.mark.skipif(BACKEND != "jax", reason="reads JAX's program")
@pytest.mark.parametrize("accumulate", [None, 2])
def test_no_scale_is_read_before_the_step_is_decided(accumulate):
    """XLA for a TPU spreads them over their numbers, and would do so before the forward pass."""
    import jax

    variable = keras.Variable(np.ones((64, 64)), dtype="bfloat16", name="kernel")
    inner = keras.optimizers.Adam(gradient_accumulation_steps=accumulate)
    scaled = kmp.scaled(inner, "none", slot_dtype="int8")
    scaled.build([variable])
    own = [v.value for v in scaled.variables]
    program = jax.make_jaxpr(scaled.stateless_apply)(own, [variable.value], [variable.value])
    for scales in [x for x in program.jaxpr.invars if x.aval.shape == (2, 64)]:
        readers = [each for each in program.eqns if any(x is scales for x in each.invars)]
        barriers = [x for x in readers if x.primitive.name == "optimization_barrier"]
        assert barriers and all(str(x.invars[1].aval) == "bool[]" for x in barriers)
        others = [
            x for x in readers if x not in barriers
        ]  # they keep the old ones if it is skipped
        assert all(x.params.get("name") == "_where" for x in others), others


def test_nearest_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="never move"):
        kmp.scaled("adam", slot_dtype="int8", rounding="nearest")
