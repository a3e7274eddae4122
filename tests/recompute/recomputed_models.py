"""Models with blocks, trained with and without recomputation, and what is compared."""

import keras
import numpy as np
from keras import layers, ops

import kmp

WIDTH, WORDS, ROWS, STEPS = 8, 6, 16, 6
NORMALIZATIONS = [layers.BatchNormalization, kmp.layers.Float32BatchNormalization]


@keras.saving.register_keras_serializable("recomputed")
class Block(layers.Layer):
    """Whatever a second run could do otherwise: masks, statistics, seeds, losses, a context."""

    def __init__(self, number=0, **kwargs):
        super().__init__(**kwargs)
        self.number = number
        self.up = layers.Dense(4 * WIDTH, "relu")
        self.normalization = NORMALIZATIONS[number % 2](momentum=0.9)
        # Without a seed Keras draws from PyTorch's generator, and not from a variable.
        self.dropout = layers.Dropout(0.3, seed=number or None)
        self.down = layers.Dense(WIDTH)
        self.supports_masking = True

    def build(self, shape):
        self.up.build(shape)
        self.normalization.build((*shape[:-1], 4 * WIDTH))
        self.down.build((*shape[:-1], 4 * WIDTH))
        self.gain = self.add_weight(shape=(WIDTH,), initializer="ones", name="gain")
        # On torch Keras loses what is assigned to a variable that is autocast.
        counter = {"shape": (), "initializer": "zeros", "trainable": False, "autocast": False}
        self.calls = self.add_weight(name="calls", **counter)
        super().build(shape)

    def call(self, x, shift=None, mask=None):
        y = self.down(self.dropout(self.normalization(self.up(x))))  # training: from the context
        self.add_loss(1e-2 * ops.mean(ops.square(ops.cast(y, "float32"))))
        self.calls.assign_add(1)
        weights = 1 if mask is None else ops.cast(mask, y.dtype)[..., None]
        y = x + y * self.gain * weights
        return {"sum": y if shift is None else y + shift, "unused": ops.max(y)}

    def get_config(self):
        return {**super().get_config(), "number": self.number}


def build_model(policy="float32"):
    """Words, two blocks, one of which gets a tensor as a keyword, and a head. Always the same."""
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    words = keras.Input((WORDS,), dtype="int32")
    x = layers.Embedding(20, WIDTH, mask_zero=True)(words)
    shift = layers.Embedding(20, WIDTH)(words)
    for i in range(2):
        x = Block(i, name=f"block{i}")(x, **({"shift": shift} if i else {}))["sum"]
    outputs = kmp.layers.Float32OutputDense(3)(layers.GlobalAveragePooling1D()(x))
    keras.config.set_dtype_policy(before)
    return keras.Model(words, outputs)


def data():
    random = np.random.default_rng(0)
    words = random.integers(0, 20, (STEPS * ROWS, WORDS)).astype("int32")
    words[:, 0] = 1  # no row is masked altogether
    return words, random.integers(0, 3, STEPS * ROWS).astype("int32")


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def state(model):
    """Weights, statistics, seeds, slots, scale and counters, by their places."""
    optimizer = getattr(model, "optimizer", None)
    found = [*model.variables, *(optimizer.variables if optimizer else ())]
    return [(v.path, np.array(ops.convert_to_numpy(ops.cast(v.value, "float32")))) for v in found]


def assert_same(plain, recomputed, tolerance=0.0):
    """Bit for bit, or within a tolerance for numbers of the order of 1."""
    assert len(plain) == len(recomputed)
    for (path, x), (_, y) in zip(plain, recomputed, strict=True):
        atol = tolerance * max(1, np.abs(x).max(initial=0))
        np.testing.assert_allclose(y, x, rtol=0, atol=atol, err_msg=path)
