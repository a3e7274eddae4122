"""The model that a command works on: imported, built, and put under a policy."""

import keras
import numpy as np
import pytest
from test_bench import POLICIES, build

import kmp
from kmp.cli.building import build_under, load


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


def test_bfloat16_parameters_are_updated_in_float32():
    model, *_ = build_under(build, "bfloat16", seed=3)
    assert isinstance(model.optimizer, kmp.LossScaleOptimizer)
    assert {v.dtype for v in model.trainable_variables} == {"bfloat16"}
    model.optimizer.build(model.trainable_variables)
    assert model.optimizer.rounding_seed is not None and not model.optimizer.divides_gradients
