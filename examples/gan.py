"""A GAN in mixed float16: two nets, two optimizers, and a loss scale for each.

    python examples/gan.py                                     digits of 8 x 8 pixels, a minute
    python examples/gan.py --images folder --size 64 --width 64 --epochs 50
    python examples/gan.py --size 64 --width 64 --plan t4      bytes only

The gradients of the two nets differ in size, and either may overflow alone. So each optimizer has
a loss scale of its own, and skips its own steps: one batch here has an infinite pixel, which costs
the critic one step and the artist none. A net whose gradients are not finite keeps its weights, so
the other one never meets a NaN. The step is written once for each backend, as in custom_loop.py;
read yours.
"""

import argparse
import functools
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet
os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch: more threads only wait at this size

import keras
import memory_plan
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits

import kmp

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf
elif BACKEND == "jax":
    import jax
elif BACKEND == "torch":
    import torch

CODE, BATCH, BAD_STEP = 32, 64, 5
entropy = keras.losses.BinaryCrossentropy(from_logits=True)


class Nets:
    """The critic, the artist, and an optimizer for each."""

    def __init__(self, size: int, channels: int, width: int):
        layer = functools.partial(layers.Conv2D, kernel_size=4, strides=2, padding="same")
        stack = [keras.Input((size, size, channels))]
        steps = int(np.log2(size)) - 2  # to 4 x 4 pixels
        for i in range(steps):
            stack += [layer(width * 2**i), layers.LeakyReLU(negative_slope=0.2)]
        head = kmp.layers.Float32OutputDense(1)
        self.critic = keras.Sequential([*stack, layers.Flatten(), head], name="critic")
        stack = [keras.Input((CODE,)), layers.Dense(16 * width * 2 ** (steps - 1), "relu")]
        stack += [layers.Reshape((4, 4, width * 2 ** (steps - 1)))]
        for i in reversed(range(steps)):
            stack += [layers.UpSampling2D(2), layers.Conv2D(width * 2**i, 3, padding="same")]
            stack += [layers.GroupNormalization(4), layers.LeakyReLU(negative_slope=0.2)]
        last = layers.Conv2D(channels, 3, padding="same", activation="tanh", dtype="float32")
        self.artist = keras.Sequential([*stack, last], name="artist")
        adam = functools.partial(keras.optimizers.Adam, beta_1=0.5)
        self.critic_optimizer = kmp.scaled(adam(4e-4))
        self.artist_optimizer = kmp.scaled(adam(2e-4))
        self.critic_optimizer.build(self.critic.trainable_variables)
        self.artist_optimizer.build(self.artist.trainable_variables)

    def critic_loss(self, images, codes):
        """Real images are to have positive logits, painted ones negative ones."""
        real = self.critic(images, training=True)
        painted = self.critic(self.artist(codes, training=True), training=True)
        right = entropy(ops.ones_like(real), real)
        return right + entropy(ops.zeros_like(painted), painted)

    def artist_loss(self, codes):
        """Painted images are to pass for real."""
        logits = self.critic(self.artist(codes, training=True), training=True)
        return entropy(ops.ones_like(logits), logits)


def make_step_on_tensorflow(nets: Nets):
    """A gradient tape for each net; only the variables of that net are asked for."""

    def update(loss_of, optimizer, variables):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([v.value for v in variables])
            loss = loss_of()
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, [v.value for v in variables]), variables)
        return loss

    @tf.function
    def step(x, z):
        critic, artist = nets.critic.trainable_variables, nets.artist.trainable_variables
        one = update(lambda: nets.critic_loss(x, z), nets.critic_optimizer, critic)
        return one, update(lambda: nets.artist_loss(z), nets.artist_optimizer, artist)

    return step


def pure_step(nets: Nets):
    """For JAX: `(state, x, z) -> (state, losses)`, and the variables that the state is of."""
    owners = [
        nets.critic.trainable_variables,
        nets.artist.trainable_variables,
        nets.critic_optimizer.variables,
        nets.artist_optimizer.variables,
    ]

    def update(loss_of, optimizer, slots, variables, weights, others):
        def scaled(weights):
            with keras.StatelessScope([*zip(variables, weights, strict=True), *others]):
                loss = loss_of()
            return optimizer.stateless_scale_loss(slots, loss), loss

        gradients, loss = jax.grad(scaled, has_aux=True)(weights)
        return *optimizer.stateless_apply(slots, gradients, weights), loss

    def step(state, x, z):
        critic, artist, critic_slots, artist_slots = state
        others = [*zip(owners[1], artist, strict=True)]
        critic, critic_slots, one = update(
            lambda: nets.critic_loss(x, z),
            *(nets.critic_optimizer, critic_slots, owners[0], critic, others),
        )
        others = [*zip(owners[0], critic, strict=True)]
        artist, artist_slots, two = update(
            lambda: nets.artist_loss(z),
            *(nets.artist_optimizer, artist_slots, owners[1], artist, others),
        )
        return (critic, artist, critic_slots, artist_slots), (one, two)

    return step, owners


def make_step_on_jax(nets: Nets):
    """The pure step under jit, and its results put back where `keras` looks for them."""
    step, owners = pure_step(nets)
    compiled = jax.jit(step, donate_argnums=0)

    def run(x, z):
        state, losses = compiled(tuple([v.value for v in group] for group in owners), x, z)
        for group, values in zip(owners, state, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)
        return losses

    return run


