"""The TensorFlow side of `kmp._backend`."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.compiler.xla.xla_data_pb2 import DotDimensionNumbers
from tensorflow.python.ops import control_flow_util  # no public way to ask for the XLA context

from kmp._backend import default
from kmp._backend.tensorflow_distribute import keep_old_values
from kmp._backend.tensorflow_masked import masked_assignments
from kmp._backend.types import Device, DeviceMemory, Gradient, Tensor, Variable


def inside_xla() -> bool:
    """Tell at trace time whether XLA will compile what is being traced."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def matmul_float32(x: Tensor, kernel: Tensor) -> Tensor:
    """`x @ kernel` of two half matrices, accumulated and returned in float32.

    Only XLA has such a product: elsewhere the operands are cast up, which gives the same numbers.
    No gradient is registered for it; the caller brings its own.
    """
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


def all_reduce_sum(x: Tensor) -> Tensor:
    """The sum of `x` over the replicas of the surrounding `tf.distribute` strategy."""
    replica = tf.distribute.get_replica_context()
    return x if replica is None else replica.all_reduce(tf.distribute.ReduceOp.SUM, x)


def gradient_values(gradient: Gradient) -> Tensor:
    """The numbers of a gradient, dense or sparse."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def gradient_rows(gradient: Gradient) -> Tensor:
    """The numbers of a gradient, with the rows of a sparse one that meet in the same index summed.

    A batch that uses one embedding twice yields two slices for it; their sum is the gradient.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    order = tf.argsort(gradient.indices)
    indices = tf.gather(gradient.indices, order)
    new = tf.cast(indices[1:] != indices[:-1], "int32")
    new = tf.concat([tf.zeros_like(order[:1]), new], axis=0)  # empty if there is no slice
    values = tf.gather(gradient.values, order)
    return tf.math.unsorted_segment_sum(values, tf.cumsum(new), tf.shape(new)[0])


