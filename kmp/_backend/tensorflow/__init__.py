"""The TensorFlow side of `kmp._backend`."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import Model, ops
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.compiler.xla.xla_data_pb2 import DotDimensionNumbers
from tensorflow.python.eager import (
    context,  # no public way to the state of the random seeds
    record,  # nor to stop tapes that others have opened
)
from tensorflow.python.ops import control_flow_util  # no public way to ask for the XLA context
from tensorflow.python.ops.resource_variable_ops import default_variable_creator_v2  # nor past one

from kmp._backend.base import Backend
from kmp._backend.tensorflow import distribute
from kmp._backend.tensorflow.programs import operations
from kmp._backend.tensorflow.sums import sum_in_float32
from kmp._backend.tensorflow.updates import update_by_mask
from kmp._backend.tensorflow.views import BaseView
from kmp._backend.types import (
    Device,
    DeviceMemory,
    Gradient,
    Operation,
    Tensor,
    Tree,
    TwoLists,
    Variable,
)

_CUDNN_MIN_EPSILON = 1.001e-5  # cuDNN refuses 1e-5 and less
# Elements of a channel. Up to so many, a sum of half-precision numbers of one magnitude is exact in
# float32, in any order.
_FUSED_ELEMENTS = {"float16": 2**13, "bfloat16": 2**16}
_BLOCK, _LEVELS = 256, 2  # of `sum_along`: no sum has more than 256 terms up to 2**24 elements


class TensorFlowBackend(Backend):
    """What differs on TensorFlow."""

    BaseView = BaseView
    END_OF_DATA = (StopIteration, tf.errors.OutOfRangeError)

    def platform(self) -> str:
        if isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy):
            return "tpu"
        return "gpu" if tf.config.list_physical_devices("GPU") else "cpu"

    def device(self) -> Device:
        if self.platform() != "gpu":
            return Device(self.platform(), self.platform().upper(), None)
        gpu = tf.config.list_physical_devices("GPU")[0]
        details = tf.config.experimental.get_device_details(gpu)
        return Device("gpu", details.get("device_name", "GPU"), details.get("compute_capability"))

    def device_memory(self) -> DeviceMemory | None:
        if self.platform() != "gpu":
            return None
        memory = tf.config.experimental.get_memory_info("GPU:0")
        tf.config.experimental.reset_memory_stats("GPU:0")
        return DeviceMemory(memory["current"], memory["peak"])

    def inside_xla(self) -> bool:
        return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())

    def per_target(
        self,
        function: Callable[..., Sequence[Tensor]],
        shapes: Sequence[tuple[int, ...]],
        *tensors: Any,
    ) -> Sequence[Tensor]:
        return function(self.platform() if self.inside_xla() else "host", *tensors)

    def writes_logs(self, model: Any) -> bool:
        # The chief writes for all workers of the model's strategy.
        strategy = getattr(model, "distribute_strategy", None)
        return strategy is None or strategy.extended.should_save_summary

    def gradient_values(self, gradient: Gradient) -> Tensor:
        return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient

    def gradient_rows(self, gradient: Gradient) -> Tensor:
        # A batch that uses one embedding twice yields two slices for it; their sum is the gradient.
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        order = tf.argsort(gradient.indices)
        indices = tf.gather(gradient.indices, order)
        new = tf.cast(indices[1:] != indices[:-1], "int32")
        new = tf.concat([tf.zeros_like(order[:1]), new], axis=0)  # empty if there is no slice
        values = tf.gather(gradient.values, order)
        return tf.math.unsorted_segment_sum(values, tf.cumsum(new), tf.shape(new)[0])

    def dense(self, gradient: Gradient) -> Tensor:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        rows = gradient.dense_shape[0]
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)

    def gradient_sample(self, gradient: Gradient, strides: Sequence[int], target: str) -> Tensor:
        if not isinstance(gradient, tf.IndexedSlices):
            return super().gradient_sample(gradient, strides, target)
        first, *others = strides
        sampled = gradient.indices % first == 0
        rows = tf.where(sampled, gradient.indices // first, -1)  # negative ones are left out
        values = gradient.values[(slice(None), *(slice(None, None, s) for s in others))]
        number = -(-gradient.dense_shape[0] // first)
        return tf.math.unsorted_segment_sum(values, rows, number)

    def map_gradient_values(
        self, function: Callable[[Tensor], Tensor], gradient: Gradient
    ) -> Gradient:
        return _with_values(gradient, function(self.gradient_values(gradient)))

    def multiply(self, leaves: Sequence[Any], factor: Tensor) -> Sequence[Any]:
        products = super().multiply([self.gradient_values(x) for x in leaves], factor)
        return [_with_values(x, product) for x, product in zip(leaves, products, strict=True)]

    def are_dense(self, gradients: Sequence[Gradient]) -> list[bool]:
        return [not isinstance(x, tf.IndexedSlices) for x in gradients]

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        # In one pass that writes nothing. It sums in the tensor's own dtype.
        wide = [x if x.dtype in ("float32", "float64") else tf.cast(x, "float32") for x in tensors]
        halves = [tf.cast(tf.nn.l2_loss(x), "float32") for x in wide]
        return tf.sqrt(2 * tf.stack(halves))

    def reduce_columns(
        self, columns: tuple[Tensor, ...], axes: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        # XLA's CPU compiler splits a reduction of one column in two, and writes the column in
        # between. Nor does it vectorize a maximum of floats, which takes ten times as long as one
        # of their bits; those of positive floats have the same order.
        if not self.inside_xla():
            return super().reduce_columns(columns, axes)
        bits = [_bits(x) if i == 1 else x for i, x in enumerate(columns)]

        @tf.function
        def combine(*both):
            pairs = enumerate(zip(both[: len(columns)], both[len(columns) :], strict=True))
            return tuple(tf.maximum(x, y) if i == 1 else x + y for i, (x, y) in pairs)

        scalars = [tf.TensorSpec((), x.dtype) for x in bits]
        found = gen_xla_ops.xla_variadic_reduce_v2(
            inputs=bits,
            init_values=[tf.zeros((), x.dtype) for x in bits],
            dimensions_to_reduce=axes,
            reducer=combine.get_concrete_function(*scalars, *scalars),
        )
        pairs = zip(found, columns, strict=True)
        return tuple(x if x.dtype == c.dtype else tf.bitcast(x, c.dtype) for x, c in pairs)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        replica = tf.distribute.get_replica_context()
        return x if replica is None else replica.all_reduce(tf.distribute.ReduceOp.SUM, x)

    def read_numbers(
        self, measured: Sequence[Tensor], others: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        # XLA would copy the reductions of all gradients into each of the selected updates. It does
        # not copy one of two results on CPUs, nor look through a barrier on accelerators.
        if self.inside_xla():
            measured = gen_xla_ops.xla_optimization_barrier(list(measured))
        return measured, others

    def together(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if tensors and self.inside_xla():
            return gen_xla_ops.xla_optimization_barrier(list(tensors))
        return tensors

    def order_after(self, finite: Tensor, sample: Tensor) -> Tensor:
        if not self.inside_xla():
            return finite
        return tf.logical_and(finite, tf.logical_not(tf.tensordot(sample, sample, 1) < 0))

    @tf.autograph.experimental.do_not_convert  # rewriting kmp's code would take seconds
    def run_step(
        self,
        step: Callable[..., None],
        gradients: list[Gradient],
        variables: list[Variable],
        inner: Any,
        loss_nonfinite: Variable,
    ) -> None:
        gradients = [_of_known_shape(x, v) for x, v in zip(gradients, variables, strict=True)]
        if tf.distribute.has_strategy():
            distribute.step_on_replicas(self, step, gradients, variables, loss_nonfinite)
        else:
            step(self.one_replica, gradients, variables)

    def update_if(
        self, applies: Tensor, inner: Any, gradients: list[Gradient], variables: list[Variable]
    ) -> None:
        if tf.distribute.has_strategy():  # no branch could reach the other replicas
            guarded = [*variables, *inner.variables]
            old = self.copied_values(guarded)
            with distribute.reduced_already(inner):
                inner.apply(gradients, variables)
            self.restore_unless(applies, guarded, old)
        elif self.inside_xla():
            update_by_mask(applies, inner, gradients, variables)
        else:
            super().update_if(applies, inner, gradients, variables)

    def branch(self, pred: Tensor, then: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
        return tf.cond(pred, then, lambda: otherwise)

    def record_loss_finite(self, variable: Variable, is_finite: Callable[[], Tensor]) -> None:
        nonfinite = tf.cast(tf.logical_not(is_finite()), "float32")
        if tf.distribute.has_strategy():
            distribute.record_loss_of_replica(variable, nonfinite)
        else:
            variable.assign(tf.maximum(variable.value, nonfinite))

    def around_train_step(
        self,
        model: Any,
        train_step: Callable[..., Any],
        before: Callable[[], Any],
        after: Callable[[Any, Any], Any],
    ) -> Callable[..., Any]:
        # Keras's trainer builds what is not built in the course of the first step. Here it is built
        # before, so that there is a state to keep, and outside of the function that is being
        # traced, which would be traced a second time if it saw a variable being created.
        around = super().around_train_step(model, train_step, before, after)

        def step(data: Any) -> Any:
            of_keras = type(model).train_step is Model.train_step
            metrics_built = getattr(model._compile_metrics, "built", True)
            if not (model.optimizer.built and (metrics_built or not of_keras)):
                with _outside_trace():
                    model._symbolic_build(data_batch=data)
            return around(data)

        return step

    def sums_in_float32(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(data: Any) -> Any:
            if not tf.executing_eagerly():
                sum_in_float32(tf.compat.v1.get_default_graph())
            return train_step(data)

        return step

    def copied_values(self, variables: Sequence[Variable]) -> list[Tensor]:
        # Read before anything that comes later in the program.
        return [tf.identity(v.value) for v in variables]

    @contextlib.contextmanager
    def noting_assignments(
        self, variables: Sequence[Variable]
    ) -> Iterator[list[tuple[Variable, Tensor]]]:
        # Replicas trace in turns, with the same variables.
        alone = not tf.distribute.has_strategy()
        with super().noting_assignments(variables if alone else []) as noted:
            yield noted

    def restore_unless(
        self, applied: Tensor, variables: Sequence[Variable], old: Sequence[Tensor]
    ) -> None:
        # Outside XLA in a branch, which reads and writes nothing in a step that was applied. With
        # replicas each one selects for its own variables (metrics), and all of them for those that
        # they share.
        if tf.distribute.has_strategy():
            own = [v.value.synchronization == tf.VariableSynchronization.ON_READ for v in variables]
            pairs = list(zip(variables, old, strict=True))
            mine = [pair for pair, is_own in zip(pairs, own, strict=True) if is_own]
            shared = [pair for pair, is_own in zip(pairs, own, strict=True) if not is_own]
            super().restore_unless(applied, [v for v, _ in mine], [x for _, x in mine])
            distribute.restore_unless(applied, [v for v, _ in shared], [x for _, x in shared])
        elif self.inside_xla():
            super().restore_unless(applied, variables, old)
        else:

            def put_back() -> Tensor:
                for variable, value in zip(variables, old, strict=True):
                    variable.assign(value)
                return applied

            tf.cond(applied, lambda: applied, put_back)

    def matmul_float32(self, x: Tensor, kernel: Tensor) -> Tensor:
        # Only XLA has such a product. Elsewhere the operands are cast up, which gives the same
        # numbers. No gradient is registered for it; the caller brings its own.
        if not self.inside_xla():
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

    def custom_gradient(
        self,
        forward: Callable[..., Sequence[Tensor]],
        backward: Callable[..., Sequence[Tensor | None]],
        inputs: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        # An eager tape keeps what `forward` computes on the way too, for second derivatives.

        @tf.custom_gradient
        def function(*inputs):
            outputs = tuple(forward(*inputs))
            return outputs, lambda *gradients: backward(inputs, outputs[1:], gradients)

        return function(*inputs)

    def recompute(
        self,
        function: Callable[..., TwoLists],
        inputs: Sequence[Tensor],
        weights: Callable[[], Sequence[Tensor]],
        policy: Any = None,
    ) -> TwoLists:
        # As `tf.recompute_grad`, which takes no booleans, and hands on zeros for no gradient.
        #
        # The second run gets the values that the first one read, because it may come after a weight
        # has been assigned. Grappler believes that all outputs of an `IdentityN` depend on all of
        # its inputs. So it removes what orders a read and the assignment, as if the `IdentityN` did
        # that, and then removes the `IdentityN`. Keras's optimizers pass all gradients through one,
        # and `custom_gradient` its outputs; so `others` are not among these outputs.
        flat = tf.nest.flatten(list(inputs), expand_composites=True)
        number = len(flat)
        others: list[Tensor] = []

        def call(*tensors: Tensor) -> TwoLists:
            given = tf.nest.pack_sequence_as(list(inputs), tensors[:number], expand_composites=True)
            return function(*given, *tensors[number:])

        @tf.custom_gradient
        def run(*tensors: Tensor) -> Any:
            with record.stop_recording():
                outputs, without_gradient = call(*tensors)
            others.extend(without_gradient)

            def backward(*gradients: Tensor, variables: Sequence[Any] | None = None) -> Any:
                found = self._gradients_of(call, tensors, number, gradients, variables or ())
                end = len(tensors)
                return (found[:end], found[end:]) if variables else found

            return outputs, backward

        return run(*flat, *(tf.convert_to_tensor(x) for x in weights())), others

    def _gradients_of(
        self,
        function: Callable[..., TwoLists],
        inputs: Sequence[Tensor],
        number: int,
        to_outputs: Sequence[Tensor],
        variables: Sequence[Any],
    ) -> list[Gradient]:
        """Compute a function again, and its gradients by the inputs and the variables.

        Only the first `number` inputs have to wait for the backward pass.
        """
        first: Any = contextlib.nullcontext()
        inputs, values = list(inputs[:number]), inputs[number:]
        # The compiler would otherwise find that all this has been computed before, and keep it.
        if self.inside_xla():
            barrier = gen_xla_ops.xla_optimization_barrier([*inputs, *to_outputs])
            inputs, to_outputs = barrier[:number], barrier[number:]
        elif not tf.executing_eagerly():
            first = tf.control_dependencies(to_outputs)
        with first, tf.GradientTape() as tape:
            again = [tf.identity(x) for x in [*inputs, *values]]  # one for each place
            tape.watch([x for x in again if x.dtype.is_floating])
            outputs, _ = function(*again)
        pairs = [(y, dy) for y, dy in zip(outputs, to_outputs, strict=True) if y.dtype.is_floating]
        sources = [*again, *variables]
        return tape.gradient([y for y, _ in pairs], sources, [dy for _, dy in pairs])

    def fused_batch_norm(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        axis: int,
        epsilon: float,
        otherwise: Callable[[], Sequence[Tensor]],
    ) -> Sequence[Tensor]:
        # The kernel does harm under XLA, which takes the variance as E[x^2] - E[x]^2 and may get it
        # negative, and on CPUs for large batches: it sums the elements of a channel one after
        # another, and finds a variance of 2000 in 65536 equal float16 numbers.
        half = x.dtype in (tf.float16, tf.bfloat16)
        in_xla = self.inside_xla() or tf.config.optimizer.get_jit()
        if in_xla or not half or epsilon < _CUDNN_MIN_EPSILON:
            return otherwise()
        shape = ops.shape(x)
        before, after = math.prod(shape[1:axis]), math.prod(shape[axis + 1 :])
        flat, data_format = (shape[0] * before, shape[axis], after, 1), "NCHW"
        if axis == len(shape) - 1:
            flat, data_format = (shape[0], before, 1, shape[axis]), "NHWC"
        count = shape[0] * before * after

        def fused() -> Sequence[Tensor]:
            y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
                x=tf.reshape(x, flat),
                scale=tf.reshape(gamma, (-1,)),
                offset=tf.reshape(beta, (-1,)),
                mean=tf.zeros((0,)),
                variance=tf.zeros((0,)),
                epsilon=epsilon,
                data_format=data_format,
            )
            number = tf.fill(gamma.shape, tf.cast(count, "float32"))
            mean, variance = (tf.reshape(each, gamma.shape) for each in (mean, variance))
            # The kernel's variance is unbiased.
            variance *= tf.maximum(number - 1, 1) / tf.maximum(number, 1)
            return tf.ensure_shape(tf.reshape(y, shape), x.shape), mean, variance, number

        if self.platform() != "cpu":
            return fused()
        most = _FUSED_ELEMENTS[x.dtype.name]
        if isinstance(count, int):
            return fused() if count <= most else otherwise()
        return tf.cond(count <= most, fused, lambda: tuple(otherwise()))

    def sum_along(self, x: Tensor, axis: int) -> Tensor:
        # On CPUs TensorFlow adds the elements of a channel one after another, and of a million of
        # them loses three digits. Sums of blocks, and sums of these sums, lose none.
        if self.platform() != "cpu":
            return tf.reduce_sum(x, [i for i in range(len(x.shape)) if i != axis], keepdims=True)
        channels, after = x.shape[axis], x.shape[axis + 1 :]
        if after.num_elements() != 1:
            x = tf.reshape(x, (-1, channels, math.prod(ops.shape(x)[axis + 1 :])))
            x = tf.linalg.matrix_transpose(x)
        rows, total = tf.reshape(x, (-1, channels)), tf.zeros((channels,), x.dtype)
        for _ in range(_LEVELS):
            number = ops.shape(rows)[0]
            if isinstance(number, int) and number <= _BLOCK:
                break
            whole = number // _BLOCK
            blocks = tf.reshape(rows[: whole * _BLOCK], (_BLOCK, whole * channels))
            total += tf.reduce_sum(rows[whole * _BLOCK :], 0)
            rows = tf.reshape(tf.reduce_sum(blocks, 0), (whole, channels))
        total += tf.reduce_sum(rows, 0)
        return tf.reshape(total, [1] * axis + [channels] + [1] * len(after))

    def bitcast(self, x: Tensor, dtype: str) -> Tensor:
        return tf.bitcast(x, dtype)

    def read(self, model: Any, variables: list[Variable], each: bool = False) -> list[Tensor]:
        if each:
            return [tf.stack(getattr(v.value, "values", [v.value])) for v in variables]
        return [tf.convert_to_tensor(v.value) for v in variables]

    def to_host(self, x: Any) -> Any:
        # NumPy makes no array of a bfloat16 scalar by itself.
        return np.array(ops.convert_to_tensor(x).numpy())

    def preserved(self, variables: Sequence[Variable]) -> Callable[[], None]:
        # On each replica its own value.
        stored = [getattr(v._value, "values", [v._value]) for v in variables]
        kept = [(part, tf.identity(part)) for parts in stored for part in parts]

        def restore():
            for part, value in kept:
                part.assign(value)

        return restore

    def retype(self, variable: Variable, value: Tensor) -> Callable[[], None]:
        # A `tf.Variable` has one dtype: another takes its place, on the same replicas.
        before, old, is_trained = variable._dtype, variable._value, variable.trainable
        variable._dtype = value.dtype.name
        # Tapes watch what was trainable when it was made: its layer may be frozen for now only.
        variable.trainable = old.trainable
        with getattr(old, "distribute_strategy", tf.distribute.get_strategy()).scope():
            variable._initialize(value)
        variable.trainable = is_trained

        def undo() -> None:
            variable._dtype, variable._value = before, old

        return undo

    def random_state(self) -> Callable[[], None]:
        generator = getattr(context.context(), "_rng", None)
        if generator is None:
            return lambda: None
        state = generator.getstate()
        return lambda: generator.setstate(state)

    def watch_gradient(self, x: Tensor, record: Callable[[Tensor], None]) -> Tensor:
        @tf.custom_gradient
        def identity(x):
            def backward(gradient):
                if self.is_concrete(gradient):
                    record(gradient)
                return gradient

            return tf.identity(x), backward

        return identity(x)

    def gradients(
        self, loss: Callable[[], Tensor], variables: list[Variable]
    ) -> tuple[Tensor, list[Gradient]]:
        with tf.GradientTape() as tape:
            value = loss()
        return value, tape.gradient(value, [v.value for v in variables])

    def present_values(self, variables: Sequence[Variable]) -> Sequence[Tensor]:
        # Of a strategy the first replica's.
        held = [getattr(v._value, "values", [v._value])[0] for v in variables]
        with tf.init_scope():
            # What is made while a function is traced gets its value after that.
            if not all(bool(x.is_initialized()) for x in held):
                return []
            return [tf.convert_to_tensor(x) for x in held]

    def outside_functions(self) -> contextlib.AbstractContextManager[Any]:
        return tf.init_scope()

    def is_concrete(self, x: Any) -> bool:
        return not tf.is_symbolic_tensor(x)

    @contextlib.contextmanager
    def without_functions(self) -> Iterator[None]:
        before = tf.config.functions_run_eagerly()
        tf.config.run_functions_eagerly(True)
        try:
            yield
        finally:
            tf.config.run_functions_eagerly(before)

    def operations(self, function: Callable[..., Any], inputs: Sequence[Tree]) -> list[Operation]:
        return operations(function, inputs)


def _bits(x: Tensor) -> Tensor:
    """int32 of the same shape for float32; else `x`."""
    return tf.bitcast(x, "int32") if x.dtype == "float32" else x


def _with_values(gradient: Gradient, values: Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def _of_known_shape(gradient: Gradient, variable: Variable) -> Gradient:
    if not isinstance(gradient, tf.Tensor) or gradient.shape.is_fully_defined():
        return gradient
    return tf.ensure_shape(gradient, variable.shape)


@contextlib.contextmanager
def _outside_trace() -> Iterator[None]:
    if tf.distribute.has_strategy():  # whose own creators make a variable for each replica
        yield
        return
    with tf.init_scope(), tf.variable_creator_scope(_created_unnoticed):
        yield


def _created_unnoticed(next_creator: Any, **arguments: Any) -> tf.Variable:
    return default_variable_creator_v2(**arguments)  # `next_creator` is that of the function


backend = TensorFlowBackend()
