"""A diffusion model in mixed half precision: it learns what is noise in an image, and draws.

    python examples/diffusion.py                                digits of 8 x 8 pixels, two minutes
    python examples/diffusion.py --images folder --size 64 --width 128 --epochs 50
    python examples/diffusion.py --size 64 --width 128 --plan l4    bytes only

A U-Net is given an image with noise in it, and how much, and answers with the noise. The network
computes in half precision; how much noise there is, the noise itself, the loss and the sampler
stay in float32: in half precision 1 - 0.9999 is 0, and a thousand small steps add up to nothing.
The average of the weights, which draws, is kept in float32 by the optimizer (`use_ema`).
"""

import argparse
import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet
os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch: more threads only wait at this size

import gan
import keras
import memory_plan
import numpy as np
from keras import layers

import kmp

BATCH = 64


def signal_of(time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The shares of the image and of the noise at a time from 0 to 1: their squares add up to 1."""
    angle = (0.02 + 0.96 * time) * np.pi / 2
    return np.cos(angle), np.sin(angle)


class NoisyImages(keras.utils.PyDataset):
    """Batches with fresh noise each time: ({"image", "time"}, noise), all float32."""

    def __init__(self, images: np.ndarray):
        super().__init__()
        self.images, self.random = images, np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.images) // BATCH

    def __getitem__(self, index: int) -> tuple[dict, np.ndarray]:
        rows = self.random.integers(0, len(self.images), BATCH)
        return noisy(self.images[rows], self.random)


def noisy(images: np.ndarray, random: np.random.Generator) -> tuple[dict, np.ndarray]:
    """Images at random times, and the noise that is in them."""
    time = random.uniform(size=(len(images), 1)).astype("float32")
    noise = random.normal(size=images.shape).astype("float32")
    signal, share = (x[..., None, None] for x in signal_of(time))
    return {"image": signal * images + share * noise, "time": time}, noise


@keras.saving.register_keras_serializable(package="example")
class Waves(layers.Layer):
    """Sines and cosines of the time; made in float32, where those of high frequency differ."""

    def call(self, time):
        """float32[n, 32] from float32[n, 1]."""
        rates = keras.ops.convert_to_tensor(2 * np.pi * np.geomspace(1, 100, 16), "float32")
        angles = time * rates
        return keras.ops.concatenate([keras.ops.sin(angles), keras.ops.cos(angles)], -1)


def block(x, wave, width: int):
    """Two convolutions around a normalization, told how much noise there is."""
    across = x if x.shape[-1] == width else layers.Conv2D(width, 1)(x)
    x = layers.Conv2D(width, 3, padding="same", activation="silu")(layers.GroupNormalization(8)(x))
    x = x + layers.Reshape((1, 1, width))(layers.Dense(width)(wave))
    return across + layers.Conv2D(width, 3, padding="same", activation="silu")(x)


def build_model(size: int, channels: int, width: int) -> keras.Model:
    """A U-Net, down to 4 x 4 pixels and up again."""
    image = keras.Input((size, size, channels), name="image")
    time = keras.Input((1,), name="time")
    wave = layers.Dense(width, "silu")(Waves(dtype="float32")(time))
    x, kept = layers.Conv2D(width, 3, padding="same")(image), []
    steps = int(np.log2(size)) - 2
    for i in range(steps):
        x = block(x, wave, width * min(2**i, 4))
        kept.append(x)
        x = layers.AveragePooling2D(2)(x)
    x = block(x, wave, width * min(2**steps, 4))
    for i in reversed(range(steps)):
        x = layers.Concatenate()([layers.UpSampling2D(2)(x), kept.pop()])
        x = block(x, wave, width * min(2**i, 4))
    start = dict(kernel_initializer="zeros", dtype="float32")
    noise = layers.Conv2D(channels, 3, padding="same", **start, name="noise")(x)
    return keras.Model({"image": image, "time": time}, noise)


def compile_model(model: keras.Model, policy: str) -> None:
    """With AdamW and an average of the weights."""
    optimizer = keras.optimizers.AdamW(2e-3, use_ema=True, ema_momentum=0.99)
    scale = "dynamic" if "float16" in policy.split("_") else "none"
    model.compile(kmp.scaled(optimizer, loss_scale=scale), "mse")


def paint(model: keras.Model, shape: Sequence[int], steps: int) -> np.ndarray:
    """Images from nothing but noise, in float32: each step takes out what the model calls noise."""
    x = np.random.default_rng(1).normal(size=shape).astype("float32")
    times = np.linspace(1, 0, steps + 1, dtype="float32")
    for now, then in itertools.pairwise(times):
        time = np.full((len(x), 1), now)
        noise = np.asarray(model.predict({"image": x, "time": time}, verbose=0))
        signal, share = signal_of(now)
        image = np.clip((x - share * noise) / signal, -1, 1)
        noise = (x - signal * image) / share  # what the clipped image leaves
        signal, share = signal_of(then)
        x = signal * image + share * noise
    return image


def plan(arguments: argparse.Namespace) -> memory_plan.Plan:
    """XLA's plan of the step on a card."""
    shape = (arguments.size, arguments.size, 3)
    images = np.zeros((BATCH, *shape), "float32")
    batch = ({"image": images, "time": np.zeros((BATCH, 1), "float32")}, images)
    build = functools.partial(build_model, arguments.size, 3, arguments.width)
    compile_it = functools.partial(compile_model, policy=arguments.policy)
    return memory_plan.plan(build, compile_it, batch, arguments.plan)


def main(argv: Sequence[str] | None = None) -> None:
    """Plan, or train and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=pathlib.Path, help="a folder; left out: digits")
    parser.add_argument("--size", type=int, default=8, help="pixels: 8, 16, 32, 64 ...")
    parser.add_argument("--width", type=int, default=32, help="channels of the widest images")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20, help="of drawing")
    parser.add_argument("--policy", default="mixed_float16")
    parser.add_argument("--plan", choices=memory_plan.DEVICES, help="bytes on this card, no more")
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    arguments = parser.parse_args(argv)
    if arguments.plan and not memory_plan.is_ready():
        sys.exit(memory_plan.again())
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(arguments.policy)
    if arguments.plan:
        print(f"{arguments.policy}: {plan(arguments)}")
        return
    images = gan.load_images(arguments.images, arguments.size)
    model = build_model(*images.shape[2:], arguments.width)
    compile_model(model, arguments.policy)
    health = kmp.callbacks.GradientHealth()
    epochs = 10 if arguments.smoke else arguments.epochs
    history = model.fit(NoisyImages(images), epochs=epochs, callbacks=[health], verbose=0)
    model.optimizer.finalize_variable_values(model.trainable_variables)  # the average
    x, noise = noisy(images, np.random.default_rng(2))
    loss = model.evaluate(x, noise, verbose=0)
    print(health.verdict)
    print(f"Loss {history.history['loss'][-1]:.3f} in training; {loss:.3f} of the averaged weights")
    painted = paint(model, (64, *images.shape[1:]), arguments.steps)
    far = gan.distance(images, painted)
    noise = gan.distance(images, np.random.default_rng(3).uniform(-1, 1, images.shape))
    print(f"Distance from the real images: {noise:.3f} of noise, {far:.3f} drawn, on {gan.BACKEND}")
    gan.draw(painted, "diffusion.png")


if __name__ == "__main__":
    main()
