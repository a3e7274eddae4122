"""Small models to quantize; importable, so that a new process can load their files."""

import keras
import numpy as np
from keras import layers

IMAGES = np.random.default_rng(0).normal(size=(8, 6, 6, 2)).astype("float32")
TARGETS = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")


def functional():
    """Each kind of layer, one in a nested model, and one that is left alone."""
    causal = layers.Conv1D(4, 2, padding="causal", dilation_rate=2, name="conv1")
    image = keras.Input((6, 6, 2))
    x = layers.Conv2D(4, (2, 3), strides=(1, 2), groups=2, activation="relu", name="conv2")(image)
    x = layers.Reshape((5, 8))(layers.LayerNormalization(name="norm")(x))
    x = keras.Sequential([keras.Input((5, 8)), causal], name="inner")(x)
    return keras.Model(image, layers.Dense(3, name="head")(layers.Flatten()(x)))


@keras.saving.register_keras_serializable(package="quantized_models")
class Subclassed(keras.Model):
    """A model whose code makes its layers, as files do not know them."""

    def __init__(self, hands_on_training=True, **kwargs):
        super().__init__(**kwargs)
        self.hands_on_training = hands_on_training
        self.conv = layers.Conv2D(4, 3, activation="relu")
        self.flatten = layers.Flatten()
        self.head = layers.Dense(3)

    def call(self, inputs, training=None):
        training = training if self.hands_on_training else False
        x = self.flatten(self.conv(inputs, training=training))
        return self.head(x, training=training)


def subclassed():
    model = Subclassed()
    model(IMAGES)
    return model


MODELS = {"functional": functional, "subclassed": subclassed}
