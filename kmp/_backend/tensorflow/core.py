"""The TensorFlow side of `kmp._backend`."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.compiler.xla.xla_data_pb2 import DotDimensionNumbers
from tensorflow.python.ops import control_flow_util  # no public way to ask for the XLA context
from tensorflow.python.ops.resource_variable_ops import default_variable_creator_v2  # nor past one

from kmp._backend import default
from kmp._backend.one_device import OneReplica
from kmp._backend.tensorflow import distribute
from kmp._backend.tensorflow.masked import masked_assignments
from kmp._backend.types import Device, DeviceMemory, Gradient, Tensor, Variable


def is_concrete(x: Any) -> bool:
    return not tf.is_symbolic_tensor(x)


def inside_xla() -> bool:
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def matmul_float32(x: Tensor, kernel: Tensor) -> Tensor:
    # Only XLA has such a product. Elsewhere the operands are cast up, which gives the same numbers.
    # No gradient is registered for it; the caller brings its own.
    if not inside_xla():
        return ops.matmul(ops.cast(x, "float32"), ops.cast(kernel, "float32"))
    rows_by_columns = DotDimensionNumbers(
        lhs_contracting_dimensions=[1], rhs_contracting_dimensions=[0]
    )
    product = gen_xla_ops.xla_dot_v2(
        lhs=x,
        rhs=kernel,
        dimension_numbers=rows_by_columns.SerializeToString(),
        precision_config="",
        preferred_element_type=tf.float32,
    )
    product.set_shape((x.shape[0], kernel.shape[1]))
    return product


def bitcast(x: Tensor, dtype: str) -> Tensor:
    return tf.bitcast(x, dtype)


def all_reduce_sum(x: Tensor) -> Tensor:
    replica = tf.distribute.get_replica_context()
    return x if replica is None else replica.all_reduce(tf.distribute.ReduceOp.SUM, x)


def gradient_values(gradient: Gradient) -> Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def dense(gradient: Gradient) -> Tensor:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = gradient.dense_shape[0]
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)


def gradient_rows(gradient: Gradient) -> Tensor:
    # A batch that uses one embedding twice yields two slices for it; their sum is the gradient.
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    order = tf.argsort(gradient.indices)
    indices = tf.gather(gradient.indices, order)
    new = tf.cast(indices[1:] != indices[:-1], "int32")
    new = tf.concat([tf.zeros_like(order[:1]), new], axis=0)  # empty if there is no slice
    values = tf.gather(gradient.values, order)
    return tf.math.unsorted_segment_sum(values, tf.cumsum(new), tf.shape(new)[0])


def gradient_sample(gradient: Gradient, strides: Sequence[int], target: str) -> Tensor:
    if not isinstance(gradient, tf.IndexedSlices):
        return default.gradient_sample(gradient, strides, target)
    first, *others = strides
    sampled = gradient.indices % first == 0
    rows = tf.where(sampled, gradient.indices // first, -1)  # negative ones are left out
    values = gradient.values[(slice(None), *(slice(None, None, s) for s in others))]
    number = -(-gradient.dense_shape[0] // first)
    return tf.math.unsorted_segment_sum(values, rows, number)


def map_gradient_values(function: Callable[[Tensor], Tensor], gradient: Gradient) -> Gradient:
    return _with_values(gradient, function(gradient_values(gradient)))


def _with_values(gradient: Gradient, values: Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def multiply(leaves: Sequence[Any], factor: Tensor) -> Sequence[Any]:
    products = default.multiply([gradient_values(x) for x in leaves], factor)
    return [_with_values(x, product) for x, product in zip(leaves, products, strict=True)]


def are_dense(gradients: Sequence[Gradient]) -> list[bool]:
    return [not isinstance(x, tf.IndexedSlices) for x in gradients]


def flags(
    number: Tensor, loss_nonfinite: Tensor, *others: Tensor
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    # XLA would copy the reductions of all gradients into each of the selected updates. It does not
    # copy one of two results on CPUs, nor look through a barrier on accelerators.
    if inside_xla():
        (number,) = gen_xla_ops.xla_optimization_barrier([number])
    return number == 0, loss_nonfinite == 0, others


def after(finite: Tensor, sample: Tensor) -> Tensor:
    if not inside_xla():
        return finite
    return tf.logical_and(finite, tf.logical_not(tf.tensordot(sample, sample, 1) < 0))


def note_loss(variable: Variable, is_finite: Callable[[], Tensor]) -> None:
    nonfinite = tf.cast(tf.logical_not(is_finite()), "float32")
    if tf.distribute.has_strategy():
        return distribute.note_loss_of_replica(variable, nonfinite)
    variable.assign(tf.maximum(variable.value, nonfinite))


def reduce_columns(columns: tuple[Tensor, ...], axes: tuple[int, ...]) -> tuple[Tensor, ...]:
    # XLA's CPU compiler splits a reduction of one column in two, and writes the column in between.
    if not inside_xla():
        return default.reduce_columns(columns, axes)

    @tf.function
    def combine(*both):
        pairs = enumerate(zip(both[: len(columns)], both[len(columns) :], strict=True))
        return tuple(tf.maximum(x, y) if i == 1 else x + y for i, (x, y) in pairs)

    scalars = [tf.TensorSpec((), x.dtype) for x in columns]
    return tuple(
        gen_xla_ops.xla_variadic_reduce_v2(
            inputs=columns,
            init_values=[tf.zeros((), x.dtype) for x in columns],
            dimensions_to_reduce=axes,
            reducer=combine.get_concrete_function(*scalars, *scalars),
        )
    )


def compute_if(pred: Tensor, compute: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
    return tf.cond(pred, compute, lambda: otherwise)


def update_if(
    keep: Tensor, inner: Any, gradients: list[Gradient], variables: list[Variable]
) -> None:
    """Let `inner` update the variables if `keep`.

    Outside XLA that is a branch (a select would read and write every variable on its own). Inside
    XLA it is a select in each assignment, since a conditional stalls the device.
    """
    if inside_xla():
        with masked_assignments(keep, variables + inner.variables):
            inner.apply(gradients, variables)
        return

    def branch():
        inner.apply(gradients, variables)
        return keep

    tf.cond(keep, branch, lambda: keep)


@tf.autograph.experimental.do_not_convert  # rewriting kmp's code would take seconds
def run_step(
    step: Callable[..., None],
    gradients: list[Gradient],
    variables: list[Variable],
    inner: Any,
    loss_nonfinite: Variable,
) -> None:
    gradients = [_of_known_shape(x, v) for x, v in zip(gradients, variables, strict=True)]
    if tf.distribute.has_strategy():
        distribute.step_on_replicas(step, gradients, variables, loss_nonfinite)
    else:
        step(OneReplica(update_if), gradients, variables)


def _of_known_shape(gradient: Gradient, variable: Variable) -> Gradient:
    if not isinstance(gradient, tf.Tensor) or gradient.shape.is_fully_defined():
        return gradient
    return tf.ensure_shape(gradient, variable.shape)


def around_train_step(
    model: Any,
    train_step: Callable[..., Any],
    before: Callable[[], Any],
    after: Callable[[Any, Any], Any],
) -> Callable[..., Any]:
    # Keras's trainer builds what is not built in the course of the first step. Here it is built
    # before, so that there is a state to keep, and outside of the function that is being traced,
    # which would be traced a second time if it saw a variable being created.
    around = default.around_train_step(model, train_step, before, after)

    def step(data: Any) -> Any:
        of_keras = type(model).train_step is keras.Model.train_step
        metrics_built = getattr(model._compile_metrics, "built", True)
        if not (model.optimizer.built and (metrics_built or not of_keras)):
            with _outside_trace():
                model._symbolic_build(data_batch=data)
        return around(data)

    return step


@contextlib.contextmanager
def _outside_trace() -> Iterator[None]:
    if tf.distribute.has_strategy():  # whose own creators make a variable for each replica
        yield
        return
    with tf.init_scope(), tf.variable_creator_scope(_created_unnoticed):
        yield


def _created_unnoticed(next_creator: Any, **arguments: Any) -> tf.Variable:
    return default_variable_creator_v2(**arguments)  # `next_creator` is that of the function


def kept_values(variables: Sequence[Variable]) -> list[Tensor]:
    # Read before anything that comes later in the program.
    return [tf.identity(v.value) for v in variables]


def read(model: Any, variables: list[Variable], each: bool = False) -> list[Tensor]:
    if each:
        return [tf.stack(getattr(v.value, "values", [v.value])) for v in variables]
    return [tf.convert_to_tensor(v.value) for v in variables]


def keep_old_unless(applied: Tensor, variables: Sequence[Variable], old: Sequence[Tensor]) -> None:
    # Outside XLA in a branch, which reads and writes nothing in a step that was applied. With
    # replicas each one selects for its own variables (metrics), and all of them for those that they
    # share.
    if tf.distribute.has_strategy():
        own = [v.value.synchronization == tf.VariableSynchronization.ON_READ for v in variables]
        pairs = list(zip(variables, old, strict=True))
        mine = [pair for pair, is_own in zip(pairs, own, strict=True) if is_own]
        shared = [pair for pair, is_own in zip(pairs, own, strict=True) if not is_own]
        default.keep_old_unless(applied, [v for v, _ in mine], [x for _, x in mine])
        distribute.keep_old_values(applied, [v for v, _ in shared], [x for _, x in shared])
    elif inside_xla():
        default.keep_old_unless(applied, variables, old)
    else:

        def put_back() -> Tensor:
            for variable, value in zip(variables, old, strict=True):
                variable.assign(value)
            return applied

        tf.cond(applied, lambda: applied, put_back)


END_OF_DATA = (StopIteration, tf.errors.OutOfRangeError)


def per_target(
    function: Callable[..., Sequence[Tensor]], shapes: Sequence[tuple[int, ...]], *tensors: Any
) -> Sequence[Tensor]:
    # XLA on a CPU counts as "host": to measure small gradients with the check, as "cpu" stands for,
    # made the step of an MLP 1.14 to 1.17 times plain Adam's here, where it had been 0.99.
    compiles = inside_xla() and platform() != "cpu"
    return function(platform() if compiles else "host", *tensors)


def platform() -> str:
    if isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy):
        return "tpu"
    return "gpu" if tf.config.list_physical_devices("GPU") else "cpu"


def device() -> Device:
    if platform() != "gpu":
        return Device(platform(), platform().upper(), None)
    gpu = tf.config.list_physical_devices("GPU")[0]
    details = tf.config.experimental.get_device_details(gpu)
    return Device("gpu", details.get("device_name", "GPU"), details.get("compute_capability"))


def device_memory() -> DeviceMemory | None:
    if platform() != "gpu":
        return None
    memory = tf.config.experimental.get_memory_info("GPU:0")
    tf.config.experimental.reset_memory_stats("GPU:0")
    return DeviceMemory(memory["current"], memory["peak"])
