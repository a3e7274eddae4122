"""The PyTorch side of `kmp._backend`."""

import math
from collections.abc import Callable, Sequence

import torch
from keras import ops

from kmp._backend.types import Device, DeviceMemory, Tensor, Variable


def matmul_float32(x: Tensor, kernel: Tensor) -> Tensor:
    """`x @ kernel` of two half matrices, accumulated and returned in float32.

    Only CUDA has such a product: elsewhere the operands are cast up, which gives the same numbers.
    """
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, kernel, out_dtype=torch.float32)
    return ops.matmul(ops.cast(x, "float32"), ops.cast(kernel, "float32"))


def multiply(gradients: Sequence[Tensor], factor: Tensor) -> Sequence[Tensor]:
    """Each gradient, of float32 or wider, times a scalar; on GPUs in a kernel for many."""
    tensors, factor = [ops.convert_to_tensor(x) for x in gradients], ops.convert_to_tensor(factor)
    # torch.func's transformations, of which vmap gives gradients by example, know no foreach.
    if not tensors or torch._C._are_functorch_transforms_active():
        return [x * factor for x in tensors]
    return torch._foreach_mul(tensors, factor)


def are_finite(tensors: Sequence[Tensor], by_row: Sequence[bool]) -> Tensor:
    """Whether all numbers of each tensor, or of each of its rows, are finite.

    By their extremes, in which torch keeps NaN: each number is read once, and nothing is written.
    `torch.isfinite` is four operations that write, and took 30 times as long on a CPU. On GPUs the
    extremes of many tensors are one kernel.

    Args:
        tensors: of floats; at least one, and none is empty.
        by_row: for each, whether it is a matrix whose rows are asked for one by one.

    Returns:
        bool[n], one for each tensor or row, in their order.
    """
    # (Of float8 torch has next to no operators.)
    tensors = [x if x.element_size() > 1 else x.float() for x in tensors]
    pairs = list(zip(tensors, by_row, strict=True))
    return (_norms_are_finite if tensors[0].is_cuda else _extremes_are_finite)(pairs)


def _norms_are_finite(pairs: Sequence[tuple[Tensor, bool]]) -> Tensor:
    every = [row for x, rows in pairs for row in (x.unbind() if rows else (x,))]
    return torch.stack(torch._foreach_norm(every, math.inf)).isfinite()


def _extremes_are_finite(pairs: Sequence[tuple[Tensor, bool]]) -> Tensor:
    extremes = [x.aminmax(dim=1) if rows else x.aminmax() for x, rows in pairs]
    every = [x.reshape(-1) for both in zip(*extremes, strict=True) for x in both]
    return torch.cat(every).isfinite().reshape(2, -1).all(dim=0)


def verdict(
    number: Tensor, loss_nonfinite: Tensor, due: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The flags that everybody acts on: whether int32[] is 0, whether float32[] is, ...

    With `torch.distributed` initialised, whether they are in every process. All come to the host
    in one go, the one synchronisation of the step, as in PyTorch's own.
    """
    totals = torch.stack([number.to(torch.float32), loss_nonfinite])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(totals, op=torch.distributed.ReduceOp.SUM)
    flags = torch.cat([totals == 0] if due is None else [totals == 0, due]).cpu()
    return flags[0], flags[1], None if due is None else flags[2:]


def note_loss(variable: Variable, nonfinite: Tensor) -> None:
    """Remember until the next step that a loss was not finite."""
    with torch.no_grad():
        variable.assign(torch.maximum(variable.value, nonfinite.to(torch.float32)))


def compute_if(pred: Tensor, compute: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
    """`compute()` if `pred`, which is on the host already, else `otherwise`."""
    return compute() if bool(pred) else otherwise


def apply_if(finite: Tensor, update: Callable[[], None], variables: list[Variable]) -> None:
    """Run `update` if `finite`, which `verdict` has brought to the host."""
    if bool(finite):
        update()


def kept_values(variables: Sequence[Variable]) -> list[Tensor]:
    """Copies of the present values of variables, which torch assigns in place."""
    return [v.value.detach().clone() for v in variables]


def platform() -> str:
    """Where the training runs: "cpu" or "gpu"; Keras knows no TPU on torch."""
    return "gpu" if torch.cuda.is_available() else "cpu"


def device() -> Device:
    """The first device of this process."""
    if not torch.cuda.is_available():
        return Device(platform(), platform().upper(), None)
    nvidia = torch.version.hip is None
    capability = torch.cuda.get_device_capability() if nvidia else None
    return Device("gpu", torch.cuda.get_device_name(), capability)


def device_memory() -> DeviceMemory | None:
    """What the first device's tensors take; begins a new peak. None on CPUs, which do not count."""
    if not torch.cuda.is_available():
        return None
    memory = DeviceMemory(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return memory


class _CustomGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, forward, backward, *inputs):
        outputs = tuple(forward(*inputs))
        ctx.gradients_of, ctx.num_inputs = backward, len(inputs)
        ctx.save_for_backward(*inputs, *outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        inputs, kept = ctx.saved_tensors[: ctx.num_inputs], ctx.saved_tensors[ctx.num_inputs :]
        return None, None, *ctx.gradients_of(inputs, kept, gradients)


def custom_gradient(
    forward: Callable[..., Sequence[Tensor]],
    backward: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor],
) -> Sequence[Tensor]:
    """`forward(*inputs)`, differentiated by `backward`.

    Args:
        forward: returns a tuple of tensors; all but the first are kept for the backward pass.
        backward: from the inputs, what was kept and the gradients of all of the tensors, those of
            the inputs: one each, or None.
        inputs: tensors, kept for the backward pass.
    """
    return _CustomGradient.apply(forward, backward, *inputs)
