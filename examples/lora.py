"""LoRA on half the memory: float32 adapters over a frozen bfloat16 base, trained, merged, saved.

    python examples/lora.py

A classifier knows upright digits. Its weights become bfloat16 and are frozen, two bytes each and no
slots; small float32 adapters learn mirrored digits. Then they are merged into the base.
"""

import argparse
import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kmp


def build_model() -> keras.Model:
    """A classifier of vectors of 64 numbers."""
    hidden = [layers.Dense(256, "relu", use_bias=False, name=f"hidden_{i}") for i in range(2)]
    return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10, name="head")])


def compile_model(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """With a loss of logits, and the accuracy."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])


def kibibytes(model: keras.Model) -> float:
    """What the weights and the optimizer's slots take."""
    slots = [v for v in model.optimizer.inner_optimizer.variables if len(v.shape)]
    sizes = [np.prod(v.shape) * (2 if v.dtype == "bfloat16" else 4) for v in model.weights + slots]
    return sum(sizes) / 1024


def main() -> None:
    """Train a base, convert it, train adapters, merge and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    epochs = 5 if parser.parse_args().smoke else 20
    keras.utils.set_random_seed(0)
    digits = load_digits()
    images = (digits.images / 16).astype("float32")
    upright, mirrored = images.reshape(-1, 64), images[:, :, ::-1].reshape(-1, 64)
    split = train_test_split(upright, mirrored, digits.target, test_size=0.3, random_state=0)
    x, x_test, mirrored, mirrored_test, y, y_test = split

    model = build_model()
    compile_model(model, keras.optimizers.Adam(1e-3))
    model.fit(x, y, epochs=epochs, verbose=0)
    whole = 3 * 4 * model.count_params() / 1024  # weights and Adam's two slots
    print(f"Base: upright digits {model.evaluate(x_test, y_test, verbose=0)[1]:.1%}, mirrored ones")
    print(f"      {model.evaluate(mirrored_test, y_test, verbose=0)[1]:.1%}")

    for layer in model.layers[:-1]:
        layer.enable_lora(8)  # freezes the kernel
    model.layers[-1].trainable = False
    compile_model(model, kmp.scaled(keras.optimizers.Adam(3e-3), loss_scale="none"))
    print(f"\n{kmp.to_mixed_precision(model, 'bfloat16')}")
    health = kmp.callbacks.GradientHealth()
    model.fit(mirrored, y, epochs=epochs, callbacks=[health], verbose=0)
    print(f"\n{health.verdict}")
    print(f"Weights and slots: {kibibytes(model):.0f} KiB; all of it in float32: {whole:.0f} KiB")
    adapted = model.evaluate(mirrored_test, y_test, verbose=0)[1]
    print(f"Adapters on a bfloat16 base: mirrored digits {adapted:.1%}")

    kmp.to_mixed_precision(model, "float32")  # so that Keras merges in float32
    with tempfile.TemporaryDirectory() as directory:
        model.save(f"{directory}/merged.keras")
        merged = keras.saving.load_model(f"{directory}/merged.keras")
    accuracy = merged.evaluate(mirrored_test, y_test, verbose=0)[1]
    print(f"Merged, saved and loaded: {accuracy:.1%}, on {keras.backend.backend()}.")


if __name__ == "__main__":
    main()
