"""A small classifier that leaves out spikes, and data of which some batches are in a wrong unit."""

import keras
import numpy as np
from oracle import COMPILED_MODES

import kmp

COMPILED = bool(COMPILED_MODES)


def classifier(norm=(), jit=True, spe=1, name="sgd", **settings):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(32, "relu"), *norm, keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    settings = {"spikes": "skip", "learning_rate": 0.05, **settings}
    optimizer = kmp.scaled(name, **settings)
    execution = {"jit_compile": jit and COMPILED, "steps_per_execution": spe}
    model.compile(optimizer, loss, metrics=["accuracy"], **execution)
    return model


def digits(steps, batch=16, bad=()):
    random = np.random.default_rng(0)
    x = random.normal(size=(steps, batch, 8)).astype("float32")
    y = x[..., :4].argmax(axis=-1)
    for step in bad:
        x[step], y[step] = x[step] * 1e4, (y[step] + 1) % 4
    return x, y


def fit(model, x, y, **settings):
    batch = x.shape[1]
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1)
    history = model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, **settings)
    return history.history
