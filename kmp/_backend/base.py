"""What kmp asks of a backend: one class, in which each function is documented and has its default.

`JaxBackend`, `TensorFlowBackend` and `TorchBackend`, in the modules beside this one, override what
differs.
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
from kmp._backend.types import (
    Device,
    DeviceMemory,
    Gradient,
    Operation,
    PlannedProgram,
    Tensor,
    Tree,
    TwoLists,
    Variable,
)

# Factor and shift of each round of `hash_bits`: 0x85EBCA6B and 0xC2B2AE35 as int32.
MURMUR3 = ((0x85EBCA6B - 2**32, 13), (0xC2B2AE35 - 2**32, 16))


class Backend(abc.ABC):
    """The functions of a backend, by what they are for.

    A function without a default is abstract. To add one, write it here with its default, and
    override it where a backend differs. Comments in an override say why it differs.

    Attributes:
        one_replica: the `OneReplica` of this backend.
        BaseView: the base class of an object that stands in for a `keras.Variable` in an optimizer.
        SEES_LOSS: whether `record_loss_finite` records the loss before its step runs.
        IS_PURE: whether a train step takes and returns values, and assigns nothing.
        END_OF_DATA: the exceptions by which a train function says that the data have ended.
    """

    BaseView: Any = keras.Variable
    SEES_LOSS: bool = True
    IS_PURE: bool = False
    END_OF_DATA: tuple[type[Exception], ...] = (StopIteration,)

    def __init__(self) -> None:
        self.one_replica = OneReplica(self)

    # ---- Where it runs -------------------------------------------------------------------------

    @abc.abstractmethod
    def platform(self) -> str:
        """Return where the training runs: "cpu", "gpu" or "tpu"."""

    @abc.abstractmethod
    def device(self) -> Device:
        """Describe the first device of this process."""

    def device_memory(self) -> DeviceMemory | None:
        """Return the memory in use on the first device and its peak, and reset the peak.

        Returns:
            None if the backend cannot tell.
        """
        # JAX cannot forget a peak; `planned_step` asks XLA instead.
        return None

    def inside_xla(self) -> bool:
        """Tell whether XLA compiles the operations that are called now."""
        return False

    def per_target(
        self,
        function: Callable[..., Sequence[Tensor]],
        shapes: Sequence[tuple[int, ...]],
        *tensors: Any,
    ) -> Sequence[Tensor]:
        """Call a function that does its work in another way on each target.

        Args:
            function: takes the name of the target and the tensors. The name is "cpu", "gpu" or
                "tpu"; "torch.compile"; or "host" where nothing is compiled, and for TensorFlow on
                a CPU. Every tensor of the step that it reads must be among `tensors`: JAX calls it
                later, when it lowers the step.
            shapes: of the float32 tensors that it returns.
            *tensors: handed to the function.

        Returns:
            The tensors that the function returns.
        """
        return function("host", *tensors)

    def sharding(self, layouts: Sequence[Any]) -> Sharding:
        """Return how variables with these layouts lie on devices; `UNSHARDED` if there is none."""
        return UNSHARDED

    def placements(self, variables: Sequence[Variable]) -> Sequence[Any]:
        """Return the layouts of variables that the user has split over devices by hand, on JAX.

        Returns:
            For `sharding`, one a variable; empty if none is split, or they are not on one mesh.
        """
        return []

    def compiled(self, function: Callable, static: Sequence[int] = ()) -> Callable:
        """Compile a function of tensors where each operation would be compiled by itself, on JAX.

        Args:
            function: takes tensors, or nested structures of them.
            static: the positions of arguments that are not tensors.
        """
        return function

    def writes_logs(self, model: Any) -> bool:
        """Tell whether this process writes the event files of a model that several may train."""
        return True

    def trains_together(self, model: Any) -> bool:
        """Tell whether Keras's `fit` averages the gradients of a model over PyTorch's processes."""
        return False

    def assigns_together(self, model: Any) -> bool:
        """Tell whether several processes train a model, and one waits where it assigns alone."""
        return False

    def over_processes(self, model: Any, x: Tensor, reduce: Callable[[Tensor, int], Any]) -> Any:
        """Reduce a tensor over the processes that train a model together.

        All of them have to call this, in the same order: nobody gets an answer before the last.

        Args:
            model: `keras.Model`.
            x: what this process has, of the same shape and dtype in all.
            reduce: a function such as `ops.max`, which takes the tensors of all processes, stacked
                along a new first axis, and that axis. All get the same bits from it.

        Returns:
            What `reduce` returns; `x` if `trains_together` is False.
        """
        # On JAX one program spans all processes; on TensorFlow `fit` does not run on several.
        return x

    # ---- Gradients: dense tensors, or sparse ones, which are `tf.IndexedSlices` ------------------

    def gradient_values(self, gradient: Gradient) -> Tensor:
        """Return the numbers of a gradient; a sparse one may have several slices for one row."""
        return gradient

    def gradient_rows(self, gradient: Gradient) -> Tensor:
        """Return the numbers of a gradient; slices of a sparse one for the same row are summed."""
        return gradient

    def dense(self, gradient: Gradient) -> Tensor:
        """Return a gradient as a tensor of its variable's shape."""
        return gradient

    def gradient_sample(self, gradient: Gradient, strides: Sequence[int], target: str) -> Tensor:
        """Take a strided slice of a gradient.

        Args:
            gradient: a gradient; where a sparse one has no row, the sample has zeros.
            strides: one for each axis.
            target: the name that `per_target` handed on.
        """
        if set(strides) <= {1}:
            return gradient  # without indexing, which takes its time to trace
        return gradient[tuple(slice(None, None, stride) for stride in strides)]

    def map_gradient_values(
        self, function: Callable[[Tensor], Tensor], gradient: Gradient
    ) -> Gradient:
        """Apply an elementwise function to a gradient. A sparse gradient stays sparse."""
        return function(gradient)

    def multiply(self, leaves: Sequence[Any], factor: Tensor) -> Sequence[Any]:
        """Multiply the floats and complex numbers among leaves; leave the others as they are.

        Args:
            leaves: tensors, arrays, sparse gradients, Python numbers or None. Half-precision ones
                become float32.
            factor: float32[].
        """
        return [product(x, factor) for x in leaves]

    def are_dense(self, gradients: Sequence[Gradient]) -> list[bool]:
        """Tell of each gradient whether it is a tensor (or None) rather than `tf.IndexedSlices`."""
        return [True] * len(gradients)

    def are_finite(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return bool[n]: which of n float tensors are finite throughout. None of them is empty."""
        return ops.stack([ops.all(ops.isfinite(x)) for x in tensors])

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return float32[n]: the l2 norm of each of n float tensors, summed in float32."""
        squares = [ops.sum(ops.square(ops.cast(x, "float32"))) for x in tensors]
        return ops.sqrt(ops.stack(squares))

    def reduce_columns(
        self, columns: tuple[Tensor, ...], axes: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """Reduce the second column by its maximum and the others by their sums.

        XLA does that in one reduction: it reads each gradient once, and writes no column to memory.

        Args:
            columns: tensors of one shape. The second holds no negative number.
            axes: the axes to reduce over.
        """
        pairs = enumerate(columns)
        return tuple(ops.max(x, axes, initial=0) if i == 1 else ops.sum(x, axes) for i, x in pairs)

    def maxima(self, tensors: Sequence[Tensor], axis: int) -> Sequence[Tensor]:
        """Reduce each tensor by its maximum, in one reduction under XLA.

        Args:
            tensors: float32 of one shape, without negative numbers and NaN.
            axis: the axis to reduce over.
        """
        return [ops.max(x, axis) for x in tensors]

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Sum a tensor over the replicas of a strategy."""
        # On JAX one program spans the devices. On torch Keras refuses synchronized statistics.
        return x

    # ---- The step ------------------------------------------------------------------------------

    @abc.abstractmethod
    def read_numbers(
        self, measured: Sequence[Tensor], others: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the numbers that the rest of the step acts on, all read in one transfer.

        Args:
            measured: float32 and int32 tensors that are computed from all gradients. XLA is kept
                from computing them again for each update.
            others: float32 and int32 tensors.

        Returns:
            Both. In a compiled step these are tensors. In an eager one they are NumPy values, so
            that the step may branch on them.
        """

    def together(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return tensors of which XLA computes all before it uses one."""
        return tensors

    def once_decided(self, x: Tensor) -> Tensor:
        """Return `x`; nothing is computed from it before it is known whether the step applies.

        XLA's compiler for TPUs would otherwise compute that before the forward pass, and keep it
        until the update.
        """
        return x

    def order_after(self, finite: Tensor, sample: Tensor) -> Tensor:
        """Make XLA take a sample before it updates what was sampled.

        Args:
            finite: bool[], which the update waits for.
            sample: float32[n], of the variables before the update.

        Returns:
            bool[], equal to `finite`, computed from both.
        """
        # Where XLA does not compile, operations run in the order of the calls.
        return finite

    def run_step(
        self,
        step: Callable[..., None],
        gradients: list[Gradient],
        variables: list[Variable],
        inner: Any,
        loss_nonfinite: Variable,
    ) -> None:
        """Sum the gradients over the replicas, and run one step for all of them.

        Args:
            step: takes an `OneReplica`, which runs its parts, the gradients and the variables.
            gradients: of this replica's scaled loss, one for each variable.
            variables: the variables to update.
            inner: the Keras optimizer that updates them.
            loss_nonfinite: the variable that `record_loss_finite` was given.

        Raises:
            ValueError: on TensorFlow, in the cross-replica context of a strategy.
        """
        step(self.one_replica, gradients, variables)

    @abc.abstractmethod
    def record_loss_finite(self, variable: Variable, is_finite: Callable[[], Tensor]) -> None:
        """Record whether the loss is finite; each replica records its own. Does nothing on JAX.

        Args:
            variable: float32[], which becomes positive if the loss is not finite.
            is_finite: returns bool[].
        """

    # ---- A step that may be skipped: branch, mask or restore -------------------------------------

    def update_if(
        self, applies: Tensor, inner: Any, gradients: list[Gradient], variables: list[Variable]
    ) -> None:
        """Let a Keras optimizer update the variables, or skip the update.

        Each backend takes the cheapest of three ways:

        - *branch*: a skipped step runs nothing. A conditional stalls an accelerator.
        - *mask*: every step runs the update, and each assignment selects between the old value and
          the new one. XLA fuses the select into the update.
        - *restore*: every step copies the variables and runs the update; a skipped one writes the
          copies back. That moves the most memory, and works where nothing else does.

        Args:
            applies: bool[]. If False, the variables stay as they are, and the optimizer's, too.
            inner: the Keras optimizer.
            gradients: one for each variable.
            variables: the variables to update.
        """

        def update() -> Tensor:
            inner.apply(gradients, variables)
            return applies

        self.branch(applies, update, applies)

    def branch(self, pred: Tensor, then: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
        """Return `then()` if `pred`, a bool[], else `otherwise`, a tensor of the same shape.

        In a program that JAX or `torch.compile` compiles, `then` must not assign to a variable.
        """
        return then() if bool(pred) else otherwise

    def block_sizes(self) -> tuple[int, int] | None:
        """Return how many numbers are best updated at once, and how many a joined weight may have.

        Returns:
            None where XLA compiles updates.
        """
        return None

    def compiled_block(
        self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> Callable[..., Sequence[Tensor]] | None:
        """Return a function of tensors as one program.

        Args:
            function: returns what becomes of its last inputs.
            inputs: of one call. In the next call vectors may have any other length above 1, the
                same for all; the other shapes stay.

        Returns:
            The program, which may write into its last inputs, and return those; None if the
            function is to be called as it is.
        """
        return None

    def are_in_place(self, variables: Sequence[Variable]) -> bool:
        """Tell whether rows of variables can be written, as the two functions below need."""
        return False

    def read_rows(self, parts: Sequence[tuple[Any, slice]]) -> Tensor:
        """Return rows of a variable or tensor, or those of several, joined to a vector."""
        raise NotImplementedError

    def write_rows(self, parts: Sequence[tuple[Variable, slice]], value: Tensor) -> None:
        """Assign to rows of variables what `read_rows` would return, in their dtype."""
        raise NotImplementedError

    def copied_values(self, variables: Sequence[Variable]) -> list[Tensor]:
        """Return the present values of variables, which later assignments do not change."""
        return [v.value for v in variables]

    def restore_unless(
        self, applied: Tensor, variables: Sequence[Variable], old: Sequence[Tensor]
    ) -> None:
        """Give variables their old values back unless the update was applied.

        Args:
            applied: bool[], whether it was.
            variables: the variables that it has updated.
            old: their `copied_values` from before.
        """
        for variable, value in zip(variables, old, strict=True):
            variable.assign(ops.where(applied, variable.value, value))

    @contextlib.contextmanager
    def noting_assignments(
        self, variables: Sequence[Variable]
    ) -> Iterator[list[tuple[Variable, Tensor]]]:
        """Within, note which of the variables are assigned. The others are not copied.

        Yields:
            The variables that have been assigned so far, each with its value from before.
        """
        noted: list[tuple[Variable, Tensor]] = []
        value_of = self.values_before(variables)

        def note(variable: Any) -> Callable[[Any], Any]:
            def assign(value: Any) -> Any:
                del variable.assign
                noted.append((variable, value_of(variable)))
                return variable.assign(value)

            return assign

        for each in variables:
            each.assign = note(each)
        try:
            yield noted
        finally:
            for each in variables:
                each.__dict__.pop("assign", None)

    def values_before(self, variables: Sequence[Variable]) -> Callable[[Variable], Tensor]:
        """Return what gives the value of each of the variables as long as it is not assigned."""
        # Read now, because an assignment may stand in a branch, out of which no tensor comes, or in
        # the call of a layer, where variables read in half precision.
        values = dict(zip(map(id, variables), self.copied_values(variables), strict=True))
        return lambda variable: values[id(variable)]

    # ---- Keras's training loop -----------------------------------------------------------------

    def around_train_step(
        self,
        model: Any,
        train_step: Callable[..., Any],
        before: Callable[[], Any],
        after: Callable[[Any, Any], Any],
    ) -> Callable[..., Any]:
        """Run two functions around Keras's train step, in the same compiled program.

        Both may read and assign variables of the model, its optimizer and its metrics.

        Args:
            model: `keras.Model`, compiled.
            train_step: the model's train step, as the backend's trainer calls it.
            before: called before the train step.
            after: takes what `before` returned and the logs of the train step; returns the logs.

        Returns:
            A function that the trainer can call in place of `train_step`.
        """

        def step(data: Any) -> Any:
            kept = before()
            return after(kept, train_step(data))

        return step

    def sums_in_float32(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Let a traced train step add up in float32 what it adds up in half precision.

        PyTorch does so by itself.

        Args:
            train_step: as the backend's trainer calls it.

        Returns:
            A function with the same arguments and results.
        """
        return train_step

    def settle(self, model: Any) -> None:
        """Write the state that JAX's loop of `fit` holds into the variables of the model."""
        return  # elsewhere the variables hold it

    # ---- Layers --------------------------------------------------------------------------------

    @abc.abstractmethod
    def matmul_float32(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Multiply matrices in half precision; accumulate in float32 and return that.

        Args:
            x: float16 or bfloat16 [rows, n].
            kernel: of the same dtype, [n, columns].

        Returns:
            float32[rows, columns].
        """

    @abc.abstractmethod
    def custom_gradient(
        self,
        forward: Callable[..., Sequence[Tensor]],
        backward: Callable[..., Sequence[Tensor | None]],
        inputs: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """Call a function that brings its own gradient.

        Args:
            forward: takes the inputs; returns a tuple of tensors.
            backward: takes the inputs, the tensors of `forward` without the first, and the
                gradients of all tensors of `forward`. Returns the gradient of each input, or None.
            inputs: tensors; they stay in memory until the backward pass, as do the tensors of
                `forward` but for the first.

        Returns:
            The tensors of `forward`.
        """

    @abc.abstractmethod
    def recompute(
        self,
        function: Callable[..., TwoLists],
        inputs: Sequence[Tensor],
        weights: Callable[[], Sequence[Tensor]],
        policy: Any = None,
    ) -> TwoLists:
        """Call a function whose tensors are computed again for the gradient, instead of kept.

        Args:
            function: takes the inputs, and after them nothing or the weights. Returns a list of
                tensors, and a list of tensors through which no gradient flows. It may read
                variables and other tensors. Where the backward pass is a program of its own, it is
                called once more there, and must do the same.
            inputs: tensors; they stay in memory until the backward pass.
            weights: returns the values of the trainable variables that `function` reads. They are
                handed to it where its second run could read values that were assigned since.
            policy: what `recompute_policy` returned; None: nothing inside is kept.

        Returns:
            What `function` returns.
        """

    def recompute_policy(self, policy: Any) -> Any:
        """Return the backend's own form of a user's choice of what is kept inside all the same.

        Args:
            policy: "dots_saveable", the results of matrix products and convolutions; or what the
                backend itself takes.

        Raises:
            ValueError: if the backend has no such choice.
        """
        raise ValueError(
            "`policy` of recompute needs JAX or PyTorch: TensorFlow's gradient of a block keeps "
            f"its inputs alone. Received: policy={policy!r}. Leave it out."
        )

    def untraced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that `torch.compile` calls as it is, rather than tracing it."""
        return function

    def in_place_of(self, x: Tensor, value: Tensor) -> Tensor:
        """Return `value`; its gradient counts as that of `x`, a tensor of the same shape."""

        def to_x(inputs: Any, outputs: Any, gradients: Sequence[Tensor]) -> Sequence[Any]:
            return gradients[0], None

        return self.custom_gradient(lambda _, value: (ops.copy(value),), to_x, (x, value))[0]

    def fused_batch_norm(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        axis: int,
        epsilon: float,
        otherwise: Callable[[], Sequence[Tensor]],
    ) -> Sequence[Tensor]:
        """Normalize a batch in half precision by one kernel; the backward pass keeps only `x`.

        Args:
            x: float16 or bfloat16, the batch.
            gamma: float32, broadcastable to `x`: what the normalized numbers are multiplied by.
            beta: float32, of the same shape, what is added to them.
            axis: of the features.
            epsilon: what is added to the variance.
            otherwise: does the same in several operations.

        Returns:
            `x` normalized, in its dtype; its mean, biased variance and number of elements, float32
            in the shape of `gamma`. From `otherwise()` where there is no such kernel, or where the
            kernel is inaccurate.
        """
        # Only TensorFlow has the kernel, outside XLA.
        return otherwise()

    def sum_along(self, x: Tensor, axis: int) -> Tensor:
        """Sum over all axes but one, right to a few units in the last place.

        Returns:
            A tensor with as many axes as `x`, of size 1 but for `axis`.
        """
        return ops.sum(x, [each for each in range(len(x.shape)) if each != axis], keepdims=True)

    # ---- Host and device -----------------------------------------------------------------------

    def constant(self, values: Any) -> Tensor:
        """Return a NumPy array or scalar as a tensor."""
        return ops.convert_to_tensor(values)

    def segment_sum(self, values: Tensor, keys: Tensor, number: int) -> Tensor:
        """Sum the values of each key.

        Args:
            values: float32[n].
            keys: int32[n], from 0 to `number` - 1.
            number: how many keys there are.

        Returns:
            float32[number].
        """
        return ops.segment_sum(values, keys, num_segments=number)

    @abc.abstractmethod
    def bitcast(self, x: Tensor, dtype: str) -> Tensor:
        """Read the bits of a tensor as another dtype of its width. Keras has `view` since 3.12."""

    def hash_bits(self, x: Tensor) -> Tensor:
        """Map int32[...] one to one to numbers that look random: the finalizer of MurmurHash3."""
        x = ops.bitwise_xor(x, _shifted(x, 16))
        for factor, by in MURMUR3:
            x = x * factor
            x = ops.bitwise_xor(x, _shifted(x, by))
        return x

    def add_noise(self, x: Tensor, noise: Tensor, mask: int, end: float) -> Tensor:
        """Add noise to the bits of numbers, and keep some of the bits.

        Args:
            x: float32[...].
            noise: int32[...]. PyTorch may write into it.
            mask: the bits that stay; the others become zero.
            end: the magnitude from which on a number is not added to.

        Returns:
            int32[...], the bits of float32.
        """
        # Python's operators keep int32 whatever Keras's floatx is; see `hash_bits`.
        noise = ops.where(ops.abs(x) < end, noise, 0)
        return (self.bitcast(x, "int32") + noise) & mask

    def read(self, model: Any, variables: list[Variable], each: bool = False) -> list[Tensor]:
        """Return the present values of variables of a model, its optimizer or its metrics.

        Args:
            model: the model; None within a step. On JAX the loop of `fit` holds the values, and to
                read a variable would end the loop.
            variables: the variables.
            each: whether to return the values of all of TensorFlow's replicas, stacked along a new
                first axis, instead of the first replica's.
        """
        return [v.value for v in variables]

    def present_values(self, variables: Sequence[Variable]) -> Sequence[Tensor]:
        """Return the values of variables outside of any function that is being traced.

        Returns:
            The values; an empty list where they cannot be read, as within `torch.compile` and,
            on JAX, while `fit` holds them.
        """
        return [v._value for v in variables]

    def outside_functions(self) -> contextlib.AbstractContextManager[Any]:
        """Within, compute at once, also where a function is being traced."""
        return contextlib.nullcontext()

    def to_host(self, x: Any) -> Any:
        """Copy a tensor or variable to the host, for `from_host`."""
        # Without a copy, NumPy would look at a buffer that the next step may write into.
        return np.array(ops.convert_to_numpy(x))

    def from_host(self, variable: Variable, value: Any) -> None:
        """Assign what `to_host` returned for this variable or for one of its values."""
        variable.assign(value)

    def preserved(self, variables: Sequence[Variable]) -> Callable[[], None]:
        """Copy the stored values of variables. Call the result to put them back."""
        kept = [(v, ops.copy(v._value)) for v in variables]  # `v.value` may be autocast

        def restore() -> None:
            for variable, value in kept:
                variable.assign(value)

        return restore

    def retype(self, variable: Variable, value: Tensor) -> Callable[[], None]:
        """Give a variable a value of another dtype. Call the result to put the old ones back."""
        before, old = variable._dtype, variable._value

        def assign(dtype: str, value: Tensor) -> None:
            variable._dtype = dtype
            variable._direct_assign(value)

        assign(keras.backend.standardize_dtype(value.dtype), value)
        return lambda: assign(before, old)

    @abc.abstractmethod
    def random_state(self) -> Callable[[], None]:
        """Copy the state of the backend's random generators. Call the result to put it back."""

    # ---- Replays of the debugging tools ----------------------------------------------------------

    @abc.abstractmethod
    def watch_gradient(self, x: Tensor, record: Callable[[Tensor], None]) -> Tensor:
        """Return `x`, and let the backward pass call `record` with its gradient.

        A gradient that is being traced is not recorded.
        """

    @abc.abstractmethod
    def gradients(
        self, loss: Callable[[], Tensor], variables: list[Variable]
    ) -> tuple[Tensor, list[Gradient]]:
        """Call `loss` eagerly. Return its value, and its gradient by each variable or None."""

    @abc.abstractmethod
    def is_concrete(self, x: Any) -> bool:
        """Tell whether a tensor holds numbers, rather than being traced."""

    def without_functions(self) -> contextlib.AbstractContextManager[None]:
        """Within, compile no function: it would keep traces of dtypes that are about to change."""
        return contextlib.nullcontext()

    # ---- Programs ------------------------------------------------------------------------------

    @abc.abstractmethod
    def operations(self, function: Callable[..., Any], inputs: Sequence[Tree]) -> list[Operation]:
        """List what a function computes, in the order in which it does; nothing is computed.

        Loops, conditions and compiled parts are looked into.

        Args:
            function: called as `function(note, *inputs)`; `note(x, label)` returns the tensor `x`,
                and marks this place of the program with the label. Anything else it returns as is.
            inputs: structures of symbolic tensors, as Keras has them while it calls symbolically.
        """

    # ---- Memory --------------------------------------------------------------------------------

    def compiled_bytes(
        self, model: Any, specs: list, loss: Callable[[list[Tensor]], Tensor]
    ) -> int | None:
        """Ask XLA for the working memory of the gradient of a loss.

        Args:
            model: the model that `loss` calls.
            specs: (shape, dtype) of each of its inputs.
            loss: takes the list of inputs; returns the loss.

        Returns:
            Bytes without arguments and results; None if no compiler tells.
        """
        return None

    planned_devices: tuple[str, ...] = ()  # the names that `planned_step` knows

    def planned_step(
        self, model: Any, x: Tree, y: Tree, device: Any = None
    ) -> PlannedProgram | None:
        """Compile one training step of `fit`, without running it.

        Args:
            model: compiled, and trained or built for training, so that all its variables exist.
            x: one batch, of which only shapes and dtypes count.
            y: its targets.
            device: the one to compile for, or its name; the default device if it is None.

        Returns:
            What XLA says of it; None if no compiler tells.
        """
        return None


class OneReplica:
    """Runs the parts of a step whose gradients are already the sum over all devices.

    `tensorflow/distribute.py` has subclasses for several replicas.

    Args:
        backend: the backend.
        knows_loss: whether a loss that is not finite is known, on whatever device it was computed.
            If not, only the gradients may move the scale, which all processes have in common.
    """

    def __init__(self, backend: Backend, knows_loss: bool = True):
        self.backend, self.knows_loss = backend, knows_loss

    def on_each(self, function: Callable, *args: Any) -> Any:
        """Call a function of gradients on each replica."""
        return function(*args)

    def local(self, gradients: list[Gradient]) -> list[Gradient]:
        """Return the gradients of the first replica in this process."""
        return gradients

    def loss_nonfinite(self, variable: Variable) -> Tensor:
        """Return float32[], above 0 if `record_loss_finite` has seen a loss that is not finite."""
        return ops.convert_to_tensor(variable)

    def update_if(
        self, applies: Tensor, inner: Any, gradients: list[Gradient], variables: list[Variable]
    ) -> None:
        """Call `Backend.update_if` on each replica, with gradients from `on_each`."""
        self.backend.update_if(applies, inner, gradients, variables)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift to the right; zeros come in from the left."""
    # Not `ops.bitwise_and`: where Keras's floatx is bfloat16, it makes a Python int a float on JAX.
    return ops.right_shift(x, by) & (2 ** (32 - by) - 1)


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x`, in float32 if it was half precision or a Python number."""
    if not hasattr(x, "dtype"):
        return ops.convert_to_tensor(x, "float32")
    dtype = keras.backend.standardize_dtype(x.dtype)
    return x if dtype in ("float32", "float64") else ops.cast(x, "float32")


def product(x: Any, factor: Tensor) -> Any:
    """Return one leaf of `Backend.multiply`."""
    if is_float(x):
        return ops.multiply(at_least_float32(x), factor)
    return ops.multiply(x, ops.cast(factor, x.dtype)) if is_complex(x) else x


def is_float(x: Any) -> bool:
    """Tell whether `x` is a float or a tensor, array or sparse gradient of floats."""
    # Every library writes "float" in the name of such a dtype, and in no other one's but JAX's
    # float0, with which nothing can be computed. (Keras's `standardize_dtype` takes ten calls on
    # PyTorch, and this is asked of each gradient.)
    return "float" in str(x.dtype) if hasattr(x, "dtype") else isinstance(x, float)


def is_complex(x: Any) -> bool:
    """Tell whether `x` is a tensor or array of complex numbers."""
    return hasattr(x, "dtype") and keras.backend.standardize_dtype(x.dtype).startswith("complex")


# Held while a method of a shared optimizer or variable is replaced: threads may trace at once.
replacing = threading.RLock()


@contextlib.contextmanager
def applying_by(optimizer: Any, apply_gradients: Callable[..., None]) -> Iterator[None]:
    """Within, a Keras optimizer's `apply` leaves the update to a function.

    Args:
        optimizer: the optimizer.
        apply_gradients: takes the gradients and the variables.
    """
    with replacing:
        optimizer._backend_apply_gradients = apply_gradients
        try:
            yield
        finally:
            del optimizer._backend_apply_gradients


def update(optimizer: Any, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> None:
    """Clip the gradients, decay the weights and update, as Keras does after accumulating."""
    clipped = optimizer._clip_gradients(list(gradients))
    optimizer._apply_weight_decay(variables)
    optimizer._backend_update_step(clipped, variables, optimizer.learning_rate)


def ends_window(optimizer: Any) -> Tensor:
    """Return bool[]: whether this micro-batch is the last of a window of accumulated ones."""
    return (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0


def accumulate(
    optimizer: Any,
    gradients: Sequence[Gradient],
    variables: Sequence[Variable],
    choose: Callable[[Callable[[], None], Callable[[], None]], None],
) -> None:
    """Add the gradients of a micro-batch to their accumulators, or update with the window's mean.

    Keras does the same with a conditional, for which XLA copies all parameters and slots, and which
    TensorFlow refuses where replicas synchronise.

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
