"""What kmp asks of a backend: each function, its documentation and its default stand together.

The modules `jax`, `tensorflow` and `torch` have subclasses, which override what differs there.
"""

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp._backend.sharding import UNSHARDED, Sharding
from kmp._backend.types import Device, DeviceMemory, Gradient, Tensor, Tree, Variable

# Factor and shift of each round of `hash_bits`: 0x85EBCA6B and 0xC2B2AE35 as int32.
MURMUR3 = ((0x85EBCA6B - 2**32, 13), (0xC2B2AE35 - 2**32, 16))


class Backend(abc.ABC):
    """The functions of a backend, by what they are for."""

    def __init__(self) -> None:
        self.one_replica = OneReplica(self)

    # ---- Where it runs -------------------------------------------------------------------------

    @abc.abstractmethod
    def platform(self) -> str:
        """Where the training runs: "cpu", "gpu" or "tpu"."""

    @abc.abstractmethod
    def device(self) -> Device:
        """The first device of this process."""

    def device_memory(self) -> DeviceMemory | None:
        """Memory in use on the first device; resets its peak. None if the backend cannot tell."""
        # JAX cannot forget a peak; `compiled_step_bytes` asks XLA instead.
        return None

    def inside_xla(self) -> bool:
        """Whether XLA compiles what is being traced."""
        return False

    def per_target(
        self,
        function: Callable[..., Sequence[Tensor]],
        shapes: Sequence[tuple[int, ...]],
        *tensors: Any,
    ) -> Sequence[Tensor]:
        """Call `function` with the name of the target that it is compiled for, and with `tensors`.

        Args:
            function: takes "cpu", "gpu" or "tpu"; "torch.compile"; or "host" where nothing is
                compiled; and the tensors. All that it reads of the step must be among these, since
                it may be called later, when the step is lowered.
            shapes: the shapes of the float32 tensors that it returns.
        """
        return function("host", *tensors)

    def sharding(self, layouts: Sequence[Any]) -> Sharding:
        """What each device holds of variables with these layouts; `UNSHARDED` if none is split."""
        return UNSHARDED

    def compiled(self, function: Callable, static: Sequence[int] = ()) -> Callable:
        """`function` as one program on JAX, itself elsewhere; `static`: places of non-tensors."""
        return function

    def writes_logs(self, model: Any) -> bool:
        """Whether this process is the one that writes event files for the model."""
        return True

    # ---- Gradients: dense tensors, or `tf.IndexedSlices` ----------------------------------------

    def gradient_values(self, gradient: Gradient) -> Tensor:
        """The numbers of a gradient, as they come."""
        return gradient

    def gradient_rows(self, gradient: Gradient) -> Tensor:
        """The numbers of a gradient; rows of a sparse one that share an index are summed."""
        return gradient

    def dense(self, gradient: Gradient) -> Tensor:
        """A gradient as a tensor of its variable's shape."""
        return gradient

    def gradient_sample(self, gradient: Gradient, strides: Sequence[int], target: str) -> Tensor:
        """A strided slice of a gradient, one stride per axis; zeros where a sparse one has no row.

        Args:
            gradient: what is sampled.
            strides: one for each axis.
            target: from `per_target`.
        """
        if set(strides) <= {1}:
            return gradient  # without indexing, which takes its time to trace
        return gradient[tuple(slice(None, None, stride) for stride in strides)]

    def map_gradient_values(
        self, function: Callable[[Tensor], Tensor], gradient: Gradient
    ) -> Gradient:
        """Apply an elementwise function to the numbers of a gradient; sparse stays sparse."""
        return function(gradient)

    def multiply(self, leaves: Sequence[Any], factor: Tensor) -> Sequence[Any]:
        """Float leaves, cast to at least float32, and complex ones times a scalar; others as is."""
        return [product(x, factor) for x in leaves]

    def are_dense(self, gradients: Sequence[Gradient]) -> list[bool]:
        """Whether each gradient is a tensor, and no `tf.IndexedSlices`."""
        return [True] * len(gradients)

    def are_finite(self, tensors: Sequence[Tensor]) -> Tensor:
        """bool[n]: whether each of n >= 1 float tensors, none of them empty, is all finite."""
        return ops.stack([ops.all(ops.isfinite(x)) for x in tensors])

    def reduce_columns(
        self, columns: tuple[Tensor, ...], axes: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """The maximum of the second column and the sums of the others, over some axes.

        Inside XLA one reduction: each gradient is read once, and no column is ever in memory.
        """
        # Outside XLA: one column after another.
        pairs = enumerate(columns)
        return tuple(ops.max(x, axes, initial=0) if i == 1 else ops.sum(x, axes) for i, x in pairs)

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over the replicas, where each replica computes a part of it."""
        # On JAX one program spans the devices; on torch Keras refuses such statistics.
        return x

    # ---- The step ------------------------------------------------------------------------------

    @abc.abstractmethod
    def read_flags(
        self, number: Tensor, loss_nonfinite: Tensor, *others: Tensor
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """Turn counts into the flags that the rest of the step acts on.

        Args:
            number: above 0 if gradients are not finite.
            loss_nonfinite: float32[], above 0 if the loss is known not to be finite.
            others: float32 and int32 tensors that go with them.

        Returns:
            bool[] gradients are finite; bool[] the loss is finite; the others. Outside a trace, all
            are NumPy values, read in one transfer, to branch on; inside a trace, tensors.
        """

    def order_after(self, finite: Tensor, sample: Tensor) -> Tensor:
        """`finite`, with a dependency on `sample`, so that XLA samples before it updates."""
        # Things happen in the order of the calls.
        return finite

    def run_step(
        self,
        step: Callable[..., None],
        gradients: list[Gradient],
        variables: list[Variable],
        inner: Any,
        loss_nonfinite: Variable,
    ) -> None:
        """Sum the gradients over the replicas, if there are any, and run a step for all of them.

        Args:
            step: takes how its parts run (`OneReplica`), the gradients and the variables.
            gradients, variables: of the scaled loss of this replica, one for each variable.
            inner: the optimizer that updates them.
            loss_nonfinite: the variable that `record_loss_finite` was given.

        Raises:
            ValueError: on TensorFlow, in the cross-replica context of a strategy.
        """
        step(self.one_replica, gradients, variables)

    @abc.abstractmethod
    def record_loss_finite(self, variable: Variable, is_finite: Callable[[], Tensor]) -> None:
        """Record whether a loss is finite, with replicas that of each. Does nothing on JAX."""

    # ---- A step that may be skipped: branch, mask or restore -------------------------------------

    def update_if(
        self, applies: Tensor, inner: Any, gradients: list[Gradient], variables: list[Variable]
    ) -> None:
        """Let a Keras optimizer update the variables, or leave them as they are.

        Each backend takes the cheapest of three ways. To *branch* runs nothing in a skipped step,
        but a conditional stalls an accelerator. To *mask* runs the update in every step, and each
        assignment selects between the new value and the old; XLA fuses the select into the update.
        To *restore* copies all variables, updates, and writes the copies back. It needs no
        conditional and no way into the assignments, and moves the most memory.

        Args:
            applies: bool[], whether the update happens.
            inner: the optimizer. Its own variables stay as they are, too, unless `applies`.
            gradients: what it is given, one for each variable.
            variables: the variables to update.
        """

        def update() -> Tensor:
            inner.apply(gradients, variables)
            return applies

        self.branch(applies, update, applies)

    def branch(self, pred: Tensor, then: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
        """Return `then()` if `pred`, a bool[], else `otherwise`.

        In a program that JAX or `torch.compile` compiles, `then` must not write anything.
        """
        return then() if bool(pred) else otherwise

    def copied_values(self, variables: Sequence[Variable]) -> list[Tensor]:
        """The present values of variables, which later assignments do not change."""
        return [v.value for v in variables]

    def restore_unless(
        self, applied: Tensor, variables: Sequence[Variable], old: Sequence[Tensor]
    ) -> None:
        """Give each variable the value in `old` back unless `applied`, a bool[]."""
        for variable, value in zip(variables, old, strict=True):
            variable.assign(ops.where(applied, variable.value, value))

    # ---- Keras's training loop -----------------------------------------------------------------

    # The class of what stands in the place of a `keras.Variable` in an optimizer.
    BaseView: Any = keras.Variable
    # Whether `record_loss_finite` knows of a loss that is not finite before the step.
    SEES_LOSS: bool = True
    # What a train function raises when the data ends.
    END_OF_DATA: tuple[type[Exception], ...] = (StopIteration,)

    def around_train_step(
        self,
        model: Any,
        train_step: Callable[..., Any],
        before: Callable[[], Any],
        after: Callable[[Any, Any], Any],
    ) -> Callable[..., Any]:
        """Run two functions around Keras's train step, in the same compiled program.

        Both read and assign variables of the model, its optimizer and its metrics as usual.

        Args:
            model: `keras.Model`, compiled.
            train_step: its train step, with the signature that the backend's trainer calls.
            before: called first; what it returns is handed to `after`.
            after: called with that and with the logs of the train step; returns the logs.

        Returns:
            A train step with the same signature.
        """

        def step(data: Any) -> Any:
            kept = before()
            return after(kept, train_step(data))

        return step

    def settle(self, model: Any) -> None:
        """Write the state that the loop of `fit` holds into the variables of the model."""
        # The variables of a model that trains hold its state.
        return

    # ---- Layers --------------------------------------------------------------------------------

    @abc.abstractmethod
    def matmul_float32(self, x: Tensor, kernel: Tensor) -> Tensor:
        """`x @ kernel` of two half matrices, accumulated and returned in float32."""

    @abc.abstractmethod
    def custom_gradient(
        self,
        forward: Callable[..., Sequence[Tensor]],
        backward: Callable[..., Sequence[Tensor | None]],
        inputs: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """`forward(*inputs)`, differentiated by `backward`.

        Args:
            forward: returns a tuple of tensors; all but the first are kept for the backward pass.
            backward: takes the inputs, what was kept and the gradients of all of the tensors;
                returns those of the inputs: one each, or None.
            inputs: tensors, kept for the backward pass.
        """

    def fused_batch_norm(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        axis: int,
        epsilon: float,
        otherwise: Callable[[], Sequence[Tensor]],
    ) -> Sequence[Tensor]:
        """Normalize half `x` by its batch in one kernel that keeps only `x`, where there is one.

        Returns:
            The normalized `x`, in its dtype; mean, biased variance and number of elements, each of
            the shape of `gamma`. Without such a kernel, or where it does harm, `otherwise()`.
        """
        # Only TensorFlow has such a kernel, outside XLA.
        return otherwise()

    def sum_along(self, x: Tensor, axis: int) -> Tensor:
        """The sum over all axes but `axis`, as size 1, right to a few units in the last place."""
        return ops.sum(x, [each for each in range(len(x.shape)) if each != axis], keepdims=True)

    # ---- Host and device -----------------------------------------------------------------------

    def constant(self, values: Any) -> Tensor:
        """A NumPy array or scalar as a tensor."""
        return ops.convert_to_tensor(values)

    def segment_sum(self, values: Tensor, keys: Tensor, number: int) -> Tensor:
        """float32[number]: the sum of the values of each key."""
        return ops.segment_sum(values, keys, num_segments=number)

    @abc.abstractmethod
    def bitcast(self, x: Tensor, dtype: str) -> Tensor:
        """The bits of `x` read as another dtype of its width, as `keras.ops.view` of 3.12 does."""

    def hash_bits(self, x: Tensor) -> Tensor:
        """A bijection of int32[...] whose result looks random: the finalizer of MurmurHash3."""
        x = ops.bitwise_xor(x, _shifted(x, 16))
        for factor, by in MURMUR3:
            x = x * factor
            x = ops.bitwise_xor(x, _shifted(x, by))
        return x

    def read(self, model: Any, variables: list[Variable], each: bool = False) -> list[Tensor]:
        """The present values of variables of `model`, its optimizer or its metrics.

        `model` is None in a step. In `fit` on JAX they live in the loop, which a read of a variable
        would end. `each` stacks those of TensorFlow's replicas; otherwise it is the first one's.
        """
        return [v.value for v in variables]

    def to_host(self, x: Any) -> Any:
        """A copy of a tensor or variable on the host, for `from_host`."""
        # A copy: the next step may write into the buffer that NumPy would look at.
        return np.array(ops.convert_to_numpy(x))

    def from_host(self, variable: Variable, value: Any) -> None:
        """Assign what `to_host` returned for this variable, or for a value of it."""
        variable.assign(value)

    def preserved(self, variable: Variable) -> Callable[[], None]:
        """Keep the value of a variable as stored; call the result to put it back."""
        value = ops.copy(variable._value)  # `value` may be autocast
        return lambda: variable.assign(value)

    def retype(self, variable: Variable, value: Tensor) -> Callable[[], None]:
        """Give a variable a value of another dtype; call the result to put both back."""
        before, old = variable._dtype, variable._value

        def assign(dtype: str, value: Tensor) -> None:
            variable._dtype = dtype
            variable._direct_assign(value)

        assign(keras.backend.standardize_dtype(value.dtype), value)
        return lambda: assign(before, old)

    @abc.abstractmethod
    def random_state(self) -> Callable[[], None]:
        """Keep the state of the backend's random generators; call the result to put it back."""

    # ---- Replays of the debugging tools ----------------------------------------------------------

    @abc.abstractmethod
    def watch_gradient(self, x: Tensor, record: Callable[[Tensor], None]) -> Tensor:
        """`x`, whose gradient is handed to `record` on its way back, unless it is being traced."""

    @abc.abstractmethod
    def gradients(
        self, loss: Callable[[], Tensor], variables: list[Variable]
    ) -> tuple[Tensor, list[Gradient]]:
        """Call `loss` eagerly; return its value and its gradients."""

    @abc.abstractmethod
    def is_concrete(self, x: Any) -> bool:
        """Whether `x` holds numbers, which a tensor that is being traced does not."""

    def without_functions(self) -> contextlib.AbstractContextManager[None]:
        """Within, no function is compiled: it would keep traces of the dtypes it is run with."""
        return contextlib.nullcontext()

    # ---- Memory --------------------------------------------------------------------------------

    def compiled_bytes(
        self, model: Any, specs: list, loss: Callable[[list[Tensor]], Tensor]
    ) -> int | None:
        """What XLA needs beside arguments and results for the gradient of `loss`.

        Args:
            model: the model that `loss` calls.
            specs: (shape, dtype) of each of its inputs.
            loss: a function of the list of inputs.

        Returns:
            Bytes; None if no compiler says.
        """
        return None

    def compiled_step_bytes(self, model: Any, x: Tree, y: Tree) -> int | None:
        """The most that XLA says one compiled training step of `fit` holds.

        Args:
            model: compiled, and trained for at least one step, so that all variables are there.
            x: one batch, of arrays; they are not computed with.
            y: its targets.

        Returns:
            Bytes of arguments, results and working memory; None if no compiler says.
        """
        return None


class OneReplica:
    """How the parts of a step run where its gradients are already the sum over all devices.

    `tensorflow/distribute.py` has those of several replicas.

    Args:
        backend: the backend.
        knows_loss: whether it would know of a loss that is not finite, wherever that is computed.
            If not, nothing but the gradients may move the scale: all processes have the same.
    """

    def __init__(self, backend: Backend, knows_loss: bool = True):
        self.backend, self.knows_loss = backend, knows_loss

    def on_each(self, function: Callable, *args: Any) -> Any:
        """Call a function of gradients on each replica."""
        return function(*args)

    def local(self, gradients: list[Gradient]) -> list[Gradient]:
        """The gradients of the first replica in this process."""
        return gradients

    def loss_nonfinite(self, variable: Variable) -> Tensor:
        """float32[], above 0 if `record_loss_finite` was given a loss that is not finite."""
        return ops.convert_to_tensor(variable)

    def update_if(
        self, applies: Tensor, inner: Any, gradients: list[Gradient], variables: list[Variable]
    ) -> None:
        """`Backend.update_if` on each replica, with gradients from `on_each`."""
        self.backend.update_if(applies, inner, gradients, variables)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift to the right, with zeros from the left."""
    return ops.bitwise_and(ops.right_shift(x, by), 2 ** (32 - by) - 1)


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x`, in float32 if it was half precision or a Python number."""
    if not hasattr(x, "dtype"):
        return ops.convert_to_tensor(x, "float32")
    dtype = keras.backend.standardize_dtype(x.dtype)
    return x if dtype in ("float32", "float64") else ops.cast(x, "float32")


def product(x: Any, factor: Tensor) -> Any:
    """One leaf of `multiply`."""
    if is_float(x):
        return ops.multiply(at_least_float32(x), factor)
    return ops.multiply(x, ops.cast(factor, x.dtype)) if is_complex(x) else x


def is_float(x: Any) -> bool:
    """Tell whether `x` is a float or a tensor, array or sparse gradient of floats."""
    if not hasattr(x, "dtype"):
        return isinstance(x, float)
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype))


