"""The whole recipe in one script: a small transformer learns to write like Python's documentation.

    python examples/full_recipe.py            minutes on two CPU cores
    python examples/full_recipe.py            again: goes on where it was killed

Mixed float16; AdamW whose decay spares biases and norms; the gradient of four micro-batches,
clipped by its global norm; linear warm-up and cosine decay; an average of the weights; the best
model on disk; a backup from which the same command resumes, bit for bit; GradientHealth to see and
DivergenceGuard to go back. The text is what `help()` shows in Python's own prompt, 0.7 million
characters that ship with every CPython.

With --smoke it kills itself in the second epoch and takes itself up again.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import shutil

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

from pydoc_data.topics import topics

import keras
import numpy as np
from keras import layers, ops

import kmp

CONTEXT, HEADS = 64, 4
MICRO_BATCH, ACCUMULATION = 16, 4  # each update is that of a batch of 64
CHARACTERS = [chr(code) for code in (10, *range(32, 127))]


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """Python's help topics as int32 codes, all others unknown: for training, for validation."""
    codes = {character: code for code, character in enumerate(CHARACTERS)}
    names = sorted(topics)
    texts = ["".join(topics[name] for name in chosen) for chosen in (names[10:], names[:10])]
    return tuple(np.array([codes.get(c, 1) for c in text], "int32") for text in texts)  # type: ignore


