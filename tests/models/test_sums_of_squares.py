"""Norms in float16: they are found, and left in float32 by a conversion."""

import keras
import numpy as np
import pytest
from audited import float16, model_of  # noqa: F401
from keras import layers, ops
from oracle import BACKEND, few

import kmp
from kmp._keras import path_of

WIDTH = 1024


def turned(x):
    return ops.take(x, np.arange(WIDTH)[::-1].copy(), axis=1)


def lengths(x):
    return ops.sqrt(ops.sum(x * x, -1, keepdims=True))


# `ops.norm` on PyTorch adds up in float32, and rounds the root.
SPELLED = {
    "square": lambda x: x * ops.rsqrt(ops.sum(ops.square(x), -1, keepdims=True)),
    "product": lambda x: x / lengths(x),
    "power": lambda x: x / ops.sqrt(ops.sum(ops.power(x, 2), -1, keepdims=True)),
    "operator": lambda x: x / ops.sqrt(ops.sum(x**2, -1, keepdims=True)),
    "normalize": ops.normalize,
    "looked up": lambda x: x * ops.rsqrt(ops.sum(turned(ops.square(x)), -1, keepdims=True)),
    **({} if BACKEND == "torch" else {"norm": lambda x: x / ops.norm(x, axis=-1, keepdims=True)}),
}
SOUND = {
    "cast before": lambda x: x / ops.cast(lengths(ops.cast(x, "float32")), x.dtype),
    "a mean": lambda x: x / ops.sqrt(ops.mean(ops.square(x), -1, keepdims=True)),
    "few": lambda x: ops.reshape(ops.normalize(ops.reshape(x, (-1, 8, 128))), (-1, WIDTH)),
    "a sum of other things": lambda x: x / ops.sum(ops.relu(x) * 0.5, -1, keepdims=True),
}


def of_squares(model):
    return kmp.audit(model).of_kind("sum of squares")


def wide(norm):
    return model_of(layers.Dense(WIDTH, name="wide"), norm, layers.Dense(8, dtype="float32"))


@pytest.mark.parametrize("how", few(SPELLED, "square", "normalize", "looked up"))
def test_they_are_found_however_they_are_spelled(how):
    model = wide(layers.Lambda(SPELLED[how], name="unit"))
    (found,) = of_squares(model)
    assert found.path == path_of(model.layers[1])
    assert "squares of 1,024 numbers" in found.problem and "is above 8," in found.problem


@pytest.mark.parametrize("how", SOUND)
def test_what_float16_holds_is_none(how):
    assert not of_squares(wide(layers.Lambda(SOUND[how])))


def test_nor_are_keras_own_normalizations_or_those_of_few_numbers():
    own = layers.LayerNormalization(), layers.GroupNormalization(8), layers.RMSNormalization()
    model = model_of(layers.Dense(WIDTH), *own, layers.Dense(128), layers.UnitNormalization())
    assert not of_squares(model)
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert not of_squares(wide(layers.UnitNormalization()))


def test_beyond_the_number_it_names_the_outputs_are_zeros():
    unit = layers.UnitNormalization(dtype="float16")
    sound, lost = (np.full((1, WIDTH), size, "float16") for size in (7.9, 8.1))
    assert np.all(ops.convert_to_numpy(unit(sound)) > 0)
    assert np.all(ops.convert_to_numpy(unit(lost)) == 0)


def test_an_operation_of_a_functional_model_is_named_and_is_sound_after_a_cast():
    inputs = keras.Input((8,))
    hidden = layers.Dense(WIDTH)(inputs)
    (found,) = of_squares(keras.Model(inputs, ops.normalize(hidden)))
    assert "normalize" in found.path
    assert found.advice == 'Square keras.ops.cast(x, "float32") in place of x.'
    assert not of_squares(keras.Model(inputs, ops.normalize(ops.cast(hidden, "float32"))))


class Scaled(layers.Layer):
    def __init__(self, shape, **kwargs):
        super().__init__(**kwargs)
        self.gain = self.add_weight(name="gain", shape=shape, initializer="ones")

    def call(self, x):
        return self.gain * x / lengths(x)


def test_a_conversion_leaves_them_in_float32_unless_they_have_many_weights():
    keras.config.set_dtype_policy("float32")
    model = wide(layers.UnitNormalization(name="unit"))
    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32") * 100
    expected = model.predict(x, verbose=0)
    report = kmp.to_mixed_precision(model, "mixed_float16")
    (row,) = [each for each in report.rows if each.path.endswith("unit")]
    assert row.reason == "adds up squares beyond 65504"
    assert model.layers[1].compute_dtype == "float32" and not of_squares(model)
    found = model.predict(x, verbose=0)
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())

    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert model.layers[1].compute_dtype == "bfloat16"

    keras.config.set_dtype_policy("float32")
    few_weights, many = wide(Scaled((WIDTH,))), wide(Scaled((2, 1, WIDTH)))
    for each in (few_weights, many):
        kmp.to_mixed_precision(each, "mixed_float16")
    assert few_weights.layers[1].compute_dtype == "float32" and not of_squares(few_weights)
    (found,) = of_squares(many)
    assert many.layers[1].compute_dtype == "float16"
    assert found.advice.startswith("Square") and found.advice.endswith('dtype="float32".')


class Counting(layers.Layer):
    """A norm, and a variable that it reads and writes back."""

    def build(self, shape):
        self.seen = self.add_weight(name="seen", initializer="zeros", trainable=False)

    def call(self, x):
        self.seen.assign(self.seen * 0.9 + ops.cast(ops.mean(x), self.seen.dtype))
        return x / lengths(x)


def test_what_a_layer_loses_in_any_half_precision_is_the_reason():
    keras.config.set_dtype_policy("float32")
    model = wide(Counting(name="unit"))
    report = kmp.to_mixed_precision(model, "mixed_float16")
    (row,) = [each for each in report.rows if each.path.endswith("unit")]
    assert row.reason.startswith("updates its state") and row.after == "float32"
