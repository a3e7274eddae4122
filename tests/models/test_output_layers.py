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


class Positions(layers.Layer):
    """Adds word and position embeddings, whose dtypes have to agree; knows its shape by itself."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.words = layers.ReversibleEmbedding(7, 4, dtype=self.dtype_policy, name="words")
        self.places = layers.Embedding(5, 4, dtype=self.dtype_policy, name="places")

    def build(self, shape):
        self.words.build(shape)
        self.places.build(shape)

    def call(self, x):
        return self.words(x) + self.places(keras.ops.arange(5))

    def compute_output_shape(self, shape):
        return (*shape, 4)


def test_a_layer_that_shares_its_embedding_with_the_output_stays_with_it():
    """The logits come from the embedding, and so the embedding answers in float32 everywhere."""
    tokens = keras.Input((5,), dtype="int32")
    positions = Positions(name="positions")
    x = layers.Dense(4, name="body")(positions(tokens))
    model = keras.Model(tokens, positions.words(x, reverse=True))
    ids = np.arange(10).reshape(2, 5) % 7
    before = model.predict(ids, verbose=0)
    report = kmp.to_mixed_precision(model, "mixed_float16")
    assert report.kept["positions"] == "shares an output layer"
    dtypes = compute_dtypes(model)
    assert (dtypes["positions"], dtypes["body"]) == ("float32", "float16")
    after = model.predict(ids, verbose=0)
    assert after.dtype == "float32"
    np.testing.assert_allclose(after, before, atol=2e-3)


class Guess(layers.Layer):
    """A head that reads its logits off an embedding which it shares with the beginning."""

    def __init__(self, words, **kwargs):
        super().__init__(**kwargs)
        self.words = words
        self.bias = self.add_weight((7,), name="bias")

    def call(self, x):
        return self.words(x, reverse=True) + self.bias

    def compute_output_shape(self, shape):
        return (*shape[:-1], 7)


def test_what_an_output_layer_shares_stays_with_it():
    tokens = keras.Input((5,), dtype="int32")
    positions = Positions(name="positions")
    x = layers.Dense(4, name="body")(positions(tokens))
    model = keras.Model(tokens, Guess(positions.words, name="guess")(x))
    kmp.to_mixed_precision(model, "mixed_float16")
    dtypes = compute_dtypes(model)
    assert {dtypes[name] for name in ("positions", "words", "guess")} == {"float32"}
    assert dtypes["body"] == "float16"
    assert model.predict(np.ones((2, 5), "int32"), verbose=0).dtype == "float32"


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
