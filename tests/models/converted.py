"""Models to convert, and what tests ask of them."""

import keras
import kinds
from keras import layers

from kmp._keras import layers_of

X = kinds.VECTORS


def compute_dtypes(model):
    return {layer.name: layer.compute_dtype for layer in layers_of(model)}


def sequential():
    return kinds.sequential()[0]


class Raw(keras.Model):
    """Raw operations between the last layer and the output; a preprocessing layer inside."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(2, name="head")  # created first, called last
        self.rescale = layers.Rescaling(1e-5)
        self.body = layers.Dense(4, name="body")

    def call(self, x):
        return keras.ops.softmax(self.head(self.body(self.rescale(x))) * 2.0)
