"""Trade time for memory: blocks that are computed again on the way back, in mixed precision.

    KERAS_BACKEND=jax python examples/gradient_checkpointing.py

Training keeps what every layer put out until the gradient comes back to it. After
`kmp.recompute(model)` a block keeps its input alone and is computed once more when the gradient
needs what is inside, with the dropout mask that it had. Half precision halves what is kept,
checkpointing keeps less of it, and the two multiply. The gradients are the same, which is what the
script checks on every backend; in half precision but for the places where XLA rounds.

The bytes are what the forward pass leaves for the backward pass: by XLA's own count on JAX, and by
PyTorch's hooks. (Compiled as one program for a CPU they would not show the difference: XLA's CPU
compiler finds that the blocks are computed twice, and keeps them after all.)
"""

import argparse
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
        self.dropout = layers.Dropout(0.1, seed=1)
        self.down = layers.Dense(WIDTH)

    def build(self, shape):
        """Create the weights."""
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * WIDTH))

    def call(self, x):
        """Add to the input what the block makes of it."""
        return x + self.down(self.dropout(self.up(self.norm(x))))


def build_model(policy: str, blocks: int, checkpointing: bool) -> keras.Model:
    """The same weights every time."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            *(Block(name=f"block{i}") for i in range(blocks)),
            kmp.layers.Float32OutputDense(1, name="head"),
        ]
    )
    if checkpointing:
        kmp.recompute(model)
    keras.config.set_dtype_policy("float32")
    model.compile(kmp.scaled("sgd", 1024, learning_rate=1.0), loss="mse")
    return model


def kept_bytes(model: keras.Model, x: np.ndarray) -> int | None:
    """What the forward pass keeps for the backward pass; None where nobody can say."""
    count = {"jax": kept_on_jax, "torch": kept_on_torch}.get(keras.backend.backend())
    return count(model, x) if count else None


def kept_on_jax(model: keras.Model, x: np.ndarray) -> int:
    """XLA's count, without the weights, which are there anyway."""
    import jax

    state = [v.value for v in model.non_trainable_variables]

    def forward(values):
        def outputs(v):
            return model.stateless_call(v, state, x, training=True)[0]

        return jax.vjp(outputs, values)[1]  # holds what it will need

    values = [v.value for v in model.trainable_variables]
    compiled = jax.jit(forward).lower(values).compile()
    return int(compiled.memory_analysis().output_size_in_bytes) - sum(v.nbytes for v in values)


def kept_on_torch(model: keras.Model, x: np.ndarray) -> int:
    """The tensors that PyTorch saves, each once, without the weights."""
    import torch

    weights, kept = {v.value.data_ptr() for v in model.variables}, {}

    def save(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        outputs = model(x, training=True)
    return sum(kept.values()) if outputs.requires_grad else 0


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
            told = "JAX and PyTorch tell" if kept is None else f"{kept / 2**20:.2f} MiB"
            if reference is None:
                reference, said = gradient, f"norm {np.linalg.norm(gradient):.5g}"
            else:
                error = np.linalg.norm(gradient - reference) / np.linalg.norm(reference)
                said = f"the same within {error:.1e}"
            print(f"{policy:15s} {'yes' if checkpointing else 'no':13s} {told:>28s}   {said}")


if __name__ == "__main__":
    main()
