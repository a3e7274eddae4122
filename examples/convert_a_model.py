"""A float32 model that is already trained, in mixed float16: converted, checked, trained on.

    python examples/convert_a_model.py

A CNN learns digits in float32, as models that one is handed have. `kmp.to_mixed_precision` converts
it with weights and optimizer state and says of each layer what it did, `kmp.audit` what is left to
fear, and the accuracy is compared before and after, and after a little more training.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kmp


def build_model() -> keras.Model:
    """A model of somebody who has never heard of half precision."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(1 / 16, name="rescaling"),
            layers.Conv2D(16, 3, name="conv"),
            layers.BatchNormalization(momentum=0.9, name="norm"),
            layers.ReLU(name="relu"),
            layers.Flatten(name="flatten"),
            layers.Dense(10, activation="softmax", name="head"),
        ],
        name="digits",
    )
    model.compile(
        keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def main() -> None:
    """Train, convert, audit, compare, train on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    epochs = 3 if parser.parse_args().smoke else 15
    keras.utils.set_random_seed(0)
    digits = load_digits()
    x, x_test, y, y_test = train_test_split(
        digits.images[..., None].astype("float32"), digits.target, test_size=0.2, random_state=0
    )
    model = build_model()
    print(f"Training for {epochs} epochs in float32 ...", flush=True)
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=0)
    probabilities = model.predict(x_test, verbose=0)
    accuracy = {"float32": model.evaluate(x_test, y_test, verbose=0)[1]}

    report = kmp.to_mixed_precision(model, "mixed_float16")
    print(f"{report}\nLeft to fear:\n{kmp.audit(model) or 'nothing'}\n")
    accuracy["converted"] = model.evaluate(x_test, y_test, verbose=0)[1]
    change = np.abs(model.predict(x_test, verbose=0) - probabilities).max()
    print(f"Largest change of a probability: {change:.4f}")

    print(f"Training for {max(epochs // 3, 1)} epochs more, in mixed float16 ...", flush=True)
    model.fit(x, y, batch_size=64, epochs=max(epochs // 3, 1), verbose=0)
    accuracy["trained on in float16"] = model.evaluate(x_test, y_test, verbose=0)[1]
    for name, value in accuracy.items():
        print(f"{name:22s} test accuracy {value:.1%}")
    skipped = int(ops.convert_to_numpy(model.optimizer.skipped_steps))
    print(f"Steps skipped since the conversion: {skipped}, on {keras.backend.backend()}.")


if __name__ == "__main__":
    main()
