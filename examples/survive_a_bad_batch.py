"""A few bad batches ruin a run in bfloat16, and `DivergenceGuard` goes back to before them.

    python examples/survive_a_bad_batch.py

The same network learns scikit-learn's 1,797 digits three times: on clean batches, with five batches
whose pixels arrive 10,000 times too large (a scaling forgotten in one shard of the data, say), and
with these and the guard. In bfloat16 nothing overflows, so that no step is skipped and the weights
take the blow. (In float16 it would be: `kmp.scaled` skips such a step.)
"""

import argparse
import os
import warnings
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kmp

BATCH = 32
BAD_STEPS = (200, 201, 202, 400, 401)


def draw_batches(x: np.ndarray, y: np.ndarray, bad_steps: tuple[int, ...]) -> Iterator:
    """Shuffled batches without end; those of `bad_steps` with inputs 10,000 times too large."""
    random, step = np.random.default_rng(0), 0
    while True:
        for rows in random.permutation(len(x))[: len(x) // BATCH * BATCH].reshape(-1, BATCH):
            yield x[rows] * (1e4 if step in bad_steps else 1.0), y[rows]
            step += 1


def train(bad_steps: tuple[int, ...], callbacks: list, epochs: int) -> tuple[float, float]:
    """Train from the same weights on the same batches; (test accuracy, last training loss)."""
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images = digits.images.reshape(-1, 64).astype("float32") / 16.0
    x, x_test, y, y_test = train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(128, activation="relu"),
            layers.Dense(128, activation="relu"),
            kmp.layers.Float32OutputDense(10),
        ]
    )
    model.compile(
        optimizer=kmp.scaled(keras.optimizers.SGD, "none", learning_rate=0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        draw_batches(x, y, bad_steps),
        steps_per_epoch=len(x) // BATCH,
        shuffle=False,
        epochs=epochs,
        callbacks=callbacks,
        verbose=0,
    )
    return model.evaluate(x_test, y_test, verbose=0)[1], history.history["loss"][-1]


def main() -> None:
    """Train three times and print what became of each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="half the epochs")
    epochs = 12 if parser.parse_args().smoke else 24

    keras.config.set_dtype_policy("mixed_bfloat16")
    guard = kmp.callbacks.DivergenceGuard("rollback", snapshot_freq=20)
    runs = {
        "clean batches": ((), []),
        "5 bad batches": (BAD_STEPS, []),
        "5 bad batches, with the guard": (BAD_STEPS, [guard]),
    }
    warnings.showwarning = lambda message, *_: print(f"  {message}")
    print("run                              test accuracy   training loss")
    for name, (bad_steps, callbacks) in runs.items():
        accuracy, loss = train(bad_steps, callbacks, epochs)
        print(f"{name:32s} {accuracy:13.1%} {loss:15.3g}")
    print(f"Rollbacks: {guard.rollbacks} on {keras.backend.backend()}.")


if __name__ == "__main__":
    main()
