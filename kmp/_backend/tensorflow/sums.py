"""Sums of numbers in half precision, rounded once, at their end.

On CPUs TensorFlow rounds some of them after each number: in bfloat16 a sum of ones stays at 256, in
float16 at 2048. The gradient of a bias is such a sum, where XLA does not compile it; a sum by index
is one with XLA, too.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph  # no public way to see what it gets

_HALF = {tf.bfloat16, tf.float16}
# By kind, which inputs of a sum are added up. The others are integers.
_SUMMANDS = {
    "AvgPool": (0,),
    "AvgPool3D": (0,),
    "BiasAddGrad": (0,),
    "Cumsum": (0,),
    "DepthwiseConv2dNativeBackpropFilter": (0, 2),
    "Einsum": (0,),  # of one tensor; of two it is a product
    "Mean": (0,),
    "ResizeNearestNeighborGrad": (0,),
    "ScatterNd": (1,),
    "SegmentMean": (0,),
    "SegmentSum": (0,),
    "SparseTensorDenseMatMul": (1, 3),
    "Sum": (0,),
    "TensorScatterAdd": (0, 2),
    "UnsortedSegmentSum": (0,),
}
# TensorFlow adds these up in float32 itself, with oneDNN and without.
_EXACT = {
    ("BiasAddGrad", tf.float16),
    ("Mean", tf.bfloat16),
    ("Sum", tf.bfloat16),
}


def sum_in_float32(graph: FuncGraph) -> None:
    """Let what is traced into a graph from now on add up in float32 what is in half precision.

    Private: `_create_op_internal`.
    """
    create = graph._create_op_internal
    if isinstance(create, _Create):
        return  # another replica has seen to it
    graph._create_op_internal = _Create(create)


class _Create:
    """Creates the operations of a graph, and sums of half precision in float32."""

    def __init__(self, create: Any):
        self._create = create

    def __call__(
        self, kind, inputs, dtypes=None, input_types=None, name=None, attrs=None, *args, **kwargs
    ):
        operation = self._create(kind, inputs, dtypes, input_types, name, attrs, *args, **kwargs)
        summands = _SUMMANDS.get(kind, ()) if kind != "Einsum" or len(inputs) == 1 else ()
        half = inputs[summands[0]].dtype if summands else None
        if half not in _HALF or (kind, half) in _EXACT:
            return operation
        inputs = [tf.cast(x, "float32") if i in summands else x for i, x in enumerate(inputs)]
        attrs = {**attrs, "T": tf.compat.v1.AttrValue(type=tf.float32.as_datatype_enum)}
        total = self._create(kind, inputs, [tf.float32], None, None, attrs, *args, **kwargs)
        return _Replaced(operation, [tf.cast(total.outputs[0], half)])


class _Replaced:
    """An operation, which is asked for its attributes and is never run, with others' outputs."""

    def __init__(self, operation: tf.Operation, outputs: Sequence[Any]):
        self._operation, self.outputs = operation, outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)
