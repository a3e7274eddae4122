"""The models that the benchmarks train, each with a batch of random data."""

from collections.abc import Callable

import keras
import numpy as np
from keras import layers

WORDS = 30_000


def _batch(model: keras.Model, size: int, labels: tuple[int, ...], classes: int):
    random = np.random.default_rng(0)
    shape = (size, *model.input_shape[1:])
    if model.inputs[0].dtype == "int32":
        x = random.integers(0, classes, shape).astype("int32")
    else:
        x = random.normal(size=shape).astype("float32")
    return x, random.integers(0, classes, (size, *labels)).astype("int32")


def _mlp(widths: list[int], features: int) -> keras.Model:
    hidden = [layers.Dense(width, activation="relu") for width in widths]
    head = layers.Dense(10, dtype="float32")
    return keras.Sequential([keras.Input((features,)), *hidden, head])


def mlp(size: int = 128):
    """784-1024-1024-10, 1.9 million parameters: memory-bound, the worst case for an optimizer."""
    model = _mlp([1024, 1024], 784)
    return model, *_batch(model, size, (), 10)


def large_mlp(size: int = 128):
    """Five layers of 2048, 21 million parameters."""
    model = _mlp([2048] * 5, 2048)
    return model, *_batch(model, size, (), 10)


def cnn(size: int = 64):
    """Three convolutions with BatchNormalization, 114,000 parameters."""
    inputs = keras.Input((16, 16, 3))
    x = inputs
    for filters in (32, 64, 128):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.MaxPooling2D()(x)
    outputs = layers.Dense(10, dtype="float32")(layers.Flatten()(x))
    model = keras.Model(inputs, outputs)
    return model, *_batch(model, size, (), 10)


def resnet50(size: int = 32):
    """ResNet-50 as Keras ships it, 26 million parameters in 214 trainable variables."""
    model = keras.applications.ResNet50(weights=None, input_shape=(224, 224, 3))
    return model, *_batch(model, size, (), 1000)


def decoder(blocks: int, width: int, heads: int, words: int, length: int) -> keras.Model:
    """A decoder-only transformer with a float32 head."""
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(words, width)(inputs)
    for _ in range(blocks):
        attended = layers.LayerNormalization()(x)
        attended = layers.MultiHeadAttention(heads, width // heads)(
            attended, attended, use_causal_mask=True
        )
        x = layers.Add()([x, attended])
        hidden = layers.LayerNormalization()(x)
        hidden = layers.Dense(4 * width, activation="gelu")(hidden)
        x = layers.Add()([x, layers.Dense(width)(hidden)])
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(words, dtype="float32")(x))


def transformer(size: int = 32):
    """Four blocks of width 128 over 64 tokens, 1.3 million parameters."""
    model = decoder(4, 128, 4, 2_000, 64)
    return model, *_batch(model, size, (64,), 2_000)


def large_transformer(size: int = 8):
    """Twelve blocks of width 768 over 512 tokens and 20,000 words, 116 million parameters."""
    model = decoder(12, 768, 12, 20_000, 512)
    return model, *_batch(model, size, (512,), 20_000)


MODELS: dict[str, Callable] = {
    f.__name__: f for f in (mlp, large_mlp, cnn, resnet50, transformer, large_transformer)
}
