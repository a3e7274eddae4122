"""The small models that `bench` and `certify` train: plain Keras, without policies of their own.

None of them ends in an activation; their losses take logits or plain numbers.
"""

from collections.abc import Sequence

import keras
from keras import layers


def mlp(features: int, hidden: Sequence[int], outputs: int) -> keras.Model:
    """Dense layers: float[batch, features] -> float[batch, outputs]."""
    stack = [layers.Dense(units, activation="relu") for units in hidden]
    return keras.Sequential([keras.Input((features,)), *stack, layers.Dense(outputs)])


def cnn(shape: tuple[int, int, int], filters: Sequence[int], outputs: int) -> keras.Model:
    """Convolutions with BatchNormalization: float[batch, *shape] -> float[batch, outputs]."""
    model = keras.Sequential([keras.Input(shape)])
    for number in filters:
        model.add(layers.Conv2D(number, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization(momentum=0.9))
        model.add(layers.ReLU())
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(outputs))
    return model


def transformer(vocabulary: int, context: int, width: int, blocks: int) -> keras.Model:
    """A causal language model: int[batch, context] -> logits, float[batch, context, vocabulary].

    Its attention has dropout: without it, Keras calls a fused attention that JAX does not have for
    float16 on CPUs.
    """
    tokens = keras.Input((context,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(tokens)
    x = _Positions()(x)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(num_heads=4, key_dim=width // 4, dropout=0.1)
        y = attention(y, y, use_causal_mask=True)
        x = layers.Add()([x, y])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
        x = layers.Add()([x, y])
    x = layers.LayerNormalization()(x)
    return keras.Model(tokens, layers.Dense(vocabulary)(x))


def cross_entropy() -> keras.losses.Loss:
    """The loss of logits against class numbers."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class _Positions(layers.Layer):
    """Adds a learned vector for each position in the context."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer="uniform", name="table")

    def call(self, x):
        return x + self.table
