"""What `kmp.LossScaleOptimizer` may be built from."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from kmp import _backend
from kmp._backend.types import Variable
from kmp._common import is_number
from kmp.scaling import rules as scaling
from kmp.scaling.rules import DynamicLossScale, LossScale, NoOpLossScale


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


def make_inner(optimizer: Any, arguments: dict[str, Any]) -> Any:
    """Return the optimizer that `kmp.scaled` was given, as an instance."""
    if isinstance(optimizer, type):
        inner = optimizer(**arguments)
    elif isinstance(optimizer, str):
        inner = keras.optimizers.get({"class_name": optimizer, "config": arguments})
    elif arguments:
        raise ValueError(
            "Arguments of the optimizer go with its class or name. Received: an optimizer "
            f"{type(optimizer).__name__} that has its own, and {sorted(arguments)}. "
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


def checked_inner(optimizer: Any) -> Any:
    """Return the inner optimizer as an instance, or say why it cannot be one."""
    if isinstance(optimizer, type):
        raise ValueError(
            f"`inner_optimizer` must be an optimizer instance. Received the class "
            f"{optimizer.__name__}. Write kmp.scaled({optimizer.__name__}, ...) or pass "
            f"{optimizer.__name__}(...)."
        )
    optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(
            "`optimizer` must be a Keras optimizer: a class, an instance, a name or a config. "
            f"Received: {optimizer!r}. Write for example kmp.scaled(keras.optimizers.Adam)."
        )
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
    where = _float16_in(variables)
    if where and isinstance(rule, NoOpLossScale):
        warnings.warn(
            f"float16 without loss scaling ({where}): gradients below 6e-8 become zero. Write "
            'loss_scale="dynamic", or train in bfloat16, which needs no loss scaling.',
            stacklevel=3,
        )


def warn_of_unscaled_loss() -> None:
    """Warn that gradients arrive although nothing has scaled their loss."""
    warnings.warn(
        "Gradients are applied, but nothing has scaled their loss: they will be divided by a loss "
        "scale that they were not multiplied with, and the weights hardly move. In your "
        "train_step, write loss = self.optimizer.scale_loss(loss) before taking gradients; in a "
        "loop of your own in JAX, optimizer.stateless_scale_loss(optimizer_variables, loss). If "
        'nothing needs scaling, as in bfloat16, write kmp.scaled(..., loss_scale="none").',
        stacklevel=3,
    )


def refuse_float16_on_tpu(variables: Sequence[Variable]) -> None:
    """Raise ValueError where a TPU's compiler would give up later, and less clearly."""
    where = _float16_in(variables)
    if where and _backend.platform() == "tpu":
        raise ValueError(
            "A TPU computes in bfloat16 or float32: its compiler has no float16 matrix product. "
            f"Received: float16 in {where}. Write "
            'keras.config.set_dtype_policy("mixed_bfloat16") before building the model.'
        )


def _float16_in(variables: Sequence[Variable]) -> str | None:
    """Name what computes or is stored in float16, if anything that can be seen from here does."""
    for variable in variables:
        if variable.dtype == "float16":
            return variable.path
    policy = keras.config.dtype_policy()
    return f"the policy {policy.name!r}" if policy.compute_dtype == "float16" else None
