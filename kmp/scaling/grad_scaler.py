"""The loss scale's state in the terms of `torch.amp.GradScaler`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kmp._common import number, scale_number, whole_number
from kmp.scaling.rules import DynamicLossScale

_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def grad_scaler_state(optimizer: Any) -> dict[str, Any]:
    """Return the loss scale's state as `torch.amp.GradScaler.state_dict()` gives it."""
    rule = optimizer.loss_scale
    return {
        "scale": float(optimizer.scale_variable.numpy()),
        "growth_factor": getattr(rule, "growth_factor", 1.0),
        "backoff_factor": getattr(rule, "backoff_factor", 1.0),
        "growth_interval": getattr(rule, "growth_interval", 2**31 - 1),
        "_growth_tracker": _growth_tracker(optimizer),
    }


def load_grad_scaler_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Take over scale, counter and rule from a GradScaler's dictionary; see `grad_scaler_state`."""
    if not isinstance(state, Mapping) or set(state) != set(_KEYS):
        raise ValueError(
            f"`state` must be a dictionary with the keys {_KEYS}, as "
            "torch.amp.GradScaler.state_dict() returns it. Received: "
            f"{sorted(state) if isinstance(state, Mapping) else type(state).__name__}."
        )
    if not isinstance(optimizer.loss_scale, DynamicLossScale) or not optimizer.built:
        raise ValueError(
            "A GradScaler's state goes into a built optimizer with a dynamic loss scale. Received: "
            f"built={optimizer.built}, loss_scale={optimizer.loss_scale}. Write "
            'kmp.scaled(..., loss_scale="dynamic") and optimizer.build(model.trainable_variables).'
        )
    scale = scale_number("scale", state["scale"], "the GradScaler state")
    tracker = number("_growth_tracker", state["_growth_tracker"], "the GradScaler state")
    tracker = whole_number("_growth_tracker + 1", tracker + 1, "the GradScaler state") - 1
    optimizer.loss_scale = dataclasses.replace(
        optimizer.loss_scale,
        growth_factor=state["growth_factor"],
        backoff_factor=state["backoff_factor"],
        growth_interval=state["growth_interval"],
        min_scale=min(optimizer.loss_scale.min_scale, scale),
        max_scale=max(optimizer.loss_scale.max_scale, scale),
    )
    optimizer.scale_variable.assign(scale)
    optimizer.step_counter.assign(tracker)


def _growth_tracker(optimizer: Any) -> int:
    """Finite steps in a row; AmaxLossScale counts others."""
    is_dynamic = type(optimizer.loss_scale) is DynamicLossScale
    return int(optimizer.step_counter.numpy()) if is_dynamic else 0
