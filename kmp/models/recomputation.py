"""Gradient checkpointing: parts of a model are computed again instead of kept in memory."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from keras import Layer, Model
from keras.layers import InputLayer

from kmp._backend import backend
from kmp._common import table
from kmp._keras import check_model, layers_of, path_of
from kmp._keras.blocks import chosen_pieces, recompute_only
from kmp._keras.segments import Segment


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


class RecomputedSegment(NamedTuple):
    """One segment of a graph that is computed again: layers that run one after another.

    Attributes:
        path: str, the name of its last layer. What that puts out is kept.
        first: str, the name of its first layer.
        layers: int, the layers in it, at any depth.
        parameters: int, the numbers in their weights.
    """

    path: str
    first: str
    layers: int
    parameters: int


@dataclasses.dataclass(frozen=True)
class RecomputeReport:
    """What `kmp.recompute` did; it prints as a table.

    Attributes:
        rows: tuple of `RecomputedBlock` in the order of the model's layers, or of
            `RecomputedSegment` in the order in which they run.
    """

    rows: tuple[RecomputedBlock | RecomputedSegment, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the blocks, or the names with which the segments end."""
        return tuple(row.path for row in self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "no block is computed again"
        of_blocks = isinstance(self.rows[0], RecomputedBlock)
        names = ("block", "class") if of_blocks else ("segment up to", "from")
        header = (*names, "layers inside", "parameters")
        return table([header, *(tuple(map(str, row)) for row in self.rows)], left=2)


def recompute(
    model: Model,
    filter_fn: Callable[[Layer, str], bool] | None = None,
    segments: int | Sequence[str] | None = None,
    policy: Any = None,
) -> RecomputeReport:
    """Checkpoint the gradient: keep only the inputs of blocks, and compute what is inside twice.

    Training keeps the outputs of every layer until the gradient comes back to it; they take most of
    its memory. A block that is computed again keeps only its input tensors. When the gradient
    reaches the block, it runs once more. If all blocks do, training takes about a third more time.

    The second run does what the first did: the same dropout masks, `training`, weights and dtypes.
    Moving statistics, seeds, metrics and `add_loss` are updated once. So the weights after training
    are those of the same run without recomputation, bit for bit, on PyTorch and on TensorFlow
    without XLA. Under XLA, and so on JAX, the compiler may round half precision in other places.

    A model without blocks, such as those of `keras.applications`, is cut into segments, at places
    where little is handed on from one layer to the next. All segments but the last are computed
    again: what the last one keeps is needed as soon as the backward pass begins.

    The model is changed in place. It trains in `fit`, `train_on_batch` and loops of your own, under
    any policy and with everything else in kmp; its files are those of a model without it. The last
    call decides which blocks are computed again. To have none, choose none:

        kmp.recompute(model, lambda layer, path: False)

    A model that is loaded, cloned or copied has none either. Functions that Keras has compiled are
    dropped. A `jax.jit` or `tf.function` of your own stays as it was traced.

    Args:
        model: built `keras.Model`: Sequential, Functional or subclassed.
        filter_fn: called with each layer and its path, from the outside in. If it returns True, the
            layer is computed again, and the layers inside it are not asked about. If left out, the
            blocks are the outermost layers with weights that have layers inside them, such as an
            encoder's `TransformerEncoder`s. A model inside the model is a block only if it has no
            blocks itself. A Functional or Sequential model is cut into segments if its blocks put
            out less than half of what all layers do. If the only block is such a model inside the
            model, that one is cut.
        segments: cut the model into segments, whether it has blocks or not: a whole number of at
            least 2, the most segments that there may be; or the names of the layers with which
            segments end. What comes after the last of these layers is kept. Only a Functional or
            Sequential model can be cut; if there are several, one inside another, the one that
            calls most layers is cut.
        policy: what to keep inside all the same, which takes more memory and fewer operations.
            "dots_saveable" keeps the results of matrix products and convolutions. JAX also takes
            other names of `jax.checkpoint_policies` that end in "_saveable", or a function like
            those there; PyTorch takes what
            `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes. TensorFlow has no
            policies.

    Returns:
        `RecomputeReport`, one row a block; the model is the same object.

    Raises:
        TypeError: if `model` is not a Keras model, or `filter_fn` cannot be called.
        ValueError: if the model is not built; it has no blocks and cannot be cut either;
            `segments` is neither a whole number of at least 2 nor names of layers that the model
            calls once; `filter_fn` is given beside `segments`; or the backend has no such `policy`.

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

    A model without blocks:

    >>> stack = [keras.layers.Dense(8, name=f"dense{i}") for i in range(9)]
    >>> model = keras.Sequential([keras.Input((8,)), *stack])
    >>> print(recompute(model))
    segment up to  from    layers inside  parameters
    dense2         dense0              3         216
    dense5         dense3              3         216
    >>> recompute(model, segments=["dense2"]).paths  # only the first
    ('dense2',)

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). `keras.RematScope`
    has the same purpose; see docs/limits.md for what it does to dropout and statistics.
    """
    check_model(model, "recompute")
    pieces = chosen_pieces(model, filter_fn, segments)
    if not pieces and filter_fn is None and segments is None:
        raise ValueError(
            "`model` of recompute must have blocks, layers with weights that have layers inside "
            "them, or be a Functional or Sequential model long enough to be cut. Received: "
            f"{model.name!r}, which is neither. Choose layers by filter_fn, or build each part "
            "that is to be computed again as a keras.Sequential or a layer of your own."
        )
    chosen = None if policy is None else backend.recompute_policy(policy)
    recompute_only(pieces, model, backend, chosen)
    return RecomputeReport(tuple(map(_row_of, pieces)))


def _row_of(piece: Layer | Segment) -> RecomputedBlock | RecomputedSegment:
    parameters = sum(math.prod(v.shape) for v in piece.weights)
    if isinstance(piece, Segment):
        return RecomputedSegment(piece.last, piece.first, len(piece.layers), parameters)
    inside = [layer for layer in layers_of(piece)[1:] if not isinstance(layer, InputLayer)]
    return RecomputedBlock(path_of(piece), type(piece).__name__, len(inside), parameters)
