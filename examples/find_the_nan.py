"""A loss of NaN at the third batch: which layer began it, and what to do about it.

    python examples/find_the_nan.py            seconds on two CPU cores
    python examples/find_the_nan.py --smoke    the same; it is as short as that

A classifier of diabetes patients squares learned scores before it decides, in mixed float16. One
patient was entered in the wrong unit. In float32 nobody notices; in float16 the square passes
65504, the loss is NaN, and all that training says is "NaN". locate_nonfinite replays the batch and
names the layer, with what went in and what came out; diagnose says what to keep in float32.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet
os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch: more threads only wait at this size

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_diabetes

import kmp


@keras.saving.register_keras_serializable(package="example")
class Energy(layers.Layer):
    """The square of each score."""

    def call(self, scores):
        """Harmless in float32, where squares may reach 1e38."""
        return ops.square(scores)


def build(policy: keras.DTypePolicy | str) -> keras.Model:
    """The same weights under every policy; the names make the paths in a DTypePolicyMap."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((10,)),
            layers.Dense(32, activation="relu", name="features"),
            layers.Dense(16, name="scores"),
            Energy(name="energy"),
            layers.LayerNormalization(name="norm"),
            kmp.layers.Float32OutputDense(1, name="answer"),
        ],
        name="classifier",
    )
    keras.config.set_dtype_policy("float32")
    model.compile(
        kmp.scaled("adam", learning_rate=3e-3),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


def train(model: keras.Model, batches: list[tuple[np.ndarray, np.ndarray]]) -> int | None:
    """Train for one epoch; return the number of the first batch whose loss is not finite."""
    for i, (x, y) in enumerate(batches):
        if not np.isfinite(model.train_on_batch(x, y)):
            return i
    return None


def main() -> None:
    """Train, fail, look, and train again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="accepted by every example")
    parser.parse_args()

    x, y = load_diabetes(return_X_y=True)
    x = (20 * x).astype("float32")
    y = (y > np.median(y)).astype("float32")[:, None]
    x[69] *= 1000.0  # the patient in the wrong unit

    batches = [(x[i : i + 32], y[i : i + 32]) for i in range(0, 416, 32)]

    model = build("mixed_float16")
    failed = train(model, batches)
    print(f"In mixed float16 the loss is not finite at batch {failed}.")

    # kmp.scaled left that step out, so that the weights are those which met the batch.
    print(kmp.debug.locate_nonfinite(model, *batches[failed]), end="\n\n")
    diagnosis = kmp.debug.diagnose(model, *batches[failed])
    print(diagnosis, end="\n\n")

    model = build(diagnosis.policy)
    print(
        f"Under the map the first loss that is not finite: {train(model, batches)}; "
        f"skipped steps: {int(model.optimizer.skipped_steps)}."
    )


if __name__ == "__main__":
    main()