def is_complex(x: Any) -> bool:
    """Tell whether `x` is a tensor or array of complex numbers."""
    return hasattr(x, "dtype") and keras.backend.standardize_dtype(x.dtype).startswith("complex")


# Held while a method of a shared optimizer or variable is replaced: threads may trace at once.
replacing = threading.RLock()


@contextlib.contextmanager
def applying_by(optimizer: Any, apply_gradients: Callable[..., None]) -> Iterator[None]:
    """Within, a Keras optimizer's `apply` calls this with gradients and variables to update by."""
    with replacing:
        optimizer._backend_apply_gradients = apply_gradients
        try:
            yield
        finally:
            del optimizer._backend_apply_gradients


def update(optimizer: Any, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> None:
    """What a Keras optimizer does with gradients once they are accumulated."""
    clipped = optimizer._clip_gradients(list(gradients))
    optimizer._apply_weight_decay(variables)
    optimizer._backend_update_step(clipped, variables, optimizer.learning_rate)


def ends_window(optimizer: Any) -> Tensor:
    """bool[]: whether this step is the last micro-batch of a window of accumulated gradients."""
    return (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0


def accumulate(
    optimizer: Any,
    gradients: Sequence[Gradient],
    variables: Sequence[Variable],
    choose: Callable[[Callable[[], None], Callable[[], None]], None],
) -> None:
    """Add the gradients of a micro-batch to their accumulators, or update with the window's mean.

    That is what Keras does, without its conditional: XLA would copy all parameters and slots for
    it, and TensorFlow refuses it where replicas synchronise.

    Args:
        optimizer: of Keras, with `gradient_accumulation_steps`.
        gradients: of this micro-batch, one for each variable.
        variables: the variables to update.
        choose: called with two functions: `update_with_mean` for the last micro-batch of a window,
            and `add` for the others. It runs the right one.
    """
    places = [optimizer._get_variable_index(v) for v in variables]
    accumulators = [optimizer._accumulated_gradients[i] for i in places]

    def update_with_mean() -> None:
        steps = optimizer.gradient_accumulation_steps
        means = [(g + a) / steps for g, a in zip(gradients, accumulators, strict=True)]
        update(optimizer, means, variables)
        optimizer._backend_reset_gradient_accumulators()

    def add() -> None:
        optimizer._backend_increment_gradient_accumulators(gradients, accumulators)

    choose(update_with_mean, add)
