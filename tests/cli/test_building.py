"""The model that a command works on: imported, built, and put under a policy."""

import keras
import numpy as np
import pytest
from test_bench import POLICIES, build

import kmp
from kmp.cli.building import build_under, load, parse_policy
from kmp.cli.options import UsageError


def test_a_policy_gets_the_weights_of_float32():
    models = {p: build_under(build, p, seed=3)[0] for p in [*POLICIES, "float16"]}
    for name, model in models.items():
        for variable, weight in zip(model.weights, models["float32"].weights, strict=True):
            rounded = keras.ops.cast(weight.value, variable.dtype)
            assert np.array_equal(*map(keras.ops.convert_to_numpy, (variable.value, rounded)))
        kind = type(model.optimizer).__name__
        assert (kind == "LossScaleOptimizer") == (name == "mixed_float16")
    assert {v.dtype for v in models["float16"].trainable_variables} == {"float16"}
    assert models["mixed_float16"].layers[0].compute_dtype == "float16"
    assert keras.config.dtype_policy().name == "float32"


def test_a_policy_that_the_function_sets_itself_does_not_stay():
    def opinionated():
        keras.config.set_dtype_policy("mixed_float16")
        return build()

    for policy in ("float32", "mixed_bfloat16"):
        model, *_ = build_under(opinionated, policy, seed=0)
        assert kmp.Policy(policy).compute_dtype == model.layers[0].compute_dtype
        assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    model, *_ = build_under(opinionated, "mixed_float16", seed=0)
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)  # in place of Keras's own
    assert keras.config.dtype_policy().name == "float32"


def test_a_model_that_cannot_be_built_in_half_precision():
    """As one with a `GRU`, whose weights are drawn by a decomposition."""

    def recurrent():
        if keras.config.dtype_policy().name == "float16":
            raise NotImplementedError("no decomposition in float16")
        return build()

    with pytest.raises(UsageError, match=r"cannot be built in float16.*Leave this policy out"):
        build_under(recurrent, "float16", seed=0)
    assert keras.config.dtype_policy().name == "float32"
    assert build_under(recurrent, "mixed_float16", seed=0)  # as the message has it


@pytest.mark.parametrize(
    "path, message",
    [
        ("no_such_module:build", "cannot be imported: No module named"),
        ("test_bench:no_such_function", "my_package.train:build"),
        ("test_bench:POLICIES", "my_package.train:build"),
        ("test_bench", "my_package.train:build"),
    ],
)
def test_a_path_that_leads_nowhere(path, message):
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize(
    "policy, slots, rounding, masters",
    [
        ("bfloat16", {"bfloat16", "float32"}, "stochastic", False),
        ("bfloat16,slot_dtype=float32", {"float32"}, "stochastic", False),
        ("p=bf16,c=bf16,rounding=nearest", {"bfloat16", "float32"}, "nearest", False),
        ("bfloat16,master_weights=true", {"bfloat16", "int16"}, "stochastic", True),
        ("mixed_bfloat16,slot_dtype=bfloat16", {"bfloat16"}, "stochastic", False),
    ],
)
def test_how_half_weights_are_updated(policy, slots, rounding, masters):
    model, *_ = build_under(build, policy, seed=3)
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    assert {v.dtype for v in optimizer.inner_optimizer.variables} - {"int32", "int64"} - {
        "float32"
    } == slots - {"float32"}
    assert optimizer.rounding_seed is not None and not optimizer.divides_gradients
    assert optimizer.half_memory.rounding == rounding
    assert optimizer.half_memory.master_weights == masters
    weights = {v.dtype for v in model.trainable_variables}
    assert weights == ({"float32"} if policy.startswith("mixed") else {"bfloat16", "float32"})


@pytest.mark.parametrize(
    "text, match",
    [
        ("bfloat17", "bfloat17"),
        ("bfloat16,slot_dtype=int4", "slot_dtype"),
        ("bfloat16,rounding=up", "rounding"),
        ("bfloat16,master_weights=maybe", "master_weights"),
    ],
)
def test_a_policy_that_cannot_be_read(text, match):
    with pytest.raises(ValueError, match=match):
        parse_policy(text)
