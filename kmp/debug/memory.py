"""What training would hold in memory under float32, mixed and pure half precision."""

import dataclasses
import math

import keras
import numpy as np
from keras import ops

from kmp import _backend
from kmp._backend.types import Tree
from kmp._common import table, whole_number
from kmp.debug.policies import under
from kmp.debug.preserved import Preserved
from kmp.debug.replay import call_model, check_replayable, forward
from kmp.debug.stats import floats

_HALF = "mixed_bfloat16"  # as many bytes as float16, and computed on every device


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes of one training step under one precision.

    Attributes:
        precision: "float32", "mixed half" or "pure half".
        parameters: all variables of the model, and in mixed precision the half copies of the
            float32 ones that the layers compute with.
        gradients: one for each trainable variable, in its dtype.
        slots: what the optimizer keeps for each trainable variable, in its dtype.
        activations: the outputs of all layers, in their dtypes, as if all were kept for the
            backward pass and nothing else.
        compiled: what XLA itself needs beside arguments and results for the forward and backward
            pass of a compiled step; None where it does not say.

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

    @property
    def total(self) -> int:
        """The hand count."""
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
        return table(rows)


def memory_report(model: keras.Model, batch_size: int) -> MemoryReport:
    """Count the bytes of a training step in float32, in mixed and in pure half precision.

    The hand count says what there is to hold: parameters, gradients, optimizer slots, and the
    output of each layer. A compiler holds less where it fuses or computes again, and more where it
    needs room to work: on JAX the step is compiled (not run) under each policy, and the last column
    is XLA's own answer. Elsewhere, and in pure half, the hand count is all there is. Layers that
    stay in float32 by their own make are counted as they are.

    Args:
        model: a built functional or sequential model. Slots are counted if it is compiled.
        batch_size: samples in a batch.

    Returns:
        A `MemoryReport`; print it.

    Raises:
        ValueError: the model is not built, or a subclassed one whose inputs are not known;
            `batch_size` is not a whole number of at least 1, or not that of inputs that have one.

    Example:

    >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    >>> model.compile("adam", "mse")
    >>> full, mixed, pure = memory_report(model, 32).rows
    >>> full.parameters, full.slots, full.activations
    (66560, 133120, 32768)
    >>> mixed.parameters, mixed.activations, pure.parameters
    (99840, 16384, 33280)
    """
    check_replayable(model, "memory_report", with_loss=False)
    batch_size = whole_number("batch_size", batch_size, "memory_report")
    inputs = _inputs_of(model, batch_size)
    samples = batch_size if _has_fixed_batch(inputs) else 1
    sample = keras.tree.map_structure(lambda x: ops.zeros((samples, *x.shape[1:]), x.dtype), inputs)
    specs = [((batch_size, *x.shape[1:]), x.dtype) for x in keras.tree.flatten(inputs)]
    activations, compiled = {}, {}
    with Preserved(model) as preserved:
        for policy in ("float32", _HALF):
            preserved.restore()
            with under(model, policy):
                recorder, *_ = forward(model, (sample, None, None), training=True)
                leaves = [call for call in recorder.calls if not call.children]
                # Each once: a cell returns its state twice, an identity what it was given.
                outputs = {id(x): x for call in leaves for x in floats(call.outputs)}
                each = sum(_bytes(x.shape, x.dtype) for x in outputs.values()) // samples
                activations[policy] = batch_size * each
                compiled[policy] = _backend.compiled_bytes(model, specs, _loss_of(model, inputs))
    floating = [v for v in model.variables if keras.backend.is_float_dtype(v.dtype)]
    numbers = sum(math.prod(v.shape) for v in floating)
    others = sum(_bytes(v.shape, v.dtype) for v in model.variables) - sum(
        _bytes(v.shape, v.dtype) for v in floating
    )
    trained = sum(math.prod(v.shape) for v in model.trainable_variables)
    slots = _slots_of(model)
    full, half = activations["float32"], activations[_HALF]
    return MemoryReport(
        batch_size,
        (
            MemoryUse(
                "float32",
                4 * numbers + others,
                4 * trained,
                4 * slots,
                full,
                compiled["float32"],
            ),
            MemoryUse(
                "mixed half",
                6 * numbers + others,
                4 * trained,
                4 * slots,
                half,
                compiled[_HALF],
            ),
            MemoryUse("pure half", 2 * numbers + others, 2 * trained, 2 * slots, half, None),
        ),
    )


def _inputs_of(model: keras.Model, batch_size: int) -> Tree:
    """The symbolic inputs, in the structure in which the model is called."""
    try:
        inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            "`model` of memory_report must know its inputs. Received: the subclassed model "
            f"{model.name!r}. Write keras.Model(inputs, model(inputs)) with inputs = "
            "keras.Input(...) around it."
        ) from None
    if any(None in x.shape[1:] for x in keras.tree.flatten(inputs)):
        raise ValueError(
            "`model` of memory_report must have inputs of known shape but for the batch. Received: "
            f"{[x.shape for x in keras.tree.flatten(inputs)]}."
        )
    fixed = {x.shape[0] for x in keras.tree.flatten(inputs)} - {None, batch_size}
    if fixed:
        raise ValueError(
            "`batch_size` of memory_report must be that of the model's inputs. Received: "
            f"batch_size={batch_size} and inputs of {fixed.pop()} samples."
        )
    return inputs


def _has_fixed_batch(inputs: Tree) -> bool:
    return any(x.shape[0] is not None for x in keras.tree.flatten(inputs))


def _loss_of(model: keras.Model, inputs: Tree):
    """A loss to compile: what makes every output need a gradient."""

    def loss(flat):
        outputs = call_model(model, keras.tree.pack_sequence_as(inputs, flat), training=True)
        return sum(ops.mean(ops.cast(x, "float32")) for x in keras.tree.flatten(outputs))

    return loss


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    name = keras.backend.standardize_dtype(dtype)
    size = 2 if name == "bfloat16" else np.dtype(name).itemsize
    return math.prod(shape) * size


def _slots_of(model: keras.Model) -> int:
    """How many numbers the optimizer keeps for the trainable variables, held for one at a time."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return 0
    inner = getattr(optimizer, "inner_optimizer", optimizer)

    def kept_for(variables):
        alike = type(inner).from_config(inner.get_config())
        alike.build(variables)
        return sum(math.prod(v.shape) for v in alike.variables)

    for_none = kept_for([])
    return sum(kept_for([v]) - for_none for v in model.trainable_variables)
