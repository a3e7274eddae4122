"""The gradient of a word that a batch has often is added up in float32 in a watched `fit`.

In half precision a sum of ones stalls at 256 or 2048. The oracle is the number of times that the
batch has the word: with this loss each adds 1/8 to its gradient.
"""

import keras
import numpy as np
import pytest
from conftest import BACKEND
from keras import layers, ops

import kmp

TIMES, BATCH = 5120, 8
WORDS = np.zeros((BATCH, TIMES // BATCH), "int32")
EMBEDDINGS = [layers.Embedding, getattr(layers, "ReversibleEmbedding", layers.Embedding)]


class Own(keras.Model):
    """A model by its own code, which adds a weight of its own to each vector."""

    def __init__(self):
        super().__init__()
        self.words = layers.Embedding(4, 2, embeddings_initializer="zeros")
        self.shift = self.add_weight(shape=(2,), initializer="zeros", name="shift")

    def build(self, shape):
        self.words.build(shape)

    def call(self, x):
        x = self.words(x)
        x = ops.add(x, ops.cast(self.shift, x.dtype))
        return ops.sum(ops.cast(x, "float32"), axis=1)


def functional(embedding, **dtype):
    words = embedding(4, 2, embeddings_initializer="zeros", **dtype)
    add_up = layers.Lambda(lambda x: ops.sum(ops.cast(x, "float32"), axis=1))
    return keras.Sequential([keras.Input(WORDS.shape[1:], dtype="int32"), words, add_up])


def learned(make, policy, jit, callbacks, method="fit"):
    """How far one step of SGD moves the word, as a share of how far it should.

    Without a list of callbacks `kmp.protect` has to do.
    """
    keras.config.set_dtype_policy(policy)
    model = make()
    optimizer = kmp.scaled("sgd", kmp.DynamicLossScale(initial_scale=1.0), learning_rate=2.0**-10)
    model.compile(optimizer, lambda _, y: ops.sum(y, axis=-1), jit_compile=jit)
    targets = np.zeros((BATCH, 2))
    if callbacks is None:
        kmp.protect(model)
    if method == "fit":
        model.fit(WORDS, targets, batch_size=BATCH, verbose=0, callbacks=callbacks)
    else:
        model.train_on_batch(WORDS, targets)
    (table,) = [v for v in model.trainable_variables if v.shape == (4, 2)]
    return float(-ops.convert_to_numpy(table)[0, 0] * 2**10 / (TIMES / BATCH))


MODELS = {
    "functional": lambda: functional(EMBEDDINGS[0]),
    "reversible": lambda: functional(EMBEDDINGS[1]),
    "own": Own,
}


@pytest.mark.parametrize("jit", [False, True] if BACKEND == "tensorflow" else [None])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", MODELS)
def test_all_of_them_count(name, policy, jit):
    watch = [kmp.callbacks.GradientHealth()]
    assert learned(MODELS[name], policy, jit, watch) == 1


@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_all_of_them_count_without_a_callback(method):
    assert learned(MODELS["functional"], "mixed_bfloat16", None, None, method) == 1


@pytest.mark.only("jax")
@pytest.mark.parametrize("policy, counted", [("mixed_bfloat16", 256), ("mixed_float16", 2048)])
def test_keras_still_counts_a_few_on_jax(policy, counted):
    """In `fit` alone: its train step calls the model's `call` without the scope of its policy."""
    assert learned(MODELS["functional"], policy, None, []) == np.float32(counted / TIMES)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_a_table_in_float32_needs_no_watch(policy):
    """What the limits advise; PyTorch adds up the gradient of a table in bfloat16 in bfloat16."""
    assert learned(lambda: functional(EMBEDDINGS[0], dtype="float32"), policy, None, []) == 1
    if BACKEND == "torch" and policy == "bfloat16":
        watch = [kmp.callbacks.GradientHealth()]
        assert learned(MODELS["functional"], policy, None, watch) == np.float32(256 / TIMES)


class Reads(layers.Layer):
    """Computes in float32 with a frozen weight in bfloat16, and notes what it gets."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x):
        self.got = keras.backend.standardize_dtype(ops.convert_to_tensor(self.scale).dtype)
        return x * ops.cast(self.scale, x.dtype)


@pytest.mark.parametrize("watched", [False, True])
def test_a_frozen_weight_in_half_precision_is_cast_as_ever(watched):
    reads = Reads(dtype=kmp.Policy("p=bf16,c=f32"))
    model = keras.Sequential([keras.Input((2,)), reads, layers.Dense(1)])
    model.compile(kmp.scaled("sgd"), "mse")
    watch = [kmp.callbacks.GradientHealth()] if watched else []
    model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0, callbacks=watch)
    assert reads.got == "float32"


class Exact(layers.Layer):
    """Asks that its weight is not cast."""

    def __init__(self, **kwargs):
        super().__init__(autocast=False, **kwargs)

    def build(self, shape):
        self.number = self.add_weight(shape=(), initializer=keras.initializers.Constant(257.0))

    def call(self, x):
        return ops.cast(self.number, "float32") + 0 * ops.cast(x, "float32")


@pytest.mark.parametrize("watched", [True, False])
def test_a_weight_that_is_not_to_be_cast_is_257_in_a_watched_fit(watched):
    """In bfloat16 it is 256, as in Keras's train step on JAX, and nowhere else."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((1,)), Exact()])
    model.compile(kmp.scaled("sgd", learning_rate=0.0), lambda _, y: ops.mean(y, axis=-1))
    callbacks = [kmp.callbacks.TerminateOnNaN()] if watched else []
    fit = model.fit(np.ones((2, 1)), np.zeros((2, 1)), verbose=0, callbacks=callbacks)
    assert fit.history["loss"] == [257.0 if watched or BACKEND != "jax" else 256.0]
