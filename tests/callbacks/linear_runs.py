"""Small runs whose numbers are exact, for the tests of callbacks that watch the loss."""

import keras
import numpy as np
from conftest import BACKEND

import kmp
from kmp._keras.training import loss_tracker, set_loss_tracker
from kmp.callbacks.progress import read_progress

SPE = [1] if BACKEND == "torch" else [1, 4]
# Keras jits on JAX unless told otherwise, and would hand torch's step to Dynamo.
JIT = {"tensorflow": [False, True], "jax": [True], "torch": [False]}[BACKEND]
RATE = 2.0**-6


def linear_model(optimizer=None, **compile_arguments):
    """y = x w + b from zeros: sums of whole numbers."""
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros", name="dense")]
    )
    optimizer = kmp.scaled("sgd", learning_rate=RATE) if optimizer is None else optimizer
    model.compile(optimizer, loss="mse", **compile_arguments)
    return model


def data(steps=12, batch=4, poisoned=(), poison=np.inf):
    """Whole numbers, and a linear target; `poison` multiplies the first row of some batches."""
    random = np.random.default_rng(1)
    x = random.integers(1, 4, (steps * batch, 2)).astype("float32")
    y = (x @ np.float32([[1.0], [-2.0]])).astype("float32")
    for step in poisoned:
        x[step * batch] *= poison
    return x, y


def fit(model, callbacks, poisoned=(), poison=np.inf, epochs=1, steps=12, **arguments):
    x, y = data(steps, poisoned=poisoned, poison=poison)
    arguments = {"verbose": 0, "shuffle": False, "batch_size": 4, **arguments}
    return model.fit(x, y, epochs=epochs, callbacks=callbacks, **arguments).history


def last_progress(model):
    """What the steps of the last `fit` had counted when it ended."""
    own = loss_tracker(model)
    set_loss_tracker(model, model.train_function.protected.tracker)
    try:
        return read_progress(model)
    finally:
        set_loss_tracker(model, own)
