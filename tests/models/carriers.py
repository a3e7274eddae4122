"""Layers that carry ids to a table, and models of them that return the ids that arrived there.

The table has two numbers for each id, its quotient and its remainder by 64, which half precision
holds exactly: so the outputs tell which row was looked up, whatever the table is computed in.
"""

import keras
import numpy as np
from keras import layers, ops

IDS = np.arange(2048, 2560, dtype="float32").reshape(64, 8)  # float16 holds every second of them
WORDS = 6144
TABLE = np.stack(np.divmod(np.arange(WORDS), 64), axis=1).astype("float32")

register = keras.saving.register_keras_serializable(package="carriers")


def words():
    return layers.Embedding(WORDS, 2, name="words")


def head():
    return layers.Dense(2, use_bias=False, kernel_initializer="identity")


def ids_of(outputs):
    """The ids whose rows a model looked up."""
    return ops.convert_to_numpy(outputs).astype("float64") @ [64, 1]


def with_table(model):
    """The model, each of whose tables is `TABLE`."""
    for layer in model._flatten_layers():
        for weight in layer._trainable_variables:
            if tuple(weight.shape) == TABLE.shape:
                weight.assign(TABLE)
    return model


def functional(*stack, inputs=None):
    """A model of layers in a row, the last of which returns rows of the table."""
    x = inputs = keras.Input((8,)) if inputs is None else inputs
    for layer in stack:
        x = layer(x)
    return with_table(keras.Model(inputs, head()(x)))


# What hands ids on


class Absolute(layers.Layer):
    def call(self, ids):
        return ops.abs(ids)


class ToComputeDtype(layers.Layer):
    """Casts by itself, integers too, which Keras leaves alone."""

    def call(self, ids):
        return ops.cast(ids, self.compute_dtype)


def nested(*stack):
    inputs = outputs = keras.Input((8,))
    for layer in stack:
        outputs = layer(outputs)
    return keras.Model(inputs, outputs)


# Each a list of layers and functional operations; the layers must stay in float32.
CARRIERS = {
    "lambda": lambda: [layers.Lambda(lambda ids: ids)],
    "own layer": lambda: [Absolute()],
    "own cast": lambda: [ToComputeDtype()],
    "reshape, flatten": lambda: [layers.Reshape((2, 4)), layers.Flatten()],
    "identity, dropout": lambda: [layers.Identity(), layers.Dropout(0.5)],
    "repeat, permute": lambda: [layers.RepeatVector(1), layers.Permute((2, 1)), layers.Flatten()],
    "padding, cropping": lambda: [
        layers.Reshape((8, 1)),
        layers.ZeroPadding1D(1),
        layers.Cropping1D(1),
        layers.Flatten(),
    ],
    "masking": lambda: [layers.Reshape((8, 1)), layers.Masking(), layers.Flatten()],
    "pooling": lambda: [
        layers.Reshape((8, 1)),
        layers.UpSampling1D(2),
        layers.MaxPooling1D(2),
        layers.Flatten(),
    ],
    "activations": lambda: [layers.Activation("linear"), layers.ReLU()],
    "sum": lambda: [lambda ids: layers.Add()([ids, ops.zeros_like(ids)])],
    "concatenation": lambda: [lambda ids: layers.Concatenate()([ids[:, :4], ids[:, 4:]])],
    "operations": lambda: [
        lambda ids: ops.reshape(ids, (-1, 2, 4)),
        layers.Identity(),
        lambda ids: ops.concatenate([ids[:, 0], ids[:, 1]], axis=-1),
    ],
    "loop": lambda: [layers.Lambda(lambda ids: ops.map(ops.abs, ids), output_shape=(8,))],
    "remainder": lambda: [layers.Lambda(lambda ids: ops.mod(ids, 4096.0))],
    "nested graph": lambda: [nested(layers.Reshape((8,))), layers.Identity()],
    "nested sequence": lambda: [keras.Sequential([layers.Reshape((2, 4)), layers.Flatten()])],
}


# What looks rows up by ids


class Own(layers.Layer):
    """A table of its own."""

    def build(self, shape):
        self.table = self.add_weight(shape=TABLE.shape, name="table")

    def call(self, ids):
        return ops.take(self.table, ops.cast(ids, "int32"), axis=0)

    def compute_output_shape(self, shape):
        return (*shape, 2)


class OneHot(Own):
    """JAX compares floats with 0, 1, 2, ..., and casts nothing to integers."""

    def call(self, ids):
        return ops.matmul(ops.one_hot(ids, WORDS, dtype=self.compute_dtype), self.table)


class Positions(layers.Layer):
    """As on keras.io: a sum of two embeddings, which must be in one dtype."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.words = words()
        self.places = layers.Embedding(8, 2, embeddings_initializer="zeros")

    def build(self, shape):
        self.words.build(shape)
        self.places.build(shape)

    def call(self, ids):
        return self.words(ids) + self.places(ops.arange(8))


class OwnPositions(layers.Layer):
    """A sum of an embedding and a weight of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.words = words()

    def build(self, shape):
        self.words.build(shape)
        self.places = self.add_weight(shape=(8, 2), initializer="zeros", name="places")

    def call(self, ids):
        return self.words(ids) + self.places


class CastsInside(layers.Layer):
    """Casts by itself what its own embedding takes, integers too."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.words = words()

    def build(self, shape):
        self.words.build(shape)

    def call(self, ids):
        return self.words(ops.abs(ops.cast(ids, self.compute_dtype)))


def constant_table(ids):
    return ops.take(ops.convert_to_tensor(TABLE), ops.cast(ids, "int32"), axis=0)


def in_a_loop(ids):
    return ops.map(constant_table, ids)


def under_a_condition(ids):
    return ops.cond(ops.any(ids > 0), lambda: constant_table(ids), lambda: constant_table(0 * ids))


@register
class Inside(keras.Model):
    """A model by its own code, inside another."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.reshape, self.words = layers.Reshape((8,)), words()

    def build(self, shape):
        self.words.build(shape)

    def call(self, ids):
        return self.words(self.reshape(ids))


LOOKUPS = {
    "embedding": words,
    "own table": Own,
    "one-hot": OneHot,
    "positions": Positions,
    "own positions": OwnPositions,
    "casts inside": CastsInside,
    "constant table": lambda: layers.Lambda(constant_table, output_shape=(8, 2)),
    "loop": lambda: layers.Lambda(in_a_loop, output_shape=(8, 2)),
    "condition": lambda: layers.Lambda(under_a_condition, output_shape=(8, 2)),
    "nested graph": lambda: nested(layers.Reshape((8,)), words()),
    "nested model": Inside,
}


# Models by their own code


@register
class Ids(keras.Model):
    """Takes nothing but ids."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.reshape, self.words, self.last = layers.Reshape((8,)), words(), head()

    def call(self, ids):
        return self.last(self.words(self.reshape(ids)))


@register
class Table(keras.Model):
    """Takes a table of ids and features."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.words, self.last = words(), head()
        self.features = layers.Dense(2, kernel_initializer="zeros", name="features")

    def call(self, table):
        features = self.features(table[:, 8:])
        return self.last(self.words(table[:, :8]) + ops.expand_dims(features, 1))


class Two(keras.Model):
    """Takes ids and prices, and multiplies them by Python's operator."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.words, self.last = words(), head()

    def call(self, inputs):
        ids, prices = inputs
        return self.last(self.words(ids) * ops.expand_dims(prices, -1))


TABLES = np.concatenate([IDS, np.linspace(0, 1, 128).reshape(64, 2)], axis=1).astype("float32")


def called(model, x):
    model(x)
    return with_table(model)
