"""See float16 fail on real data, in its two ways, and what kmp.scaled makes of it.

    python examples/when_float16_fails.py            about half a minute on two CPU cores
    python examples/when_float16_fails.py --smoke    fewer epochs, the same lesson

float16 ends at 65504 and knows nothing between zero and 6e-8. Gradients leave that range at both
ends: below it they become zero and weights stand still, above it they become inf and one step turns
every weight into NaN. Each experiment trains the same model from the same weights on the same
batches three times: in float32, in float16 with a bare optimizer, in float16 with kmp.scaled.
"""

import argparse
import dataclasses
import math
import os
import warnings
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet
os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch: more threads only wait at this size

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_diabetes, load_digits

import kmp

IMAGE_LOSS_WEIGHT = 1e-5


def compile_digits_and_images(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """A classifier of digits that also draws its input again, as a helper task with little weight.

    The mean over 256 images of 64 pixels, times 1e-5, leaves a gradient of 1e-9 for each pixel.
    """
    image = keras.Input((64,))
    code = layers.Dense(64, activation="relu")(image)
    hidden = layers.Dense(64, activation="relu", name="decoder")(code)
    outputs = {
        "digit": kmp.layers.Float32OutputDense(10, name="digit")(code),
        "image": kmp.layers.Float32OutputDense(64, activation="sigmoid", name="image")(hidden),
    }
    model = keras.Model(image, outputs)
    model.compile(
        optimizer,
        loss={
            "digit": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "image": "mse",
        },
        loss_weights={"digit": 1.0, "image": IMAGE_LOSS_WEIGHT},
        # Else Keras wraps the bare optimizer in a loss scale of its own under mixed_float16.
        auto_scale_loss=False,
    )
    return model


def compile_raw_regression(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """A regression on clinical numbers as they come, cholesterol 301 and all, with a summed loss.

    The sum over 34 patients of error times cholesterol passes 65504 at once.
    """
    model = keras.Sequential(
        [
            keras.Input((10,)),
            layers.Dense(32, activation="relu", name="dense"),
            kmp.layers.Float32OutputDense(1, name="result"),
        ]
    )
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model.compile(optimizer, loss=loss, auto_scale_loss=False)
    return model


def start_anew(policy: str) -> None:
    """Same seed, so same weights and batches, whatever the precision."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A model that float16 breaks, the data that do it, and what to look at."""

    title: str
    compile_model: Callable[[keras.optimizers.Optimizer], keras.Model]
    x: np.ndarray
    y: np.ndarray | dict[str, np.ndarray]
    rule: kmp.DynamicLossScale
    learning_rate: float
    batch_size: int
    epochs: int
    column: str  # of the gradient report: what becomes of gradients outside of float16
    layers: tuple[str, ...]  # whose gradients these are

    def train(self, policy: str, optimizer: keras.optimizers.Optimizer) -> keras.Model:
        """Train from the same weights on the same batches."""
        start_anew(policy)
        model = self.compile_model(optimizer)
        model.fit(self.x, self.y, batch_size=self.batch_size, epochs=self.epochs, verbose=0)
        return model

    def lost_gradients(self, policy: str, rule: kmp.DynamicLossScale | str) -> float:
        """The share of the first gradients that is zero, or not finite.

        With a learning rate of zero the weights stay, and a dynamic scale finds its place.
        """
        start_anew(policy)
        health = kmp.callbacks.GradientHealth()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # float16 without a scale: kmp warns, we want to look
            model = self.compile_model(kmp.scaled("sgd", rule, learning_rate=0.0))
            model.fit(
                self.x, self.y, batch_size=self.batch_size, epochs=4, callbacks=[health], verbose=0
            )
        values = health.report.column(self.column)
        lost = total = 0.0
        for variable in model.trainable_variables:
            if variable.path.split("/")[-2].startswith(self.layers):
                size = math.prod(variable.shape)
                value = values[variable.path]
                lost += value * size if self.column == "zero_share" else value
                total += size
        return lost / total

    def run(self, mean_squared_error: Callable[[keras.Model], float]) -> None:
        """Train in float32, in plain float16 and with kmp; print a row for each."""
        lost = "zero gradients" if self.column == "zero_share" else "inf gradients"
        print(f"{self.title}\n{'':<14}  {lost:>14}  final loss   weights  skipped  loss scale")
        for name in ("float32", "plain float16", "kmp float16"):
            policy = "float32" if name == "float32" else "mixed_float16"
            # Adam makes up for gradients of any size as long as they are there.
            optimizer = keras.optimizers.Adam(self.learning_rate, epsilon=1e-12)
            skipped, scale, rule = 0, 1.0, "none"
            if name == "kmp float16":
                rule = self.rule
                optimizer = kmp.scaled(optimizer, rule)
            model = self.train(policy, optimizer)
            if name == "kmp float16":
                skipped, scale = int(optimizer.skipped_steps), float(optimizer.dynamic_scale)
            finite = all(np.isfinite(w).all() for w in model.get_weights())
            loss = mean_squared_error(model)
            print(
                f"{name:<14}  {self.lost_gradients(policy, rule):>14.1%}  {loss:>10.4g}  "
                f"{'finite' if finite else 'NaN':>8}  {skipped:>7}  {scale:g}"
            )
        print()


def main() -> None:
    """Run both experiments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="fewer epochs, to see that it runs")
    smoke = parser.parse_args().smoke

    digits = load_digits()
    images = (digits.data[:1792] / 16.0).astype("float32")  # whole batches compile only once
    Experiment(
        title="Underflow: an image decoder whose loss has a weight of 1e-5 (1,792 digits)",
        compile_model=compile_digits_and_images,
        x=images,
        y={"digit": digits.target[:1792].astype("int32"), "image": images},
        # Grows every 20 finite steps, not every 2,000: the run is that short.
        rule=kmp.DynamicLossScale(growth_interval=20),
        learning_rate=2e-3,
        batch_size=256,
        epochs=8 if smoke else 25,
        column="zero_share",
        layers=("decoder", "image"),
    ).run(lambda model: np.mean((predict(model, images)["image"] - images) ** 2))

    patients = load_diabetes(scaled=False)
    x = patients.data.astype("float32")
    y = patients.target.astype("float32")[:, None]
    Experiment(
        title="Overflow: squared errors, summed over patients as they come (442, diabetes)",
        compile_model=compile_raw_regression,
        x=x,
        y=y,
        # These gradients need a scale below 1.
        rule=kmp.DynamicLossScale(),
        learning_rate=1e-2,
        batch_size=34,
        epochs=8 if smoke else 30,
        column="nonfinite",
        layers=("dense", "result"),
    ).run(lambda model: np.mean((predict(model, x) - y) ** 2))


def predict(model: keras.Model, x: np.ndarray):
    """The model's outputs as NumPy arrays, on any backend."""
    return keras.tree.map_structure(keras.ops.convert_to_numpy, model(x))


if __name__ == "__main__":
    main()
