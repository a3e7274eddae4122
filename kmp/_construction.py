"""What `kmp.LossScaleOptimizer` may be built from."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from kmp import scaling
from kmp._arguments import is_number
from kmp._types import Variable
from kmp.scaling import DynamicLossScale, LossScale, NoOpLossScale


def choose_rule(loss_scale: Any, initial_scale: Any, growth_interval: Any) -> LossScale:
    """Return the strategy that kmp's argument or Keras's two describe."""
    given = {"initial_scale": initial_scale, "growth_interval": growth_interval}
    given = {name: value for name, value in given.items() if value is not None}
    if loss_scale is not None:
        if given:
            raise ValueError(
                "Pass either `loss_scale` or Keras's `initial_scale` and `dynamic_growth_steps`. "
                f"Received: loss_scale={loss_scale!r} and {given}. Write "
                "loss_scale=kmp.DynamicLossScale(initial_scale=..., growth_interval=...)."
            )
        return scaling.get(loss_scale)
    if is_number(initial_scale):  # Keras's argument knows no bounds: it moves them
        given["min_scale"] = min(DynamicLossScale.min_scale, initial_scale)
        given["max_scale"] = max(DynamicLossScale.max_scale, initial_scale)
    return DynamicLossScale(**given)


def checked_inner(optimizer: Any) -> Any:
    """Return the inner optimizer as an instance, or say why it cannot be one."""
    if isinstance(optimizer, type):
        raise ValueError(
            f"`inner_optimizer` must be an optimizer instance. Received the class "
            f"{optimizer.__name__}. Write kmp.scaled({optimizer.__name__}, ...) or pass "
            f"{optimizer.__name__}(...)."
        )
    optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`inner_optimizer` must not scale the loss itself: two scales would divide the "
            f"learning rate. Received: {type(optimizer).__name__} around "
            f"{type(optimizer.inner_optimizer).__name__}. Pass its `inner_optimizer` instead."
        )
    if type(optimizer).scale_loss is not keras.optimizers.Optimizer.scale_loss:
        raise ValueError(
            "`inner_optimizer` must not scale the loss itself: two scales would divide the "
            f"learning rate. Received: {type(optimizer).__name__}, which overrides `scale_loss`. "
            "Pass an optimizer without it, or compile with that optimizer alone."
        )
    return optimizer


def checked_choice(name: str, value: str, choices: Sequence[str]) -> str:
    """Return `value` if it is one of `choices`."""
    if value not in choices:
        raise ValueError(
            f"`{name}` must be one of {tuple(choices)}. Received: {name}={value!r}. "
            f"Write {name}={choices[0]!r}, the default."
        )
    return value


def portable_config(optimizer: Any) -> dict[str, Any]:
    """Return the serialised optimizer in names that every backend knows.

    On torch Keras replaces its optimizers by implementations of its own that no other backend can
    run, and serialises those.
    """
    config = keras.saving.serialize_keras_object(optimizer)
    if config["module"].startswith("keras.src.backend."):
        config = {**config, "module": "keras.optimizers", "registered_name": None}
    return config


def warn_of_unscaled_float16(rule: LossScale, variables: Sequence[Variable]) -> None:
    """Warn if float16 is going to be trained without a scale: small gradients vanish silently."""
    if not isinstance(rule, NoOpLossScale):
        return
    policy = keras.config.dtype_policy()
    half_variables = [v.path for v in variables if v.dtype == "float16"]
    if policy.compute_dtype == "float16" or half_variables:
        where = f"the policy {policy.name!r}" if not half_variables else half_variables[0]
        warnings.warn(
            f"float16 without loss scaling ({where}): gradients below 6e-8 become zero. Write "
            'loss_scale="dynamic", or train in bfloat16, which needs no loss scaling.',
            stacklevel=3,
        )
