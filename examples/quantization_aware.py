"""Train in mixed float16 with the rounding of int8, then convert to int8.

A small CNN learns handwritten digits in float32. Quantizing it afterwards, after showing it the
training images once for the ranges of its activations, costs nothing in 8 bits. With kernels of 2
bits (-1, 0 and 1 times a scale for each channel) and activations of 4 it ruins the model, and
training on for a few epochs with `kmp.quantize_aware` wins most of it back: the weights learn what
they will be rounded to.

The float32 model trains for those epochs as well, so that nobody has an advantage.

    KERAS_BACKEND=jax python examples/quantization_aware.py [--smoke] [--seeds 5]
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import kmp

BITS = {"8 bits": (8, 8), "2 and 4 bits": (2, 4)}  # of kernels, and of what they multiply


def load(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Digits in [0, 1], shuffled: 1,397 to train, 400 to test."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    x = (digits.images[order, ..., None] / 16.0).astype("float32")
    y = digits.target[order].astype("int32")
    return x[:-400], y[:-400], x[-400:], y[-400:]


def build() -> keras.Model:
    """Two convolutions and two dense layers, in float32."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10),
        ]
    )


def train(model: keras.Model, x: np.ndarray, y: np.ndarray, epochs: int, rate: float) -> None:
    """In place; the loss is scaled where the model computes in float16."""
    model.compile(
        kmp.scaled("adam", learning_rate=rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    health = kmp.callbacks.GradientHealth()  # a skipped step leaves the ranges as they were, too
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=0, callbacks=[health])


def accuracy(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    """In percent."""
    logits = model.predict(x, batch_size=400, verbose=0)
    return 100 * float(np.mean(np.argmax(logits, axis=-1) == y))


def copy_of(model: keras.Model) -> keras.Model:
    """Conversions are in place."""
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    return copy


def quantize_after_training(
    model: keras.Model, bits: tuple[int, int], x: np.ndarray
) -> keras.Model:
    """The same rounding, the weights as they are: the data pass once to find the ranges."""
    model = copy_of(model)
    kmp.quantize_aware(model, weight_bits=bits[0], activation_bits=bits[1])
    for start in range(0, len(x), 256):
        model(x[start : start + 256], training=True)
    kmp.to_int8(model)
    return model


def quantize_in_training(
    model: keras.Model, bits: tuple[int, int], x: np.ndarray, y: np.ndarray, epochs: int
) -> keras.Model:
    """The ranges settle in the first half of the epochs; the weights go on learning."""
    model = copy_of(model)
    kmp.to_mixed_precision(model, "mixed_float16")
    half = epochs * (len(x) // 64 + 1) // 2
    kmp.quantize_aware(
        model, weight_bits=bits[0], activation_bits=bits[1], momentum=0.9, freeze_after=half
    )
    train(model, x, y, epochs, 1e-3)
    kmp.to_int8(model)
    return model


def main() -> None:
    """Print a table of test accuracies, one row a seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="few bits alone, fewer epochs")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs")
    arguments = parser.parse_args()
    first, more = (12, 4) if arguments.smoke else (20, 10)
    settings = dict(list(BITS.items())[1:]) if arguments.smoke else BITS

    titles = [f"{name}: {when}" for name in settings for when in ("after", "aware")]
    print(show("test accuracy in %", ["float32", *titles]))
    rows = []
    for seed in range(arguments.seeds):
        keras.utils.set_random_seed(seed)
        x, y, x_test, y_test = load(seed)
        model = build()
        print(f"Seed {seed}: training in float32 ...", flush=True)
        train(model, x, y, first, 3e-3)
        reference = copy_of(model)
        train(reference, x, y, more, 1e-3)
        row = [accuracy(reference, x_test, y_test)]
        for name, bits in settings.items():
            print(f"Seed {seed}: {name}, after and in training ...", flush=True)
            after = quantize_after_training(reference, bits, x)
            aware = quantize_in_training(model, bits, x, y, more)
            row += [accuracy(after, x_test, y_test), accuracy(aware, x_test, y_test)]
        rows.append(row)
        print(show(f"seed {seed}", row), flush=True)
    if len(rows) > 1:
        print(show("mean", np.mean(rows, axis=0)))
        print(show("deviation", np.std(rows, axis=0, ddof=1)))


def show(name: str, row: list) -> str:
    """One line of the table."""
    cells = [x if isinstance(x, str) else f"{x:.2f}" for x in row]
    return f"{name:<18}{cells[0]:>9}" + "".join(f"{cell:>21}" for cell in cells[1:])


if __name__ == "__main__":
    main()