def draw_windows(text: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[count, CONTEXT]: windows of the text from random places, and the same one further."""
    starts = np.random.default_rng(0).integers(0, len(text) - CONTEXT - 1, count)
    windows = text[starts[:, None] + np.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


@keras.saving.register_keras_serializable(package="example")
class Positions(layers.Layer):
    """Adds a learned vector to each place of the context."""

    def build(self, shape):
        """Create one vector for each place."""
        self.table = self.add_weight(shape[1:], "glorot_uniform", name="table")

    def call(self, x):
        """Add in the compute dtype: Keras casts the float32 table."""
        return x + self.table


def build_model(width: int, blocks: int) -> keras.Model:
    """A decoder-only transformer; the logits leave it in float32."""
    codes = keras.Input((CONTEXT,), dtype="int32")
    x = Positions(name="positions")(layers.Embedding(len(CHARACTERS), width, name="embed")(codes))
    for i in range(blocks):
        normed = layers.LayerNormalization(name=f"norm{i}a")(x)
        attention = layers.MultiHeadAttention(HEADS, width // HEADS, name=f"attention{i}")
        # Asked for the scores, Keras writes attention out; JAX has no fused one in float16 on CPUs.
        attended, _ = attention(normed, normed, use_causal_mask=True, return_attention_scores=True)
        x = x + attended
        normed = layers.LayerNormalization(name=f"norm{i}b")(x)
        hidden = layers.Dense(4 * width, activation="gelu", name=f"up{i}")(normed)
        x = x + layers.Dense(width, name=f"down{i}")(hidden)
    logits = kmp.layers.Float32OutputDense(len(CHARACTERS), name="head")(
        layers.LayerNormalization(name="norm")(x)
    )
    return keras.Model(codes, logits, name="writer")


def compile_model(model: keras.Model, micro_steps: int) -> None:
    """AdamW with a warm-up over a tenth of the run, then a cosine to a tenth of the rate.

    A schedule counts micro-batches, as Keras's optimizers do, and none that was skipped.
    """
    warmup = micro_steps // 10
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, micro_steps - warmup, alpha=0.1, warmup_target=4e-3, warmup_steps=warmup
    )
    optimizer = kmp.scaled(
        keras.optimizers.AdamW,
        learning_rate=schedule,
        weight_decay=0.1,
        beta_2=0.98,
        global_clipnorm=1.0,  # of the true gradients, whatever the loss scale is
        gradient_accumulation_steps=ACCUMULATION,
        use_ema=True,
        ema_momentum=0.99,  # also of micro-batches
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta", "embed", "table"])
    optimizer.build(model.trainable_variables)  # there may be a state to load into it
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class KillAt(keras.callbacks.Callback):
    """What a spot instance does: ends the run in the middle of an epoch."""

    def __init__(self, epoch: int, batch: int):
        super().__init__()
        self.place, self.epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch, logs=None):
        """Remember the epoch."""
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        """End it."""
        if (self.epoch, batch) == self.place:
            raise KeyboardInterrupt


@dataclasses.dataclass(frozen=True)
class Size:
    """How large the run is; `windows` and `held_out` are windows of the text."""

    width: int = 64
    blocks: int = 2
    epochs: int = 10
    windows: int = 2048
    held_out: int = 256


SMOKE = Size(width=16, blocks=1, epochs=3, windows=128, held_out=32)


def train(directory: pathlib.Path, size: Size, extra: list) -> None:
    """Train from the backup in `directory`, or from the beginning if there is none."""
    keras.utils.set_random_seed(0)
    text, held_out = read_text()
    # Windows drawn once and not shuffled: a resumed epoch then sees what it would have seen.
    x, y = draw_windows(text, size.windows)
    validation = draw_windows(held_out, size.held_out)
    model = build_model(size.width, size.blocks)
    compile_model(model, size.epochs * size.windows // MICRO_BATCH)

    best, backup = directory / "best.weights.h5", directory / "backup"
    best_so_far = None
    if best.exists() and backup.exists():  # a new ModelCheckpoint does not know the old best
        model.load_weights(best)
        best_so_far = model.evaluate(*validation, verbose=0)
        print(f"Resuming from {backup}; best validation loss so far {best_so_far:.4f}.")
    health = kmp.callbacks.GradientHealth(log_dir=directory / "logs", update_freq=50)
    callbacks = [
        health,
        kmp.callbacks.DivergenceGuard("rollback", snapshot_freq=50),
        keras.callbacks.ModelCheckpoint(
            best, save_best_only=True, save_weights_only=True, initial_value_threshold=best_so_far
        ),
        keras.callbacks.LambdaCallback(on_epoch_end=print_epoch),
        # Last, so that what it backs up is an epoch whose best model is on disk.
        keras.callbacks.BackupAndRestore(backup),
    ]
    model.fit(
        x,
        y,
        batch_size=MICRO_BATCH,
        epochs=size.epochs,
        shuffle=False,
        validation_data=validation,
        callbacks=[*callbacks, *extra],
        verbose=0,
    )
    print(f"{health.verdict}\n")

    averaged = model.evaluate(*validation, verbose=0)  # fit has put the averages into the weights
    model.load_weights(best)
    kept = model.evaluate(*validation, verbose=0)
    updates = int(ops.convert_to_numpy(model.optimizer.iterations))
    shares = np.bincount(text, minlength=len(CHARACTERS)) / len(text)
    guess = -np.mean(np.log(shares[validation[1]]))
    for name, loss in (
        ("each character by its frequency", guess),
        ("averaged weights", averaged),
        (f"best checkpoint, update {updates}", kept),
    ):
        print(f"{name:32s} {loss / math.log(2):5.2f} bits a character")


def print_epoch(epoch: int, logs: dict[str, float]) -> None:
    """Say at once how an epoch went."""
    loss, verdict = logs["val_loss"], logs["verdict"]
    print(f"epoch {epoch + 1:2d}: validation loss {loss:.4f}, {verdict}", flush=True)


def main() -> None:
    """Train; with --smoke be killed and start over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=pathlib.Path, default="logs/full_recipe")
    parser.add_argument("--smoke", action="store_true", help="tiny, killed and taken up again")
    arguments = parser.parse_args()
    keras.config.set_dtype_policy("mixed_float16")
    if not arguments.smoke:
        train(arguments.directory, Size(), [])
        return
    shutil.rmtree(arguments.directory, ignore_errors=True)
    try:
        train(arguments.directory, SMOKE, [KillAt(1, 4)])
    except KeyboardInterrupt:
        print("Killed in the second epoch.")
    train(arguments.directory, SMOKE, [])


if __name__ == "__main__":
    main()
