"""AmaxLossScale against DynamicLossScale: accuracy and skipped steps, on digits in mixed float16.

    KERAS_BACKEND=torch python benchmarks/experiments/faster_start.py [--seeds 5] [--epochs 12]

Each seed splits the data anew, and trains both rules from the same weights on the same batches. A
weight of the loss makes the default scale too large.
"""

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kmp
from kmp.cli.doctor import environment, environment_line

RULES = {"dynamic": kmp.DynamicLossScale, "amax": kmp.AmaxLossScale}
WEIGHTS = (1.0, 1e4)  # of the loss


def cnn() -> keras.Model:
    """Two convolutions, with statistics that settle within a few epochs."""
    blocks: list = []
    for filters in (16, 32):
        blocks.append(layers.Conv2D(filters, 3, use_bias=False))
        blocks += [kmp.layers.Float32BatchNormalization(momentum=0.9), layers.ReLU()]
    head = kmp.layers.Float32OutputDense(10)
    return keras.Sequential([keras.Input((8, 8, 1)), *blocks, layers.Flatten(), head])


def mlp() -> keras.Model:
    """Two hidden layers of 128."""
    hidden = [layers.Dense(128, activation="relu") for _ in range(2)]
    head = kmp.layers.Float32OutputDense(10)
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), *hidden, head])


def train(build, rule: str, weight: float, seed: int, epochs: int) -> tuple[float, int]:
    """Test accuracy in percent, and the number of skipped steps."""
    keras.utils.set_random_seed(seed)
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype("float32")
    x, x_test, y, y_test = train_test_split(images, labels, test_size=0.3, random_state=seed)
    model = build()
    model.compile(
        kmp.scaled("adam", RULES[rule](), learning_rate=2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        loss_weights=weight,
        jit_compile=keras.backend.backend() != "torch",
    )
    model.fit(x, y, epochs=epochs, batch_size=64, verbose=0)
    accuracy = model.evaluate(x_test, y_test, verbose=0)[1]
    return 100 * accuracy, int(model.optimizer.skipped_steps)


def main() -> None:
    """Train, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    keras.config.set_dtype_policy("mixed_float16")
    print(environment_line(environment()))
    for build in (cnn, mlp):
        for weight in WEIGHTS:
            for rule in RULES:
                runs = []
                for seed in range(arguments.seeds):
                    print(f"\r{build.__name__}, {rule}: seed {seed}", end="   ", file=sys.stderr)
                    runs.append(train(build, rule, weight, seed, arguments.epochs))
                accuracy, skipped = zip(*runs, strict=True)
                print(
                    f"\r{build.__name__:4} loss x {weight:<8g} {rule:8} accuracy "
                    f"{np.mean(accuracy):.2f} (from {min(accuracy):.2f}), skipped {list(skipped)}"
                )


if __name__ == "__main__":
    main()
