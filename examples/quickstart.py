"""Train a small CNN in mixed float16 on real handwritten digits and look at its gradients.

    python examples/quickstart.py            about half a minute on two CPU cores
    tensorboard --logdir logs                the loss, the loss scale, gradients

The data are scikit-learn's 1,797 digits (8 x 8 pixels), which ship in its package.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow looks for a GPU, and says so

import keras
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kmp


def build_model() -> keras.Model:
    """A CNN whose convolutions compute in float16; statistics and logits stay in float32."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            kmp.layers.Float32BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", use_bias=False),
            kmp.layers.Float32BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            kmp.layers.Float32OutputDense(10),
        ]
    )


def main() -> None:
    """Load the digits, train, evaluate, and say what the gradients did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log-dir", default="logs/quickstart", help="TensorBoard's directory")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="one epoch, to see that it runs")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")

    digits = load_digits()
    images = digits.images[..., None].astype("float32") / 16.0
    x, x_test, y, y_test = train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )

    model = build_model()
    model.compile(
        optimizer=kmp.scaled(
            keras.optimizers.Adam,
            # Grows every 20 finite steps, not every 2,000: in a run this short the scale reaches
            # its limit, overflows, skips and backs off before your eyes.
            loss_scale=kmp.DynamicLossScale(growth_interval=20),
            learning_rate=2e-3,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    health = kmp.callbacks.GradientHealth(log_dir=arguments.log_dir, update_freq=10)
    start = time.time()
    model.fit(
        x,
        y,
        batch_size=64,
        epochs=1 if arguments.smoke else arguments.epochs,
        validation_data=(x_test, y_test),
        callbacks=[health],
        verbose=2,
    )
    seconds = time.time() - start
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)

    print(f"\n{health.report}\n")
    print(f"Curves: tensorboard --logdir {os.path.dirname(arguments.log_dir) or '.'}\n")
    print(health.verdict)
    print(f"Test accuracy {accuracy:.1%} after {seconds:.0f} s on {keras.backend.backend()}.")


if __name__ == "__main__":
    main()
