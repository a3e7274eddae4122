"""Which layers make a model's outputs, and stay in full precision."""

import keras
import numpy as np
import pytest
from converted import Raw, X, compute_dtypes, sequential
from keras import layers

import kmp


def test_heads_are_found_behind_softmax_dropout_and_merges():
    inputs = keras.Input((6,))
    trunk = layers.Dense(6, name="trunk")(inputs)
    left, right = layers.Dense(6, name="left")(trunk), layers.Dense(6, name="right")(trunk)
    merged = layers.Dropout(0.1)(layers.Add()([left, keras.ops.relu(right)]))
    model = keras.Model(inputs, layers.Softmax(name="softmax")(merged))
    kmp.to_mixed_precision(model, "mixed_float16")
    dtypes = compute_dtypes(model)
    assert dtypes["trunk"] == "float16"
    assert {dtypes[name] for name in ("left", "right", "softmax", "dropout")} == {"float32"}


def test_the_head_of_a_nested_model_is_found():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(4, name="a"), layers.Dense(2)])
    model = keras.Sequential([keras.Input((6,)), layers.Dense(6, name="b"), inner])
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert inner.layers[1].compute_dtype == "float32"
    assert {compute_dtypes(model)[name] for name in "ab"} == {"bfloat16"}


def test_the_head_of_a_subclassed_model_is_the_layer_called_last():
    model = Raw()
    model(X * 1e6)
    call = keras.Layer.__call__
    kmp.to_mixed_precision(model, "mixed_float16")
    assert keras.Layer.__call__ is call
    dtypes = compute_dtypes(model)
    assert (dtypes["body"], dtypes["head"]) == ("float16", "float32")
    assert model.compute_dtype == "float32"  # or it would cast 1e6 before it is rescaled
    assert np.isfinite(keras.ops.convert_to_numpy(model(X * 1e6))).all()


class Untraceable(Raw):
    def call(self, x):
        if isinstance(x, keras.KerasTensor) or not hasattr(x, "shape"):
            raise RuntimeError("cannot be traced")
        return self.body(self.head(keras.ops.convert_to_tensor(keras.ops.convert_to_numpy(x))))


@pytest.mark.only("tensorflow", "jax")  # torch traces with tensors that hold numbers
def test_where_the_model_cannot_be_traced_the_layer_created_last_is_the_head():
    model = Untraceable()
    for layer in (model.head, model.body):
        layer.build((None, 6 if layer is model.head else 2))
    model.built = True
    kmp.to_mixed_precision(model, "mixed_bfloat16")
    assert (model.head.compute_dtype, model.body.compute_dtype) == ("bfloat16", "float32")


def test_an_output_dtype_is_honoured_at_the_outputs():
    for policy, expected in (
        ("p=f32,c=bf16,o=bf16", "bfloat16"),
        ("p=f32,c=bf16,o=f32", "float32"),
        ("p=f32,c=bf16,o=f16", "float16"),
        ("mixed_bfloat16", "float32"),
    ):
        model = sequential()
        kmp.to_mixed_precision(model, policy)
        assert keras.backend.standardize_dtype(model(X).dtype) == expected, policy
        assert str(model.predict(X, verbose=0).dtype) == expected
        assert model.layers[0].compute_dtype == "bfloat16"
