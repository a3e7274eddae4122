"""What a replay in the debugging tools asks of PyTorch."""

from collections.abc import Callable
from typing import Any

import torch

from kmp._backend.types import Gradient, Tensor, Variable


def watch_gradient(x: Tensor, record: Callable[[Tensor], None]) -> Tensor:
    """`x`, whose gradient is handed to `record` on its way back."""
    if not x.requires_grad:
        return x
    watched = x.view_as(x)  # of its own, or the gradients of all users of `x` would be one sum
    watched.register_hook(record)
    return watched


def gradients(
    loss: Callable[[], Tensor], variables: list[Variable]
) -> tuple[Tensor, list[Gradient]]:
    """Call `loss`; return its value and its gradients, without touching `.grad`."""
    value = loss()
    values = [v.value for v in variables]
    if not values or not value.requires_grad:
        return value.detach(), [None for _ in values]  # what torch would raise an error for
    return value.detach(), list(torch.autograd.grad(value, values, allow_unused=True))


def is_concrete(x: Any) -> bool:
    """True: what this backend runs eagerly always holds numbers."""
    return True


def random_state() -> Callable[[], None]:
    """Keep the state of the random generators; call the result to put it back."""
    host = torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore():
        torch.set_rng_state(host)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return restore
