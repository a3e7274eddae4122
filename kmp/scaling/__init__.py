"""Loss scaling: the rules, the optimizer that applies them, and its state in files."""

from typing import Any

import keras

from kmp._keras.optimizer import plain_name_of
from kmp.health.spikes import SkipSpikes
from kmp.precision.trees import all_finite, max_abs, select_tree
from kmp.scaling import rules
from kmp.scaling.amax import AmaxLossScale
from kmp.scaling.optimizer import LossScaleOptimizer
from kmp.scaling.rules import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    ScaleState,
    StaticLossScale,
)

__all__ = [
    "AmaxLossScale",
    "DynamicLossScale",
    "LossScale",
    "LossScaleOptimizer",
    "NoOpLossScale",
    "ScaleState",
    "SkipSpikes",
    "StaticLossScale",
    "all_finite",
    "max_abs",
    "scaled",
    "select_tree",
]


def scaled(
    optimizer: Any,
    loss_scale: Any = "dynamic",
    *,
    on_overflow: str = "drop_micro_batch",
    rounding: str = "stochastic",
    slot_dtype: str | None = None,
    master_weights: bool | int = False,
    spikes: Any = None,
    **optimizer_arguments: Any,
) -> LossScaleOptimizer:
    """Wrap an optimizer in loss scaling, ready for `model.compile`.

    Args:
        optimizer: a `keras.optimizers.Optimizer` class, instance, name or config.
        loss_scale: `"dynamic"`, `"none"`, a positive number (static), or a strategy such as
            `kmp.DynamicLossScale(growth_interval=500)`.
        on_overflow, rounding, slot_dtype, master_weights, spikes: see `kmp.LossScaleOptimizer`.
        **optimizer_arguments: what the optimizer's constructor takes, with a class or a name.

    Returns:
        `kmp.LossScaleOptimizer`.

    Raises:
        ValueError: if the optimizer scales losses itself, if `loss_scale` names no strategy, or if
            you pass `optimizer_arguments` with an instance or a config.

    Example:

    >>> optimizer = scaled("sgd", learning_rate=0.5, momentum=0.9)
    >>> optimizer.inner_optimizer.momentum
    0.9
    """
    return LossScaleOptimizer(
        _make_inner(optimizer, optimizer_arguments),
        loss_scale=rules.get(loss_scale),  # refuses None, which may mean "dynamic" or "none"
        on_overflow=on_overflow,
        rounding=rounding,
        slot_dtype=slot_dtype,
        master_weights=master_weights,
        spikes=spikes,
    )


def _named(name: str, arguments: dict[str, Any]) -> Any:
    """Return the optimizer that Keras knows by this name."""
    known = {each.lower() for each in vars(keras.optimizers)}
    if name.lower() not in known and not keras.saving.get_registered_object(name):
        raise ValueError(
            "`optimizer` must be a Keras optimizer, its class or its name. Received: "
            f"optimizer={name!r}, a name that Keras does not know. Write for example "
            'kmp.scaled("adam"), or pass the class.'
        )
    return keras.optimizers.get({"class_name": name, "config": arguments})


def _make_inner(optimizer: Any, arguments: dict[str, Any]) -> Any:
    """Return the optimizer that `kmp.scaled` was given, as an instance."""
    if isinstance(optimizer, (type, str)) and (name := plain_name_of(optimizer)):
        # Keras would number the name, and an Orbax checkpoint would not restore the optimizer.
        arguments = {"name": name, **arguments}
    if isinstance(optimizer, type):
        inner = optimizer(**arguments)
    elif isinstance(optimizer, str):
        inner = _named(optimizer, arguments)
    elif arguments:
        raise ValueError(
            "Pass optimizer arguments only with a class or a name. Received: an instance of "
            f"{type(optimizer).__name__}, and {sorted(arguments)}. "
            "Write kmp.scaled(keras.optimizers.Adam, learning_rate=1e-3), or set them on the "
            "instance."
        )
    else:
        inner = keras.optimizers.get(optimizer)
    if getattr(inner, "loss_scale_factor", None) is not None:
        raise ValueError(
            "`optimizer` must not scale the loss itself. Received: "
            f"loss_scale_factor={inner.loss_scale_factor}. Leave loss_scale_factor out and write "
            f"kmp.scaled({type(inner).__name__}, loss_scale={inner.loss_scale_factor}, ...)."
        )
    return inner
