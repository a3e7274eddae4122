"""What training would hold in memory under float32, mixed and pure half precision."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import Sequential, ops

from kmp._backend import backend
from kmp._backend.types import Tensor, Tree, Variable
from kmp._common import table, whole_number
from kmp._keras import cast_variables, layers_of, own_weights
from kmp._keras.optimizer import inner_optimizer_of
from kmp.debug.preserved import Preserved
from kmp.debug.replay import as_batch, call_model, check_replayable, forward
from kmp.debug.stats import floats
from kmp.half_memory import HalfMemory, build_inner
from kmp.precision.temporary import under
from kmp.precision.trees import HALF_DTYPES

_HALF = "mixed_bfloat16"  # as many bytes as float16, and computed on every device


class BlockUse(NamedTuple):
    """Bytes of one block or segment that `kmp.recompute` has chosen, in one precision.

    Attributes:
        path: str, of the block, or the name of the layer that ends the segment.
        kept: int, its input tensors and their masks, which it keeps for the gradient. A policy of
            `kmp.recompute` keeps more on top. A `keras.Sequential` has its inputs in the dtype of
            its own `keras.Input`, under which it was built, whatever its policy is now.
        instead: int, the outputs of the layers inside, which it would keep otherwise.

    Example:

    >>> BlockUse("encoder/block", kept=2048, instead=20480).instead
    20480
    """

    path: str
    kept: int
    instead: int


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes of one training step under one precision.

    Attributes:
        precision: "float32", "mixed half" or "pure half".
        parameters: all variables of the model, and in mixed precision the half copies of the
            float32 ones that the layers compute with.
        gradients: one for each trainable variable, in its dtype.
        slots: what the optimizer keeps for each trainable variable: in its dtype, or as
            `kmp.scaled` was told, the remainders of bfloat16 weights included.
        activations: the outputs of all layers, in their dtypes, as if all were kept for the
            backward pass and nothing else. Where blocks are computed again, what they keep instead,
            and the inside of the largest.
        compiled: what XLA itself needs beside arguments and results for the forward and backward
            pass of a compiled step; None where it does not say.
        blocks: tuple of `BlockUse`, one for each time that a block computed again is called.

    Example:

    >>> MemoryUse("float32", 400, 400, 800, 1000, None).total
    2600
    """

    precision: str
    parameters: int
    gradients: int
    slots: int
    activations: int
    compiled: int | None
    blocks: tuple[BlockUse, ...] = ()

    @property
    def total(self) -> int:
        """The hand count: parameters, gradients, slots and activations."""
        return self.parameters + self.gradients + self.slots + self.activations


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Three precisions side by side; see `memory_report`.

    Attributes:
        batch_size: samples in a batch.
        rows: float32, mixed half and pure half.

    Example:

    >>> print(MemoryReport(8, (MemoryUse("float32", 4096, 4096, 8192, 2048, None),)))
    KiB at batch size 8  parameters   gradients       slots  activations       total    XLA temp
    float32                       4           4           8            2          18           -
    """

    batch_size: int
    rows: tuple[MemoryUse, ...]

    def __str__(self) -> str:
        header = ["parameters", "gradients", "slots", "activations", "total", "XLA temp"]
        rows = [[f"KiB at batch size {self.batch_size}", *header]]
        for row in self.rows:
            counts = (row.parameters, row.gradients, row.slots, row.activations, row.total)
            compiled = "-" if row.compiled is None else f"{row.compiled / 1024:,.0f}"
            rows.append([row.precision, *(f"{n / 1024:,.0f}" for n in counts), compiled])
        full, mixed = (self.rows[i].blocks for i in (0, min(1, len(self.rows) - 1)))
        if not full:
            return table(rows)
        blocks = [["KiB computed again", "kept", "instead of", "kept in half", "instead of"]]
        for each in zip(full, mixed, strict=True):
            numbers = [n for block in each for n in (block.kept, block.instead)]
            blocks.append([each[0].path, *(f"{n / 1024:,.0f}" for n in numbers)])
        return f"{table(rows)}\n\n{table(blocks)}"


def memory_report(model: keras.Model, batch_size: int, x: Tree = None) -> MemoryReport:
    """Count the bytes of a training step in float32, in mixed and in pure half precision.

    The hand count adds up what a step holds: parameters, gradients, optimizer slots, and the output
    of each layer. A compiler holds less where it fuses or recomputes, and more where it needs
    scratch space: on JAX the step is compiled (not run) with the weights that the model has, and
    the last column is XLA's own count. If all weights are in float32, it has numbers for float32
    and for mixed precision, and otherwise only for pure half precision. On other backends there is
    only the hand count. If some layers compute in half precision now, the others stay in float32 in
    each row, as do their weights; if none does, all would. For each block or segment that
    `kmp.recompute` has chosen, the report says what that keeps, and what it would keep otherwise.

    Args:
        model: a built model. Slots are counted if it is compiled.
        batch_size: samples in a batch.
        x: a batch of any number of samples, in the structure in which the model is called. Needed
            where the model does not know the shapes of its inputs: sequences of any length, and
            subclassed models. A batch of `batch_size` samples is run as it is, any other is counted
            by its first sample.

    Returns:
        A `MemoryReport`; print it.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: the model is not built; it does not know the shapes of its inputs, and `x` is
            missing; `batch_size` is not a whole number of at least 1, or differs from that of
            inputs that have one; `x` is not a batch of arrays.

    Example:

    >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    >>> model.compile("adam", "mse")
    >>> full, mixed, pure = memory_report(model, 32).rows
    >>> full.parameters, full.slots, full.activations
    (66560, 133120, 32768)
    >>> mixed.parameters, mixed.activations, pure.parameters
    (99840, 16384, 33280)

    Sequences of 128 words, for a model that takes any length:

    >>> words = keras.layers.Embedding(1000, 16)
    >>> model = keras.Sequential([keras.Input((None,), dtype="int32"), words])
    >>> memory_report(model, 32, np.ones((1, 128), "int32")).rows[0].activations
    262144
    """
    check_replayable(model, "memory_report", with_loss=False)
    batch_size = whole_number("batch_size", batch_size, "memory_report")
    sample = _sample_of(model, batch_size) if x is None else _part_of(as_batch(x), batch_size)
    samples = keras.tree.flatten(sample)[0].shape[0]
    specs = [((batch_size, *each.shape[1:]), each.dtype) for each in keras.tree.flatten(sample)]
    activations: dict[str, _Activations] = {}
    compiled = {}
    half = any(v.dtype in HALF_DTYPES for v in model.variables)
    with Preserved(model) as preserved:
        for policy, layers in (("float32", None), (_HALF, _half_layers(model))):
            preserved.restore()
            with under(model, policy, layers):
                activations[policy] = _activations(model, sample, batch_size / samples)
                if policy == _HALF or not half:
                    loss = _loss_of(model, sample)
                    compiled[policy] = backend.compiled_bytes(model, specs, loss)
    by_row = (None, None, compiled[_HALF]) if half else (*compiled.values(), None)
    return MemoryReport(batch_size, _rows_of(model, activations, by_row))


def _rows_of(
    model: keras.Model, activations: dict[str, "_Activations"], compiled: tuple[int | None, ...]
) -> tuple[MemoryUse, ...]:
    """The three rows, from the bytes of activations by policy and XLA's counts by row."""
    copied = sum(bytes_of(v.shape, "bfloat16") for v in _rounded(model))
    memory = getattr(getattr(model, "optimizer", None), "half_memory", None)

    def use(name: str, policy: str, dtype_of: DtypeOf, copies: int, xla: int | None) -> MemoryUse:
        """A row, from the dtype of each variable and the bytes of half copies."""
        trained = model.trainable_variables
        gradients = sum(bytes_of(v.shape, dtype_of(v)) for v in trained)
        slots = _slot_bytes(model, dtype_of, memory)
        parameters = _variable_bytes(model, dtype_of) + copies
        found, blocks = activations[policy]
        return MemoryUse(name, parameters, gradients, slots, found, xla, blocks)

    return (
        use("float32", "float32", in_float32, 0, compiled[0]),
        use("mixed half", _HALF, in_float32, copied, compiled[1]),
        use("pure half", _HALF, in_half(model), 0, compiled[2]),
    )


