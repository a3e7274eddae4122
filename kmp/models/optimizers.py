"""The optimizers of a model, and whether they scale the loss."""

from typing import Any

import keras

from kmp._keras import replace_optimizer
from kmp.precision.policy import Policy
from kmp.precision.trees import half_dtype
from kmp.scaling.optimizer import LossScaleOptimizer
from kmp.scaling.rules import NoOpLossScale


def optimizers_of(model: Any) -> dict[str, keras.optimizers.Optimizer]:
    """The optimizers of a model by the names of their attributes.

    That of `compile` is `"optimizer"`. It is left out where `compile` took its default, RMSprop,
    and the model has others, as of a GAN: then its train step uses the others.
    """
    compiled = getattr(model, "optimizer", None)
    attributes = {name: x for name, x in vars(model).items() if x is not compiled}
    own = {k: x for k, x in attributes.items() if isinstance(x, keras.optimizers.Optimizer)}
    if compiled is None or (own and _is_default(compiled)):
        return own
    return {"optimizer": compiled, **own}


def _is_default(optimizer: Any) -> bool:
    """Whether an optimizer is as `compile` makes it by default, or Keras has wrapped that one."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(optimizer, keras.optimizers.RMSprop):  # on PyTorch a subclass of it
        return False
    alike = keras.optimizers.RMSprop(name=optimizer.name)
    return optimizer.get_config() == alike.get_config()


def scales_the_loss(optimizer: Any) -> bool:
    """Whether an optimizer multiplies the loss, by a scale that it finds or by a fixed one."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if not isinstance(getattr(optimizer, "loss_scale", None), NoOpLossScale):
            return True
        optimizer = optimizer.inner_optimizer
    return optimizer.loss_scale_factor is not None


def scale_losses(model: Any, policy: Policy) -> str:
    """Wrap the optimizer of a compiled model where float16 needs it, and say what was done.

    Other optimizers stay as they are: only the author of the train step can scale their losses.
    """
    half = half_dtype() if policy.adapts else policy.compute_dtype
    said = []
    for name, optimizer in optimizers_of(model).items() if half == "float16" else ():
        kind = type(optimizer).__name__
        is_wrapped = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if is_wrapped or scales_the_loss(optimizer):
            continue
        if name != "optimizer":
            said.append(
                f"{name} ({kind}) does not scale the loss. Write {name}=kmp.scaled({kind}, ...), "
                f"and {name}.scale_loss(loss) in train_step."
            )
            continue
        scaled = LossScaleOptimizer(optimizer)
        if optimizer.built:
            scaled.build(model.trainable_variables)
        replace_optimizer(model, scaled)
        said.append(f"{kind} was wrapped in kmp.LossScaleOptimizer, with its state.")
    return "\n".join(said)