def gradient_sample(gradient: Gradient, strides: Sequence[int]) -> Tensor:
    """The numbers of a gradient at each so many places along each axis; zero where it has none."""
    if not isinstance(gradient, tf.IndexedSlices):
        return default.gradient_sample(gradient, strides)
    first, *others = strides
    sampled = gradient.indices % first == 0
    rows = tf.where(sampled, gradient.indices // first, -1)  # negative ones are left out
    values = gradient.values[(slice(None), *(slice(None, None, s) for s in others))]
    number = -(-gradient.dense_shape[0] // first)
    return tf.math.unsorted_segment_sum(values, rows, number)


def map_gradient_values(function: Callable[[Tensor], Tensor], gradient: Gradient) -> Gradient:
    """Apply an elementwise function to the numbers of a gradient; sparse stays sparse."""
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return function(gradient)


def multiply(gradients: Sequence[Gradient], factor: Tensor) -> Sequence[Gradient]:
    """Each gradient, of float32 or wider, times a scalar; sparse stays sparse."""
    return [map_gradient_values(lambda x: ops.multiply(x, factor), g) for g in gradients]


def verdict(
    number: Tensor, loss_nonfinite: Tensor, due: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The flags that everybody acts on: whether int32[] is 0, whether float32[] is, ...

    XLA would copy the reductions of all gradients into each of the selected updates; it does not
    copy one of two results on CPUs, nor look through a barrier on accelerators.
    """
    if inside_xla():
        (number,) = gen_xla_ops.xla_optimization_barrier([number])
    return number == 0, loss_nonfinite == 0, due


def after(finite: Tensor, sample: Tensor) -> Tensor:
    """`finite`, known only once `sample` is."""
    if not inside_xla():
        return finite
    return tf.logical_and(finite, tf.logical_not(tf.tensordot(sample, sample, 1) < 0))


def note_loss(variable: Variable, nonfinite: Tensor) -> None:
    """Remember until the next step that a loss was not finite.

    Not under a `tf.distribute` strategy, whose replicas have a loss each.
    """
    if not tf.distribute.has_strategy():
        variable.assign(tf.maximum(variable.value, tf.cast(nonfinite, "float32")))


def reduce_columns(columns: tuple[Tensor, ...], axes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The maximum of the second column and the sums of the others; inside XLA in one reduction.

    Each gradient is then read once, and the columns as such are never in memory: a reduction of
    one column XLA's CPU compiler splits into two, and writes the column for the first of them.
    """
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
    """`compute()` if `pred`, else `otherwise`; neither writes anything."""
    return tf.cond(pred, compute, lambda: otherwise)


def apply_if(finite: Tensor, update: Callable[[], None], variables: list[Variable]) -> None:
    """Run `update`, whose effects on `variables` hold only if `finite`.

    Outside XLA a branch (a select would read and write every variable on its own). Inside XLA a
    select in each assignment, since a conditional may stay one there and stalls the device; with
    replicas a select after the update, since a branch could not reach the others.
    """
    replicated = tf.distribute.has_strategy()
    if not (inside_xla() or replicated):

        def branch():
            update()
            return finite

        tf.cond(finite, branch, lambda: finite)
        return
    if not replicated:
        with masked_assignments(finite, variables):
            update()
        return
    before = [tf.identity(v.value) for v in variables]
    update()
    keep_old_values(finite, variables, before)


def around_train_step(
    model: Any,
    train_step: Callable[..., Any],
    before: Callable[[], Any],
    after: Callable[[Any, Any], Any],
) -> Callable[..., Any]:
    """Run two functions around Keras's train step; see `default.around_train_step`.

    Keras's trainer builds what is not built in the course of the first step. Here it is built
    before, so that there is a state to keep.
    """
    around = default.around_train_step(model, train_step, before, after)

    def step(data: Any) -> Any:
        of_keras = type(model).train_step is keras.Model.train_step
        metrics_built = getattr(model._compile_metrics, "built", True)
        if not (model.optimizer.built and (metrics_built or not of_keras)):
            model._symbolic_build(data_batch=data)
        return around(data)

    return step


def kept_values(variables: Sequence[Variable]) -> list[Tensor]:
    """The present values of variables, read before anything that comes later in the program."""
    return [tf.identity(v.value) for v in variables]


def keep_old_unless(applied: Tensor, variables: Sequence[Variable], old: Sequence[Tensor]) -> None:
    """Give each variable its old value back unless `applied`, a bool[].

    Outside XLA in a branch, which reads and writes nothing in a step that was applied. With
    replicas each one selects for its own variables (metrics), and all of them for those that they
    share.
    """
    if tf.distribute.has_strategy():
        own = [v.value.synchronization == tf.VariableSynchronization.ON_READ for v in variables]
        pairs = list(zip(variables, old, strict=True))
        mine = [pair for pair, is_own in zip(pairs, own, strict=True) if is_own]
        shared = [pair for pair, is_own in zip(pairs, own, strict=True) if not is_own]
        default.keep_old_unless(applied, [v for v, _ in mine], [x for _, x in mine])
        keep_old_values(applied, [v for v, _ in shared], [x for _, x in shared])
    elif inside_xla():
        default.keep_old_unless(applied, variables, old)
    else:

        def put_back() -> Tensor:
            for variable, value in zip(variables, old, strict=True):
                variable.assign(value)
            return applied

        tf.cond(applied, lambda: applied, put_back)


END_OF_DATA = (StopIteration, tf.errors.OutOfRangeError)


def compiled_for() -> str | None:
    """The accelerator that XLA compiles for, "gpu" or "tpu"; None on CPUs and outside of XLA.

    What "cpu" stands for, small gradients measured with the check, made the step of an MLP slower
    here: 1.14 to 1.17 times plain Adam's, where it had been 0.99.
    """
    return platform() if inside_xla() and platform() != "cpu" else None


def platform() -> str:
    """Where the training runs: "cpu", "gpu" or "tpu"."""
    if isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy):
        return "tpu"
    return "gpu" if tf.config.list_physical_devices("GPU") else "cpu"


def device() -> Device:
    """The first device of this process."""
    if platform() != "gpu":
        return Device(platform(), platform().upper(), None)
    gpu = tf.config.list_physical_devices("GPU")[0]
    details = tf.config.experimental.get_device_details(gpu)
    return Device("gpu", details.get("device_name", "GPU"), details.get("compute_capability"))


def device_memory() -> DeviceMemory | None:
    """What the first device's tensors take; begins a new peak. None on CPUs, which do not count."""
    if platform() != "gpu":
        return None
    memory = tf.config.experimental.get_memory_info("GPU:0")
    tf.config.experimental.reset_memory_stats("GPU:0")
    return DeviceMemory(memory["current"], memory["peak"])
