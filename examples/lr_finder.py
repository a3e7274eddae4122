"""How large may the learning rate be? One short sweep that leaves the model as it was.

    python examples/lr_finder.py

`kmp.callbacks.LearningRateFinder` grows the learning rate from 1e-6 to 10 in 100 steps, in mixed
float16, and suggests the one at which the loss falls fastest. Steps that are skipped while the loss
scale is found are no points of the curve. Then the same model is trained with a hundredth of the
suggestion, with the suggestion, and with a hundred times as much.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet
os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch: more threads only wait at this size

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kmp


def build_model(rate: float = 1e-3) -> keras.Model:
    """The same weights every time."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(64, activation="relu"),
            kmp.layers.Float32OutputDense(10),
        ]
    )
    model.compile(
        kmp.scaled("adam", learning_rate=rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    """Find, draw, and try what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", default="learning_rates.png", help="where the curve goes")
    parser.add_argument("--smoke", action="store_true", help="two epochs of one run")
    arguments = parser.parse_args()
    keras.config.set_dtype_policy("mixed_float16")
    digits = load_digits()
    x, x_test, y, y_test = train_test_split(
        digits.data.astype("float32") / 16, digits.target, test_size=0.2, random_state=0
    )

    model = build_model()
    before = [weight.copy() for weight in model.get_weights()]
    finder = kmp.callbacks.LearningRateFinder(log_dir="logs/lr_finder")
    rate = finder.find(model, x, y, batch_size=64)
    finder.plot(arguments.plot)
    same = all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    print(f"Suggestion {rate:.2g} after {len(finder.losses)} points; {finder.stopped_because}.")
    print(
        f"Weights as they were: {same}. Curve: {arguments.plot}, and TensorBoard's logs/lr_finder"
    )

    for name, tried in (
        ("a hundredth", rate / 100),
        ("suggested", rate),
        ("100 times", 100 * rate),
    ):
        model = build_model(tried)
        model.fit(x, y, batch_size=64, epochs=2 if arguments.smoke else 10, verbose=0)
        _, accuracy = model.evaluate(x_test, y_test, verbose=0)
        print(f"{name:12s} {tried:.1e}: test accuracy {accuracy:.1%}")
    print(f"On {keras.backend.backend()}.")


if __name__ == "__main__":
    main()
