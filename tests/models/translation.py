"""A small model of the kind of keras.io's translation with a transformer."""

import keras
import numpy as np
from keras import layers, ops

TOKENS = np.random.default_rng(0).integers(1, 11, size=(4, 5)).astype("int32")

register = keras.saving.register_keras_serializable(package="blocks")


@register
class Embedding(layers.Layer):
    """Tokens and positions, as in keras.io's translation with a transformer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tokens = layers.Embedding(11, 6)
        self.positions = layers.Embedding(5, 6)
        self.supports_masking = True

    def call(self, tokens):
        return self.tokens(tokens) + self.positions(ops.arange(ops.shape(tokens)[-1]))

    def compute_mask(self, tokens, mask=None):
        return ops.not_equal(tokens, 0)


@register
class Encoder(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 3)
        self.project = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(6)])
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.supports_masking = True

    def call(self, x, mask=None):
        mask = None if mask is None else ops.expand_dims(mask, 1)
        x = self.norms[0](x + self.attention(x, x, attention_mask=mask))
        return self.norms[1](x + self.project(x))


@register
class Decoder(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.looks_back = layers.MultiHeadAttention(2, 3)
        self.looks_across = layers.MultiHeadAttention(2, 3)
        self.project = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(6)])
        self.norms = [layers.LayerNormalization() for _ in range(3)]
        self.supports_masking = True

    def call(self, x, encoded, mask=None):
        x = self.norms[0](x + self.looks_back(x, x, use_causal_mask=True))
        x = self.norms[1](x + self.looks_across(x, encoded))
        return self.norms[2](x + self.project(x))


def translation():
    """Source and target tokens into the next token; the decoder is a model of its own."""
    source = keras.Input((5,), dtype="int32", name="source")
    encoder = keras.Model(source, Encoder()(Embedding()(source)), name="encoder")
    target = keras.Input((5,), dtype="int32", name="target")
    encoded = keras.Input((5, 6), name="encoded")
    decoded = layers.Dropout(0.5)(Decoder()(Embedding()(target), encoded))
    decoder = keras.Model([target, encoded], layers.Dense(11)(decoded), name="decoder")
    outputs = decoder([target, encoder(source)])
    return keras.Model([source, target], outputs), [TOKENS, TOKENS[::-1].copy()]
