"""Models without blocks: graphs of layers that have nothing inside."""

import keras
import numpy as np
from keras import layers, ops

WIDTH, ROWS = 6, 8
IMAGE = (8, 8, 3)


class Noted(layers.Layer):
    """Counts its calls, adds a loss and draws a mask."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        counter = {"shape": (), "initializer": "zeros", "trainable": False, "autocast": False}
        self.calls = self.add_weight(name="calls", **counter)
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x, training=None):
        self.calls.assign_add(1)
        self.add_loss(1e-2 * ops.mean(ops.square(ops.cast(x, "float32"))))
        return keras.random.dropout(x, 0.2, seed=self.seed_generator) if training else x


def residual():
    """Convolutions with skips; operations that are no layers; a layer that draws, counts, adds."""
    inputs = keras.Input(IMAGE)
    x = layers.GlobalAveragePooling2D()(convolutions(inputs))
    return keras.Model(inputs, layers.Dense(3, name="head")(x))


def convolutions(inputs, number=4):
    x = layers.Conv2D(WIDTH, 3, padding="same", name="stem")(inputs)
    for i in range(number):
        y = layers.ReLU()(layers.BatchNormalization(name=f"norm{i}")(x))
        y = layers.Conv2D(WIDTH, 3, padding="same", name=f"conv{i}")(y)
        y = layers.Dropout(0.3, seed=i or None)(y)  # without a seed from PyTorch's generator
        x = layers.Add(name=f"add{i}")([x, y]) if i % 2 else x + Noted(name=f"noted{i}")(y)
    return x


def stack():
    """A Sequential model of Conv, BatchNormalization, ReLU and Dropout."""
    inside = []
    for i in range(5):
        inside += [layers.Conv2D(WIDTH, 3, padding="same", name=f"conv{i}")]
        inside += [layers.BatchNormalization(), layers.ReLU(name=f"relu{i}"), layers.Dropout(0.1)]
    head = [layers.GlobalAveragePooling2D(), layers.Dense(3)]
    return keras.Sequential([keras.Input(IMAGE), *inside, *head])


def mobile():
    """A model of `keras.applications`."""
    arguments = {"input_shape": (32, 32, 3), "alpha": 0.35, "classifier_activation": None}
    return keras.applications.MobileNetV2(weights=None, classes=3, **arguments)


def transfer():
    """A model as the backbone of a Sequential one."""
    inputs = keras.Input(IMAGE)
    backbone = keras.Model(inputs, convolutions(inputs, 8), name="backbone")
    head = [layers.GlobalAveragePooling2D(), layers.Dense(3)]
    return keras.Sequential([keras.Input(IMAGE), layers.RandomFlip(), backbone, *head])


def masked():
    """Words with a mask, a shared layer, two inputs in a dict and a skip over everything."""
    words = keras.Input((5,), dtype="int32", name="words")
    shift = keras.Input((WIDTH,), name="shift")
    x = layers.Embedding(20, WIDTH, mask_zero=True)(words)
    twice = layers.Dense(WIDTH, "tanh", name="twice")
    x = layers.LSTM(WIDTH, return_sequences=True, name="lstm")(twice(twice(x)))
    x = layers.Dropout(0.2)(layers.LayerNormalization()(x))
    x = layers.GRU(WIDTH, name="gru")(x)
    outputs = layers.Dense(3)(layers.Dense(WIDTH, "relu")(x + shift) * shift)
    return keras.Model({"words": words, "shift": shift}, outputs)


def batches(model, steps=3):
    """Inputs in the model's structure, and labels."""
    random = np.random.default_rng(0)
    inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input

    def numbers(x):
        shape = (steps * ROWS, *x.shape[1:])
        if "int" in x.dtype:
            found = random.integers(0, 20, shape).astype("int32")
            found[:, 0] = 1  # no row is masked altogether
            return found
        return random.normal(size=shape).astype("float32")

    return keras.tree.map_structure(numbers, inputs), random.integers(0, 3, steps * ROWS)
