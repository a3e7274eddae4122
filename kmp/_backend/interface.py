"""What kmp asks of a backend: each function declared, typed and documented once.

The modules `jax`, `tensorflow` and `torch` have these functions, `default` what most of them share.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kmp._backend.one_device import Pieces
from kmp._backend.types import Device, DeviceMemory, Gradient, Tensor, Tree, Variable


class Backend(Protocol):
    """The functions of a backend, by what they are for."""

    # ---- Where it runs -------------------------------------------------------------------------

    def platform(self) -> str:
        """Where the training runs: "cpu", "gpu" or "tpu"."""

    def device(self) -> Device:
        """The first device of this process."""

    def device_memory(self) -> DeviceMemory | None:
        """Memory in use on the first device; resets its peak. None if the backend cannot tell."""

    def inside_xla(self) -> bool:
        """Whether XLA compiles what is being traced."""

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

    def pieces(self, layouts: Sequence[Any]) -> Pieces:
        """What each device holds of variables with these layouts; `WHOLE` if none is split."""

    def compiled(self, function: Callable, static: Sequence[int] = ()) -> Callable:
        """`function` as one program on JAX, itself elsewhere; `static`: places of non-tensors."""

    def writes_logs(self, model: Any) -> bool:
        """Whether this process is the one that writes event files for the model."""

    # ---- Gradients: dense tensors, or `tf.IndexedSlices` ----------------------------------------

    def gradient_values(self, gradient: Gradient) -> Tensor:
        """The numbers of a gradient, as they come."""

    def gradient_rows(self, gradient: Gradient) -> Tensor:
        """The numbers of a gradient; rows of a sparse one that share an index are summed."""

    def dense(self, gradient: Gradient) -> Tensor:
        """A gradient as a tensor of its variable's shape."""

    def gradient_sample(self, gradient: Gradient, strides: Sequence[int], target: str) -> Tensor:
        """A strided slice of a gradient, one stride per axis; zeros where a sparse one has no row.

        Args:
            gradient: what is sampled.
            strides: one for each axis.
            target: from `per_target`.
        """

    def map_gradient_values(
        self, function: Callable[[Tensor], Tensor], gradient: Gradient
    ) -> Gradient:
        """Apply an elementwise function to the numbers of a gradient; sparse stays sparse."""

    def multiply(self, leaves: Sequence[Any], factor: Tensor) -> Sequence[Any]:
        """Float leaves, cast to at least float32, and complex ones times a scalar; others as is."""

    def are_dense(self, gradients: Sequence[Gradient]) -> list[bool]:
        """Whether each gradient is a tensor, and no `tf.IndexedSlices`."""

    def are_finite(self, tensors: Sequence[Tensor]) -> Tensor:
        """bool[n]: whether each of n >= 1 float tensors, none of them empty, is all finite."""

    def reduce_columns(
        self, columns: tuple[Tensor, ...], axes: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """The maximum of the second column and the sums of the others, over some axes.

        Inside XLA one reduction: each gradient is read once, and no column is ever in memory.
        """

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over the replicas, where each replica computes a part of it."""

    # ---- The step ------------------------------------------------------------------------------

    def flags(
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

    def after(self, finite: Tensor, sample: Tensor) -> Tensor:
        """`finite`, with a dependency on `sample`, so that XLA samples before it updates."""

    def compute_if(self, pred: Tensor, compute: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
        """`compute()` if `pred`, else `otherwise`; neither writes anything."""

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
            inner, loss_nonfinite: the optimizer that updates them; what `note_loss` was given.

        Raises:
            ValueError: on TensorFlow, in the cross-replica context of a strategy.
        """

    def note_loss(self, variable: Variable, is_finite: Callable[[], Tensor]) -> None:
        """Record whether a loss is finite, with replicas that of each. Does nothing on JAX."""

    # ---- Keras's training loop -------------------------------------------------------------------

    BaseView: Any  # the class of what stands in the place of a `keras.Variable` in an optimizer
    SEES_LOSS: bool  # whether `note_loss` knows of a loss that is not finite before the step
    END_OF_DATA: tuple[type[Exception], ...]  # what a train function raises when the data ends

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

    def kept_values(self, variables: Sequence[Variable]) -> list[Tensor]:
        """The present values of variables, which later assignments do not change."""

    def keep_old_unless(
        self, applied: Tensor, variables: Sequence[Variable], old: Sequence[Tensor]
    ) -> None:
        """Give each variable its old value back unless `applied`, a bool[]."""

    def settle(self, model: Any) -> None:
        """Write the state that the loop of `fit` holds into the variables of the model."""

    # ---- Layers --------------------------------------------------------------------------------

    def matmul_float32(self, x: Tensor, kernel: Tensor) -> Tensor:
        """`x @ kernel` of two half matrices, accumulated and returned in float32."""

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

    def sum_along(self, x: Tensor, axis: int) -> Tensor:
        """The sum over all axes but `axis`, as size 1, right to a few units in the last place."""

    # ---- Host and device -----------------------------------------------------------------------

    def constant(self, values: Any) -> Tensor:
        """A NumPy array or scalar as a tensor."""

    def segment_sum(self, values: Tensor, keys: Tensor, number: int) -> Tensor:
        """float32[number]: the sum of the values of each key."""

    def bitcast(self, x: Tensor, dtype: str) -> Tensor:
        """The bits of `x` read as another dtype of its width, as `keras.ops.view` of 3.12 does."""

    def hash_bits(self, x: Tensor) -> Tensor:
        """A bijection of int32[...] whose result looks random: the finalizer of MurmurHash3."""

    def read(self, model: Any, variables: list[Variable], each: bool = False) -> list[Tensor]:
        """The present values of variables of `model`, its optimizer or its metrics.

        `model` is None in a step. In `fit` on JAX they live in the loop, which a read of a variable
        would end. `each` stacks those of TensorFlow's replicas; otherwise it is the first one's.
        """

    def to_host(self, x: Any) -> Any:
        """A copy of a tensor or variable on the host, for `from_host`."""

    def from_host(self, variable: Variable, value: Any) -> None:
        """Assign what `to_host` returned for this variable, or for a value of it."""

    def preserved(self, variable: Variable) -> Callable[[], None]:
        """Keep the value of a variable as stored; call the result to put it back."""

    def retype(self, variable: Variable, value: Tensor) -> Callable[[], None]:
        """Give a variable a value of another dtype; call the result to put both back."""

    def random_state(self) -> Callable[[], None]:
        """Keep the state of the backend's random generators; call the result to put it back."""

    # ---- Replays of the debugging tools ----------------------------------------------------------

    def watch_gradient(self, x: Tensor, record: Callable[[Tensor], None]) -> Tensor:
        """`x`, whose gradient is handed to `record` on its way back, unless it is being traced."""

    def gradients(
        self, loss: Callable[[], Tensor], variables: list[Variable]
    ) -> tuple[Tensor, list[Gradient]]:
        """Call `loss` eagerly; return its value and its gradients."""

    def is_concrete(self, x: Any) -> bool:
        """Whether `x` holds numbers, which a tensor that is being traced does not."""

    def without_functions(self) -> AbstractContextManager[None]:
        """Within, no function is compiled: it would keep traces of the dtypes it is run with."""

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

    def compiled_step_bytes(self, model: Any, x: Tree, y: Tree) -> int | None:
        """The most that XLA says one compiled training step of `fit` holds.

        Args:
            model: compiled, and trained for at least one step, so that all variables are there.
            x: one batch, of arrays; they are not computed with.
            y: its targets.

        Returns:
            Bytes of arguments, results and working memory; None if no compiler says.
        """
