"""Layers of Keras inside blocks; each draws, assigns, loops or masks in a way of its own."""

import keras
import pytest
from keras import layers
from oracle import BACKEND
from recomputed_models import ROWS, WIDTH, WORDS, assert_same, data, loss, state

import kmp


class Causal(layers.Layer):
    """Attention with a mask of its own and dropout."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4, dropout=0.1)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return x + self.attention(x, x, use_causal_mask=True)


def frozen():
    layer = layers.Dense(WIDTH)
    layer.trainable = False
    return layer


KINDS = {
    "attention": lambda: [Causal()],
    "bidirectional": lambda: [layers.Bidirectional(layers.GRU(4, return_sequences=True))],
    "convolution": lambda: [layers.Conv1D(WIDTH, 3, padding="same"), layers.BatchNormalization()],
    "frozen": lambda: [frozen(), layers.Dense(WIDTH)],
    "lora": lambda: [layers.Dense(WIDTH, lora_rank=2, activity_regularizer="l2")],
    "lstm": lambda: [layers.LSTM(WIDTH, return_sequences=True)],
    # It forgets its masks at the end of its call.
    "lstm with dropout": lambda: [
        layers.LSTM(WIDTH, return_sequences=True, dropout=0.3, recurrent_dropout=0.2, seed=7)
    ],
    "model": lambda: [keras.Sequential([layers.Dense(WIDTH), layers.Dropout(0.2)])],
    "noise": lambda: [layers.TimeDistributed(layers.Dense(WIDTH)), layers.GaussianNoise(0.1)],
    # It assigns the weights that it trains: their gradient is that of the new values.
    "spectral": lambda: [layers.SpectralNormalization(layers.Dense(WIDTH))],
}


@pytest.mark.parametrize(
    "kind", [x if BACKEND == "torch" else pytest.param(x, marks=pytest.mark.wide) for x in KINDS]
)
def test_a_block_of_this_kind_trains_as_without_it(kind):
    def run(recomputed):
        keras.utils.set_random_seed(0)
        blocks = [
            keras.Sequential([keras.Input((WORDS, WIDTH)), *KINDS[kind]()], name=f"block{i}")
            for i in range(2)
        ]
        words = [keras.Input((WORDS,)), layers.Embedding(20, WIDTH)]
        head = [layers.GlobalAveragePooling1D(), layers.Dense(3)]
        model = keras.Sequential([*words, *blocks, *head])
        if recomputed:
            kmp.recompute(model, lambda layer, path: layer in blocks)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss(), jit_compile=BACKEND == "jax")
        x, y = (each[: 3 * ROWS] for each in data())
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        return state(model)

    assert_same(run(False), run(True), 1e-6 if BACKEND == "jax" else 0)
