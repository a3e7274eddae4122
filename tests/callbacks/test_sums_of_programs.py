"""The sums within a program that JAX traces are rewritten, whatever program they are in."""

import functools

import keras
import numpy as np
import pytest

jax = pytest.importorskip("jax")
if keras.backend.backend() == "jax":
    from kmp._backend.jax.sums import sums_in_float32
lax, jnp = jax.lax, jax.numpy

pytestmark = pytest.mark.only("jax")
ONES = 4096


def nested(x):
    """A sum in each kind of program that JAX has within another."""

    def total(x):
        return lax.reduce(x, np.zeros((), x.dtype), lax.add, (0, 1))

    @jax.custom_jvp
    def own(x):
        return total(x)

    own.defjvps(None)
    return {
        "jit": jax.jit(total)(x),
        "checkpoint": jax.checkpoint(total)(x),
        "cond": lax.cond(x[0, 0] > 0, total, lambda x: x[0, 0], x),
        "scan": lax.scan(lambda carry, _: (carry + total(x) / ONES, None), x[0, 0], length=2)[0],
        "while": lax.while_loop(lambda c: c < 2, lambda c: c + total(x), x[0, 0] * 0),
        "own": own(x),
        "windows": lax.reduce_window(x, np.zeros((), x.dtype), lax.add, x.shape, (1, 1), "VALID")[
            0, 0
        ],
        "by index": jnp.zeros((2,), x.dtype).at[jnp.zeros(x.size, "int32")].add(x.reshape(-1))[0],
        "none": None,
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sums_within_other_programs(dtype):
    x = jnp.ones((32, ONES // 32), dtype)
    found = jax.jit(sums_in_float32(nested))(x)
    expected = dict.fromkeys(found, ONES) | {"scan": 3, "none": None}
    assert {k: y if y is None else float(y) for k, y in found.items()} == expected
    assert {y.dtype.name for y in found.values() if y is not None} == {dtype}


def gradient(x):
    """Of a number that each step of a scan uses, by all steps."""

    def total(a):
        products = lax.scan(lambda h, x: (h, a * x), a, x)[1]
        return jnp.sum(products.astype("float32"))

    return jax.grad(total)(x[0])


def added(total, x):
    total = total + x
    return total, total


def one_of_two(carry, x):
    total, other = carry
    return (total + x, -other), other


def scan(step, x, **options):
    return lax.scan(step, 0 * x[0], x, **options)


RUNNING_SUMS = {
    "the gradient of what all use": gradient,
    "of blocks that are computed again": jax.checkpoint(gradient),
    "the last": lambda x: scan(added, x)[0],
    "all": lambda x: scan(added, x)[1][-1],
    "from the end": lambda x: scan(added, x, reverse=True)[1][0],
    "beside another": lambda x: lax.scan(one_of_two, (0 * x[0], x[0]), x)[0][0],
    "of a literal": lambda x: scan(lambda total, x: (1 + total, None), x)[0],
    "of several": lambda x: jax.vmap(lambda x: scan(added, x)[0])(x[None])[0],
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("function", RUNNING_SUMS.values(), ids=RUNNING_SUMS)
def test_running_sums_of_scans(dtype, function):
    x = jnp.ones(ONES, dtype)
    found = jax.jit(sums_in_float32(function))(x)
    assert found.dtype == dtype and found == ONES


def test_a_sum_of_two_carries():
    def function(x):
        return lax.scan(lambda carry, _: ((carry[0] + carry[1],) * 2, None), (x, x), length=4)[0]

    one = jnp.ones((), "bfloat16")
    assert [float(x) for x in sums_in_float32(function)(one)] == [16, 16]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "step",
    [
        lambda h, x: (h + h * x, None),  # a step looks at the sum so far
        lambda h, x: (h + x, h),
        lambda h, x: (h, h + x),
        lambda h, x: (x - h, None),
    ],
)
def test_what_is_no_running_sum_stays_as_it_is(dtype, step):
    x = jnp.asarray(np.random.default_rng(0).uniform(0, 0.1, 50), dtype)

    def function(x):
        return lax.scan(step, x[0], x)

    plain = jax.make_jaxpr(function)(x)
    assert str(jax.make_jaxpr(sums_in_float32(function))(x)) == str(plain)


def test_a_program_without_such_sums_stays_the_same():
    """JAX compiles what it has compiled once, and no second program."""
    inner = jax.jit(lambda x: jnp.sum(x) * 2)

    def programs(function):
        equations = jax.make_jaxpr(function)(jnp.ones(4)).jaxpr.eqns
        return [id(each.params["jaxpr"]) for each in equations if "jaxpr" in each.params]

    assert programs(inner) == programs(sums_in_float32(inner)) != []


def test_arguments_and_results_keep_their_structure():
    def step(state, data):
        return {"loss": state[0][0] + data["x"]}, (state[1], [None, *state[0]])

    given = ([1.0], (jnp.ones(2),)), {"x": jnp.ones((), "bfloat16"), "y": None}
    exact, plain = (jax.jit(each)(*given) for each in (sums_in_float32(step), step))
    assert jax.tree.structure(exact) == jax.tree.structure(plain)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), exact, plain)
