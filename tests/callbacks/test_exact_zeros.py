"""Gradients of exactly zero: what a loss scale can bring back, and what it cannot."""

import keras
import numpy as np
import pytest
from keras import ops

import kmp
from kmp.callbacks import GradientHealth

pytestmark = pytest.mark.filterwarnings("ignore:Step", "ignore:float16 without")


@pytest.mark.parametrize("layer", ["prelu", "normalization"])
@pytest.mark.parametrize("scale", ["dynamic", 2.0**15])
def test_gradients_that_are_zero_in_float32_too(layer, scale):
    """Of a slope for negative inputs, where there are none; of an empty batch axis."""
    layer, x = {
        "prelu": (keras.layers.PReLU, np.ones((8, 4))),
        "normalization": (keras.layers.LayerNormalization, np.zeros((1, 0, 10))),
    }[layer]
    model = keras.Sequential([keras.Input(x.shape[1:]), layer(dtype="mixed_float16")])
    model.compile(kmp.scaled("sgd", scale), loss=lambda y, outputs: ops.sum(outputs))
    watch = GradientHealth(update_freq=1)
    model.fit(x, x, verbose=0, callbacks=[watch])
    assert watch.verdict.state == "HEALTHY", str(watch.verdict)
