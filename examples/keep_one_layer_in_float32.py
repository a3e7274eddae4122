"""One layer ruins the accuracy of a bfloat16 model. Which one, and what it takes.

    python examples/keep_one_layer_in_float32.py            about half a minute on two CPU cores
    python examples/keep_one_layer_in_float32.py --smoke    fewer epochs, the same lesson

A small CNN on scikit-learn's digits measures the contrast of its feature maps as the root of
E[x^2] - E[x]^2: two large numbers that are nearly equal. float32 has the digits for that, bfloat16
has not. The model is trained in float32 and then run in mixed bfloat16 with the same weights: no
loss is NaN, nothing warns, the accuracy is just worse. compare_precisions shows which layer's noise
reaches the output, diagnose keeps that layer alone in float32, and the accuracy comes back.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet
os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch: more threads only wait at this size

import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

import kmp


@keras.saving.register_keras_serializable(package="example")
class Contrast(layers.Layer):
    """The standard deviation of each feature map, in one pass: sqrt(E[x^2] - E[x]^2)."""

    def call(self, maps):
        """From [batch, height, width, channels] to [batch, channels]."""
        mean = ops.mean(maps, axis=(1, 2))
        variance = ops.mean(ops.square(maps), axis=(1, 2)) - ops.square(mean)
        return ops.sqrt(ops.maximum(variance, 1e-3))


def build(policy: keras.DTypePolicy | str = "float32") -> keras.Model:
    """The names make the paths in a DTypePolicyMap, so they are the same in each model."""
    keras.config.set_dtype_policy(policy)
    image = keras.Input((8, 8, 1))
    maps = layers.Conv2D(16, 3, activation="relu", name="conv0")(image)
    maps = layers.Conv2D(16, 3, activation="relu", name="conv1")(maps)
    bright = layers.Rescaling(1.0, offset=60.0, name="shift")(maps)  # an image on a bright ground
    contrast = Contrast(name="contrast")(bright)
    hidden = layers.Dense(32, activation="relu", name="hidden")(contrast)
    logits = kmp.layers.Float32OutputDense(10, name="logits")(hidden)
    keras.config.set_dtype_policy("float32")
    model = keras.Model(image, logits, name="digits")
    model.compile(
        kmp.scaled("adam", learning_rate=3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def accuracy(model: keras.Model, weights: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> float:
    """On test images, with the weights of the float32 model."""
    model.set_weights(weights)
    return model.evaluate(x, y, verbose=0)[1]


def main() -> None:
    """Train in float32; run in bfloat16, look, keep one layer in float32, run again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="fewer epochs, to see that it runs")
    smoke = parser.parse_args().smoke

    digits = load_digits()
    x = (digits.images[..., None] / 16.0).astype("float32")
    y = digits.target.astype("int32")
    x, y, x_test, y_test = x[:1408], y[:1408], x[1408:], y[1408:]

    keras.utils.set_random_seed(0)
    model = build()
    epochs = 30 if smoke else 60
    print(f"Training for {epochs} epochs in float32 ...", flush=True)
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=0)
    weights = model.get_weights()
    print("Comparing bfloat16 with float32, layer by layer ...\n", flush=True)

    print(kmp.debug.compare_precisions(model, x[:64], policy="mixed_bfloat16"), end="\n\n")
    diagnosis = kmp.debug.diagnose(model, x[:64], policy="mixed_bfloat16", target_sqnr=30.0)
    print(str(diagnosis).splitlines()[0], end="\n\n")

    runs = {
        "float32": build(),
        "mixed_bfloat16": build("mixed_bfloat16"),
        "mixed_bfloat16, map of diagnose": build(diagnosis.policy),
    }
    for name, model in runs.items():
        print(f"Test accuracy in {name}: {accuracy(model, weights, x_test, y_test):.3f}")


if __name__ == "__main__":
    main()
