"""Gradient checkpointing: blocks of a model are computed again instead of kept in memory."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from keras import Layer, Model
from keras.layers import InputLayer

from kmp._backend import backend
from kmp._common import table
from kmp._keras import check_model, layers_of, path_of
from kmp._keras.blocks import blocks_of, chosen_by, recompute_only


class RecomputedBlock(NamedTuple):
    """One block that is computed again.

    Attributes:
        path: str, `layer.path`, or its name where Keras gives no path.
        layer: str, the name of its class.
        layers: int, the layers inside it, at any depth: what they put out is not kept.
        parameters: int, the numbers in its weights.
    """

    path: str
    layer: str
    layers: int
    parameters: int


@dataclasses.dataclass(frozen=True)
class RecomputeReport:
    """What `kmp.recompute` did; it prints as a table.

    Attributes:
        rows: tuple of `RecomputedBlock`, in the order of the model's layers.
    """

    rows: tuple[RecomputedBlock, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the blocks."""
        return tuple(row.path for row in self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "no block is computed again"
        header = ("block", "class", "layers inside", "parameters")
        return table([header, *(tuple(map(str, row)) for row in self.rows)], left=2)


def recompute(
    model: Model, filter_fn: Callable[[Layer, str], bool] | None = None
) -> RecomputeReport:
    """Checkpoint the gradient: keep only the inputs of blocks, and compute what is inside twice.

    Training keeps what every layer puts out until the gradient comes back to it; that is most of
    its memory. A block that is computed again keeps its input tensors alone. When the gradient
    reaches it, it runs once more, for about a third more time if all blocks do.

    The second run does what the first did: the same dropout masks, `training`, weights and dtypes.
    Moving statistics, seeds, metrics and `add_loss` are updated once. So the weights after training
    are those of the same run without it, bit for bit, on PyTorch and on TensorFlow without XLA.
    Under XLA, so on JAX, its compiler may round half precision in other places.

    The model is changed in place. It trains in `fit`, `train_on_batch` and loops of your own, under
    any policy and with everything else in kmp; its files are those of a model without it. The last
    call decides which blocks are computed again. To have none, choose none:

        kmp.recompute(model, lambda layer, path: False)

    A model that is loaded, cloned or copied has none either. Functions that Keras has compiled are
    dropped. A `jax.jit` or `tf.function` of your own stays as it was traced.

    Args:
        model: built `keras.Model`: Sequential, Functional or subclassed.
        filter_fn: called with each layer and its path, from the outside in. A layer is computed
            again if it returns True, and is not asked about the layers inside it then. If left out,
            the blocks are the outermost layers with weights that have layers inside them, such as
            an encoder's `TransformerEncoder`s. A model in the model is one only if it has none.

    Returns:
        `RecomputeReport`, one row a block; the model is the same object.

    Raises:
        TypeError: if `model` is no Keras model, or `filter_fn` cannot be called.
        ValueError: if the model is not built, or `filter_fn` is left out and it has no blocks.

    Example:

    >>> blocks = [keras.Sequential([keras.layers.Dense(8, "gelu"), keras.layers.Dense(4)])
    ...           for _ in range(3)]
    >>> model = keras.Sequential([keras.Input((4,)), *blocks, keras.layers.Dense(1)])
    >>> report = recompute(model)
    >>> [row.layers for row in report.rows]
    [2, 2, 2]
    >>> report = recompute(model, lambda layer, path: layer in blocks[:2])  # the first two
    >>> len(report.paths)
    2

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). `keras.RematScope`
    has the same purpose; see docs/limits.md for what it does to dropout and statistics.
    """
    check_model(model, "recompute")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            "`filter_fn` of recompute must be a function of a layer and its path. Received: "
            f"{filter_fn!r}. Write lambda layer, path: 'encoder' in path, for example."
        )
    blocks = blocks_of(model) if filter_fn is None else chosen_by(filter_fn, model)
    if filter_fn is None and not blocks:
        raise ValueError(
            "`model` of recompute must have blocks: layers with weights that have layers inside "
            f"them. Received: {model.name!r}, which has none. Choose layers by filter_fn, or build "
            "each part that is to be computed again as a keras.Sequential or a layer of your own."
        )
    recompute_only(blocks, model, backend)
    return RecomputeReport(tuple(map(_row_of, blocks)))


def _row_of(block: Layer) -> RecomputedBlock:
    inside = [layer for layer in layers_of(block)[1:] if not isinstance(layer, InputLayer)]
    parameters = sum(math.prod(v.shape) for v in block.weights)
    return RecomputedBlock(path_of(block), type(block).__name__, len(inside), parameters)