def make_step_on_torch(nets: Nets):
    """Two backward passes; the gradients of the other net are not asked for."""

    def update(loss, optimizer, variables):
        scaled = optimizer.scale_loss(loss)
        gradients = torch.autograd.grad(scaled, [v.value for v in variables])
        with torch.no_grad():
            optimizer.apply(gradients, variables)
        return loss.detach()

    def step(x, z):
        x, z = torch.as_tensor(x), torch.as_tensor(z)
        critic, artist = nets.critic.trainable_variables, nets.artist.trainable_variables
        one = update(nets.critic_loss(x, z), nets.critic_optimizer, critic)
        return one, update(nets.artist_loss(z), nets.artist_optimizer, artist)

    return step


def load_images(folder: pathlib.Path | None, size: int) -> np.ndarray:
    """float32[n, size, size, channels] from -1 to 1: of a folder, or scikit-learn's digits."""
    if folder is None:
        images = np.kron(load_digits().images / 8 - 1, np.ones((size // 8, size // 8)))
        return images[..., None].astype("float32")
    found = keras.utils.image_dataset_from_directory(
        folder, labels=None, image_size=(size, size), batch_size=None
    )
    return np.stack([np.asarray(image) for image in found]) / 127.5 - 1


def batches(images: np.ndarray, epochs: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Images and codes; step number BAD_STEP has one infinite pixel."""
    random, step = np.random.default_rng(0), 0
    for _ in range(epochs):
        order = random.permutation(len(images))
        for i in range(0, len(images) // BATCH * BATCH, BATCH):
            x = images[order[i : i + BATCH]]
            x[0, 0, 0] = np.inf if step == BAD_STEP else x[0, 0, 0]
            yield x, random.normal(size=(BATCH, CODE)).astype("float32")
            step += 1


def distance(images: np.ndarray, painted: np.ndarray) -> float:
    """How far the painted images' mean and spread are from the real ones', pixel by pixel."""
    parts = [np.abs(f(images, 0) - f(painted, 0)).mean() for f in (np.mean, np.std)]
    return float(sum(parts))


def draw(painted: np.ndarray, path: str) -> None:
    """Write 64 images into one picture, where Matplotlib is installed."""
    try:
        import matplotlib.image
    except ImportError:
        return
    rows = painted[:64].reshape(8, 8, *painted.shape[1:]).swapaxes(1, 2)
    picture = rows.reshape(8 * painted.shape[1], 8 * painted.shape[2], -1)
    picture = np.repeat(np.repeat(picture, 4, 0), 4, 1)
    picture = np.broadcast_to(np.clip(picture / 2 + 0.5, 0, 1), (*picture.shape[:2], 3))
    matplotlib.image.imsave(path, picture)
    print(f"Images: {path}")


def plan(nets: Nets, size: int, channels: int, device: str) -> memory_plan.Plan:
    """XLA's plan of the step on a card."""
    step, owners = pure_step(nets)
    state = tuple(owners)
    x = np.zeros((BATCH, size, size, channels), "float32")
    arguments = (state, x, np.zeros((BATCH, CODE), "float32"))
    parameters = nets.critic.count_params() + nets.artist.count_params()
    return memory_plan.plan_step(step, arguments, parameters, device)


def main(argv: Sequence[str] | None = None) -> None:
    """Plan, or train and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=pathlib.Path, help="a folder; left out: digits")
    parser.add_argument("--size", type=int, default=8, help="pixels: 8, 16, 32, 64 ...")
    parser.add_argument("--width", type=int, default=32, help="channels of the widest images")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--policy", default="mixed_float16")
    parser.add_argument("--plan", choices=memory_plan.DEVICES, help="bytes on this card, no more")
    parser.add_argument("--smoke", action="store_true", help="two epochs")
    arguments = parser.parse_args(argv)
    size, device = arguments.size, arguments.plan
    if device and not memory_plan.is_ready():
        sys.exit(memory_plan.again())
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(arguments.policy)
    if device:
        print(f"{arguments.policy}: {plan(Nets(size, 3, arguments.width), size, 3, device)}")
        return
    images = load_images(arguments.images, size)
    nets = Nets(size, images.shape[-1], arguments.width)
    makers = {"tensorflow": make_step_on_tensorflow, "jax": make_step_on_jax}
    step = makers.get(BACKEND, make_step_on_torch)(nets)
    codes = np.random.default_rng(1).normal(size=(256, CODE)).astype("float32")
    before = distance(images, nets.artist.predict(codes, verbose=0))
    losses = [step(x, z) for x, z in batches(images, 2 if arguments.smoke else arguments.epochs)]
    painted = nets.artist.predict(codes, verbose=0)
    for name in ("critic", "artist"):
        optimizer = getattr(nets, f"{name}_optimizer")
        last = float(losses[-1][name == "artist"])
        print(
            f"{name}: loss {last:.3f}, loss scale {float(optimizer.dynamic_scale):g}, "
            f"{int(optimizer.skipped_steps)} of {int(optimizer.steps)} steps skipped"
        )
    after = distance(images, painted)
    print(f"Distance from the real images: {before:.3f} before, {after:.3f} after, on {BACKEND}")
    draw(painted, "gan.png")


if __name__ == "__main__":
    main()