DtypeOf = Callable[[Variable], str]  # the dtype that a variable would have


def in_float32(variable: Variable) -> str:
    """The dtype of a variable where all that may be in half precision are in float32."""
    return "float32" if variable.dtype in HALF_DTYPES else variable.dtype


def in_half(model: keras.Model) -> DtypeOf:
    """The dtypes of a model's variables in pure half precision: those it has, if it is in that."""
    rounded = {id(v) for v in _rounded(model)}
    if any(v.dtype in HALF_DTYPES for v in model.variables):
        return lambda v: v.dtype
    return lambda v: "bfloat16" if id(v) in rounded else v.dtype


def _half_layers(model: keras.Model) -> list[keras.Layer] | None:
    """The layers that compute in half precision; None if none does."""
    return [x for x in layers_of(model) if x.compute_dtype in HALF_DTYPES] or None


def _rounded(model: keras.Model) -> list[Variable]:
    """The variables that layers in half precision compute with in half precision."""
    found: dict[int, Variable] = {}
    for layer in _half_layers(model) or layers_of(model):
        half = [v for v in own_weights(layer) if v.dtype in HALF_DTYPES]
        found |= {id(v): v for v in [*cast_variables(layer), *half]}
    return list(found.values())


class _Activations(NamedTuple):
    """Bytes of activations, and those of blocks that are computed again."""

    bytes: int
    blocks: tuple[BlockUse, ...]


