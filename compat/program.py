"""What a program of the table is: how to make its model, its batch, and how to compile it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

BATCH, LENGTH, WORDS = 4, 8, 40
SEED = 0  # of the numbers of every batch
IMAGE = (32, 32, 3)


@dataclasses.dataclass(frozen=True)
class Program:
    """A model with random weights, and a batch to train it on.

    Attributes:
        make: returns the model, built, in the global dtype policy.
        batch: returns (x, y) as `fit` takes them; `BATCH` samples.
        loss: the loss as `compile` takes it, or a function without arguments that makes it.
        compile: called with the model, a function that wraps an optimizer, and further arguments
            of `compile`, where a program needs its own way.
        backends: on which of Keras's backends the program runs.
        callable: whether the model has a `call`; a GAN has none.
        part: returns a part of the model that has one, compiled, and a batch for it.
        logged: the name of the loss in `fit`'s history.
        optimizer: returns the optimizer of a compiled model, one of them if there are several.
        own_optimizers: whether the model keeps optimizers of its own, which nobody else can wrap.
        name: its name in the catalogue, which sets it.
    """

    make: Callable[[], keras.Model]
    batch: Callable[[], tuple[Any, Any]]
    loss: Any = None
    compile: Callable[..., None] | None = None
    backends: tuple[str, ...] = ("tensorflow", "jax", "torch")
    callable: bool = True
    part: Callable[[keras.Model], tuple[keras.Model, Any, Any]] | None = None
    logged: str = "loss"
    optimizer: Callable[[keras.Model], Any] = lambda model: model.optimizer
    own_optimizers: bool = False
    name: str = ""

    def compiled(self, model: keras.Model, wrap: Callable[[Any], Any], **arguments) -> keras.Model:
        """Compile `model` with Adam, as `wrap` returns it, and return it."""
        if self.compile is not None:
            self.compile(model, wrap, **arguments)
        else:
            loss = self.loss() if isinstance(self.loss, type | Callable) else self.loss
            model.compile(wrap(keras.optimizers.Adam(1e-3)), loss=loss, **arguments)
        return model

    def replayed(self, model: keras.Model) -> tuple[keras.Model, Any, Any]:
        """What a tool that replays a batch is given: the model, or a part of it; and the batch."""
        return (model, *self.batch()) if self.part is None else self.part(model)


def random() -> np.random.Generator:
    """The numbers of every batch come from the same seed."""
    return np.random.default_rng(SEED)


def words(length: int = LENGTH) -> np.ndarray:
    """Token ids, int32[BATCH, length]; none of them is 0."""
    return random().integers(1, WORDS, (BATCH, length)).astype("int32")


def padding(length: int = LENGTH) -> np.ndarray:
    """A mask of sequences of which the first is two shorter, int32[BATCH, length]."""
    mask = np.ones((BATCH, length), "int32")
    mask[0, -2:] = 0
    return mask


def images(shape: tuple[int, ...] = IMAGE) -> np.ndarray:
    """Images of normal numbers, float32[BATCH, *shape]."""
    return random().normal(size=(BATCH, *shape)).astype("float32")


def classes(number: int, *shape: int) -> np.ndarray:
    """Labels, int32[BATCH, *shape]."""
    return random().integers(0, number, (BATCH, *shape)).astype("int32")


def crossentropy() -> keras.losses.Loss:
    """The loss of most programs: of integer labels and logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
