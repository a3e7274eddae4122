"""What a replay in the debugging tools asks of PyTorch."""

from collections.abc import Callable
from typing import Any

import torch

from kmp._backend.types import Gradient, Tensor, Variable


def watch_gradient(x: Tensor, record: Callable[[Tensor], None]) -> Tensor:
    if not x.requires_grad:
        return x
    watched = x.view_as(x)  # of its own, or the gradients of all users of `x` would be one sum
    watched.register_hook(record)
    return watched


def gradients(
    loss: Callable[[], Tensor], variables: list[Variable]
) -> tuple[Tensor, list[Gradient]]:
    # Without touching `.grad`.
    value = loss()
    values = [v.value for v in variables]
    if not values or not value.requires_grad:
        return value.detach(), [None for _ in values]  # what torch would raise an error for
    return value.detach(), list(torch.autograd.grad(value, values, allow_unused=True))


def is_concrete(x: Any) -> bool:
    return True


def random_state() -> Callable[[], None]:
    host = torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore():
        torch.set_rng_state(host)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return restore