def _activations(model: keras.Model, sample: Tree, times: float) -> _Activations:
    """What a forward pass of a sample keeps, times a number.

    Each tensor counts once: a cell returns its state twice, an identity what it was given.
    """
    recorder, *_ = forward(model, (sample, None, None), training=True)
    leaves = [call for call in recorder.calls if not call.children]
    kept: dict[int, Tensor] = {}
    insides = []
    for block in recorder.kept:
        start, stop = block.span
        inside = [call for call in leaves if start < call.span[0] < stop]
        leaves = [call for call in leaves if not start < call.span[0] < stop]
        insides.append(_each_once(x for call in inside for x in floats(call.outputs)))
        kept |= _each_once([*block.inputs, *floats(block.outputs)])
    kept |= _each_once(x for call in leaves for x in floats(call.outputs))
    largest = [_bytes_in({k: x for k, x in inside.items() if k not in kept}) for inside in insides]
    blocks = [
        BlockUse(
            block.path,
            int(_bytes_in(_each_once(block.inputs)) * times),
            int(_bytes_in(inside) * times),
        )
        for block, inside in zip(recorder.kept, insides, strict=True)
    ]
    total = _bytes_in(kept) + max(largest, default=0)
    return _Activations(int(total * times), tuple(blocks))


def _each_once(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    return {id(x): x for x in tensors}


def _bytes_in(tensors: dict[int, Tensor]) -> int:
    return sum(bytes_of(x.shape, x.dtype) for x in tensors.values())


def _sample_of(model: keras.Model, batch_size: int) -> Tree:
    """Zeros in the shapes of the model's inputs: one sample, or as many as these are made for."""
    try:
        inputs: Any = model.inputs[0] if isinstance(model, Sequential) else model.input
        shapes = [tensor.shape for tensor in keras.tree.flatten(inputs)]
    except (AttributeError, TypeError, ValueError):
        shapes = None
    if shapes is None or any(None in shape[1:] for shape in shapes):
        known = "a subclassed one" if shapes is None else f"inputs of shapes {shapes}"
        raise ValueError(
            "`model` of memory_report must know the shapes of its inputs, or `x` must be a batch "
            f"for it. Received: {model.name!r}, {known}, and no x. Write "
            "memory_report(model, batch_size, x) with a batch of the length that you train on."
        )
    fixed = {shape[0] for shape in shapes} - {None}
    if fixed - {batch_size}:
        raise ValueError(
            "`batch_size` of memory_report must be that of the model's inputs. Received: "
            f"batch_size={batch_size} and inputs of {fixed.pop()} samples."
        )
    samples = batch_size if fixed else 1
    return keras.tree.map_structure(lambda x: ops.zeros((samples, *x.shape[1:]), x.dtype), inputs)


def _part_of(batch: Tree, batch_size: int) -> Tree:
    """The batch itself if it has `batch_size` samples, otherwise its first sample."""
    shapes = [tuple(tensor.shape) for tensor in keras.tree.flatten(batch)]
    if not shapes or any(not shape or shape[0] == 0 for shape in shapes):
        raise ValueError(
            "`x` of memory_report must be a batch: arrays whose first axis counts samples. "
            f"Received: arrays of shapes {shapes}. Write x[None] for a single sample."
        )
    if all(shape[0] == batch_size for shape in shapes):
        return batch
    return keras.tree.map_structure(lambda x: x[:1], batch)


def _loss_of(model: keras.Model, inputs: Tree) -> Callable[[list[Tensor]], Tensor]:
    """A loss to compile, of a flat list of inputs: each output has a gradient."""

    def loss(flat):
        outputs = call_model(model, keras.tree.pack_sequence_as(inputs, flat), training=True)
        return sum(ops.mean(ops.cast(x, "float32")) for x in keras.tree.flatten(outputs))

    return loss


def bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of an array."""
    name = keras.backend.standardize_dtype(dtype)
    size = 2 if name == "bfloat16" else np.dtype(name).itemsize
    return math.prod(shape) * size


def state_bytes(model: keras.Model, dtype_of: DtypeOf, memory: HalfMemory | None) -> int:
    """Bytes of the variables of a compiled model and its optimizer, if they had other dtypes.

    Args:
        model: built and compiled.
        dtype_of: the dtype of each variable.
        memory: how the optimizer holds weights and slots.
    """
    return _variable_bytes(model, dtype_of) + _slot_bytes(model, dtype_of, memory)


def _variable_bytes(model: keras.Model, dtype_of: DtypeOf) -> int:
    return sum(bytes_of(v.shape, dtype_of(v)) for v in model.variables)


def _slot_bytes(model: keras.Model, dtype_of: DtypeOf, memory: HalfMemory | None) -> int:
    """Bytes that the optimizer keeps; it is built for one weight at a time."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return 0
    inner = inner_optimizer_of(optimizer)

    def kept_for(variables):
        alike = type(inner).from_config(inner.get_config())
        if memory is None:
            alike.build(variables)
        else:
            build_inner(alike, variables, memory, _counter)
        return sum(bytes_of(v.shape, v.dtype) for v in alike.variables)

    for_none = kept_for([])
    weights = model.trainable_variables
    return sum(kept_for([_in_dtype(v, dtype_of(v))]) - for_none for v in weights)


def _in_dtype(variable: Variable, dtype: str) -> Variable:
    """Zeros like a variable, in `dtype`, with the same path: an optimizer may choose by it."""
    *parents, name = variable.path.split("/")
    with contextlib.ExitStack() as scopes:
        for parent in parents:
            scopes.enter_context(keras.name_scope(parent))
        return keras.Variable(np.zeros(variable.shape), dtype=dtype, name=name)


def _counter(name: str, dtype: str) -> Variable:
    return keras.Variable(0, dtype=dtype, trainable=False, name=name)
