"""What a function computes, as a list of operations, on TensorFlow."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kmp._backend.types import BY_INDEX, ByIndex, Operation, Tree, Value, shared_axes

_NAMES = {
    "add": "Add AddN AddV2",
    "bound": "ClipByValue Maximum Minimum",
    "cast": "AsString Cast",
    "decompose": "Cholesky Eig FFT FFT2D FFT3D FFTND IFFT IFFT2D IFFT3D IFFTND IRFFT IRFFT2D "
    "IRFFT3D LogMatrixDeterminant Lu MatrixDeterminant MatrixExponential MatrixInverse "
    "MatrixLogarithm MatrixSolve MatrixSolveLs MatrixSquareRoot MatrixTriangularSolve Qr RFFT "
    "RFFT2D RFFT3D ScaleAndTranslate SelfAdjointEigV2 Svd",
    "equal": "Equal NotEqual",
    "look up": "GatherNd GatherV2",
    "move": "BroadcastTo ConcatV2 ExpandDims Identity Pack Pad PadV2 Reshape ReverseV2 SelectV2 "
    "Slice Split SplitV Squeeze StridedSlice Tile Transpose Unpack",
    "order": "Bucketize Greater GreaterEqual Less LessEqual LowerBound UpperBound",
    "remainder": "FloorMod Mod TruncateMod",
    "sequence": "Const Placeholder Range",  # a placeholder stands for what the code holds
    "square": "Square",
    "subtract": "Sub",
    "sum": "Sum",
    "sum by index": "ScatterNd SegmentSum SegmentSumV2 TensorScatterAdd UnsortedSegmentSum",
    "wave": "Cos Sin",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_OF_A_SHAPE = ("OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike")


def operations(function: Callable[..., Any], inputs: Sequence[Tree]) -> list[Operation]:
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    labels: dict[tuple[int, str], Any] = {}

    def note(x, label):
        if not isinstance(x, tf.Tensor | tf.Variable):
            return x
        y = tf.identity(x)
        labels[id(y.graph), y.op.name] = label
        return y

    function(note, *inputs)
    found: list[Operation] = []
    _read(graph, {}, before, labels, found)
    return found


def _read(
    graph: Any, values: dict[str, Value], start: int, labels: dict, found: list[Operation]
) -> None:
    """Add the operations of a graph from one on, and of the functions in it."""

    def value(tensor):
        return values.setdefault(tensor.name, _value(tensor))

    for each in graph.get_operations()[start:]:
        if all(x.name in values for x in each.outputs) and each.type == "Placeholder":
            continue  # what the function was called with
        given, made = tuple(map(value, each.inputs)), tuple(map(value, each.outputs))
        if (id(graph), each.name) in labels:
            found.append(Operation("note", given, made, labels[id(graph), each.name]))
            continue
        inner = [x for x in _functions(graph, each) if len(x.outputs) == len(made)]
        for one in inner:  # it takes the last of what it is given: the first may be a condition
            pairs = zip(reversed(one.inputs), reversed(given), strict=False)
            inside = {tensor.name: outside for tensor, outside in pairs}
            _read(one, inside, 0, labels, found)
            pairs = zip(one.outputs, made, strict=True)
            found += [Operation("move", (inside[x.name],), (outside,)) for x, outside in pairs]
        if not inner:
            kind = _KINDS.get(each.type, "")
            if kind == "sequence" and all(x.is_one_number for x in made):
                kind = _set_number(each, made) if each.type == "Const" else ""
            elif _squares(each, given):
                kind = "square"
            given = () if each.type in _OF_A_SHAPE else given
            by_index = _by_index(each) if kind in BY_INDEX else None
            found.append(Operation(kind, given, made, by_index=by_index))


def _by_index(operation: Any) -> ByIndex:
    """How a sum by index, or the gradient of a look-up, is added up.

    Look-ups along the first axis have slices as their gradients. Casts hand them on; the operation
    before those, or the weight, is the first to need a tensor, and they are added up for it.
    """
    table, indices = operation.inputs[0], operation.inputs[1].shape
    before = table
    if operation.type == "GatherNd":
        makes_slices = indices.rank == 2 and indices[-1] == 1
    else:
        is_gather = operation.type == "GatherV2"
        makes_slices = is_gather and tf.get_static_value(operation.inputs[2]) == 0
    while makes_slices and before.op.type in ("Cast", "Identity"):
        before = before.op.inputs[0]
    dtype = before if makes_slices else operation.outputs[0]
    return ByIndex(_indices(operation), dtype.dtype.base_dtype.name, makes_slices)


def _indices(operation: Any) -> tuple[int | None, ...]:
    shape = _value(operation.inputs[0 if operation.type == "ScatterNd" else 1]).shape or ()
    if operation.type == "GatherV2":
        return shape[operation.get_attr("batch_dims") :]
    if "Segment" in operation.type:
        return shape
    *axes, parts = shape or (1,)
    return shared_axes(axes, parts)


def _set_number(constant: Any, made: tuple[Value, ...]) -> str:
    """Tell the number of a constant; return its kind, which is "number" for floats alone."""
    (output,) = constant.outputs
    if not (output.dtype.is_floating or output.dtype.is_integer):
        return ""
    made[0].number = float(np.reshape(tf.get_static_value(output), ()))
    return "number" if output.dtype.is_floating else ""


def _squares(operation: Any, given: tuple[Value, ...]) -> bool:
    if operation.type == "Pow":
        return bool(tf.get_static_value(operation.inputs[1]) == 2)
    return operation.type == "Mul" and given[0] is given[1]


def _functions(graph: Any, operation: Any) -> list[Any]:
    """The graphs of the functions that an operation calls: loops, conditions, compiled parts."""
    attributes = operation.node_def.attr.values() if _may_call(operation) else ()
    names = [x.func.name for each in attributes for x in (each, *each.list.func) if x.func.name]
    return [graph._get_function(name).graph for name in names]


def _may_call(operation: Any) -> bool:
    return operation.type.endswith(("While", "If", "Case", "PartitionedCall"))


def _value(tensor: Any) -> Value:
    shape = None if tensor.shape.rank is None else tuple(tensor.shape)
    return Value(tensor.dtype.base_dtype.name, shape)
