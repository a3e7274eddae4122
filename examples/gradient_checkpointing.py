"""Trade time for memory: blocks that are computed again on the way back, in mixed precision.

    KERAS_BACKEND=jax python examples/gradient_checkpointing.py

Training keeps what every layer put out until the gradient comes back to it. Under
`keras.RematScope` a block keeps its input alone and is computed once more when the gradient needs
what is inside. Half precision halves what is kept, checkpointing keeps less of it, and the two
multiply. The gradients are the same, which is what the script checks on every backend; in half
precision but for the places where XLA rounds.

The bytes are XLA's own count, of what the forward pass leaves for the backward pass; only JAX hands
the two passes over apart. (Compiled as one program for a CPU they would not show the difference:
XLA's CPU compiler finds that the blocks are computed twice, and keeps them after all.)
"""

import argparse
import contextlib
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet
os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch: more threads only wait at this size

import keras
import numpy as np
from keras import layers, ops

import kmp

WIDTH = 64


@keras.saving.register_keras_serializable(package="example")
class Block(layers.Layer):
    """A residual block; between its layers lie activations that are eight times its input."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization()
        self.up = layers.Dense(4 * WIDTH, activation="gelu")
        self.down = layers.Dense(WIDTH)

    def build(self, shape):
        """Create the weights, so that the scope finds a layer that is ready."""
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * WIDTH))

    def call(self, x):
        """Add to the input what the block makes of it."""
        return x + self.down(self.up(self.norm(x)))


def build_model(policy: str, blocks: int, checkpointing: bool) -> keras.Model:
    """The same weights every time."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    names = [f"block{i}" for i in range(blocks)]
    scope = keras.RematScope(mode="list_of_layers", layer_names=names)
    with scope if checkpointing else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.Input((WIDTH,)),
                *(Block(name=name) for name in names),
                kmp.layers.Float32OutputDense(1, name="head"),
            ]
        )
    keras.config.set_dtype_policy("float32")
    model.compile(kmp.scaled("sgd", 1024, learning_rate=1.0), loss="mse")
    return model


def kept_bytes(model: keras.Model, x: np.ndarray) -> int | None:
    """What the forward pass keeps for the backward pass, by XLA; None where nobody can say."""
    if keras.backend.backend() != "jax":
        return None
    import jax

    def forward(values):
        _, pull_back = jax.vjp(lambda v: model.stateless_call(v, [], x)[0], values)
        return pull_back  # holds what it will need

    values = [v.value for v in model.trainable_variables]
    compiled = jax.jit(forward).lower(values).compile()
    return int(compiled.memory_analysis().output_size_in_bytes)


def update(model: keras.Model, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Take one step of gradient descent at a rate of 1; the change is the gradient."""
    before = [ops.convert_to_numpy(v).copy() for v in model.trainable_variables]
    model.train_on_batch(x, y)
    after = [ops.convert_to_numpy(v) for v in model.trainable_variables]
    return np.concatenate([(b - a).ravel() for a, b in zip(after, before, strict=True)])


def main() -> None:
    """Measure every way of training and compare their gradients."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two blocks, float16 alone")
    smoke = parser.parse_args().smoke
    rows, blocks = (512, 2) if smoke else (4096, 6)
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, WIDTH)).astype("float32")

    print("policy          checkpointing   kept for the backward pass   gradient")
    for policy in ("mixed_float16",) if smoke else ("float32", "mixed_bfloat16", "mixed_float16"):
        reference = None
        for checkpointing in (False, True):
            model = build_model(policy, blocks, checkpointing)
            kept = kept_bytes(model, x)
            gradient = update(model, x, x[:, :1])
            told = "JAX can tell" if kept is None else f"{kept / 2**20:.2f} MiB"
            if reference is None:
                reference, said = gradient, f"norm {np.linalg.norm(gradient):.5g}"
            else:
                error = np.linalg.norm(gradient - reference) / np.linalg.norm(reference)
                said = f"the same within {error:.1e}"
            print(f"{policy:15s} {'yes' if checkpointing else 'no':13s} {told:>28s}   {said}")


if __name__ == "__main__":
    main()
