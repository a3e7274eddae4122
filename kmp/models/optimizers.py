"""The optimizers of a model, and whether they scale the loss."""

import dataclasses
from typing import Any

from keras import Model, ops

from kmp._backend.types import Tensor
from kmp._common import warn
from kmp._keras import layers_of, replace_optimizer
from kmp._keras.optimizer import (
    chooses_by_function,
    inner_optimizer_of,
    is_loss_scale_optimizer,
    optimizers_of,
    steps_of,
    trainable_variables_of,
)
from kmp._keras.updates import excluded_from_weight_decay
from kmp.half_memory import Float32View, exact_weights, numbers_of
from kmp.precision.policy import Policy
from kmp.precision.trees import HALF_DTYPES, half_dtype
from kmp.scaling.arguments import scales
from kmp.scaling.optimizer import LossScaleOptimizer


def scales_the_loss(optimizer: Any) -> bool:
    """Whether an optimizer multiplies the loss, by a scale that it finds or by a fixed one."""
    if is_loss_scale_optimizer(optimizer):
        if scales(getattr(optimizer, "loss_scale", None)):  # Keras's has none
            return True
        optimizer = optimizer.inner_optimizer
    return optimizer.loss_scale_factor is not None


def compiled_models(model: Any) -> dict[str, Any]:
    """A model and the models in it that have optimizers of their own.

    Such as the discriminator of a GAN that is compiled beside the model of both. By what stands
    before the names of their attributes: "" for the model itself, else the nested model's name.
    """
    nested = [x for x in layers_of(model) if x is not model and isinstance(x, Model)]
    return {"": model} | {f"{x.name}.": x for x in nested if optimizers_of(x)}


def scale_losses(model: Any, policy: Policy, prefix: str = "") -> str:
    """Wrap the optimizer of a compiled model where float16 needs it, and say what was done.

    Other optimizers stay as they are: only the author of the train step can scale their losses.
    What is said begins with the prefix, the name of a nested model.
    """
    half = half_dtype() if policy.adapts else policy.compute_dtype
    said = []
    for name, optimizer in optimizers_of(model).items() if half == "float16" else ():
        kind = type(optimizer).__name__
        is_wrapped = is_loss_scale_optimizer(optimizer)
        if scales_the_loss(optimizer):
            continue
        if is_wrapped:  # the optimizer itself cannot look into the layers
            said.append(
                f"{prefix}{name} does not scale the loss: float16 loses gradients below 6e-8."
            )
            warn(f"{said[-1]} Compile with kmp.scaled(..., loss_scale='dynamic').")
            continue
        if name != "optimizer":
            said.append(
                f"{prefix}{name} ({kind}) does not scale the loss. Write "
                f"{name}=kmp.scaled({kind}, ...), and {name}.scale_loss(loss) in train_step, on "
                f"JAX {name}.stateless_scale_loss(its variables, loss)."
            )
            continue
        scaled = LossScaleOptimizer(optimizer)
        if optimizer.built:
            scaled.build(trainable_variables_of(optimizer))
        replace_optimizer(model, scaled)
        said.append(f"{prefix}{kind} was wrapped in kmp.LossScaleOptimizer, with its state.")
    return "\n".join(said)


class Rebuilding:
    """Optimizers for weights whose dtype changes, with the state of those that a model has.

    Make it before the dtypes change, and call it afterwards.

    Args:
        model: compiled or not.
        policy: the one that the model is converted to. If it has parameters in half precision,
            optimizers that kmp has not wrapped are wrapped.
        prefix: the name of a nested model, with which what is said begins.

    Attributes:
        exact: float32 values of the weights that have remainders or masters, or will have, by
            their ids.

    Raises:
        ValueError: if one that has state cannot be made anew. The model stays as it was.
    """

    def __init__(self, model: Any, policy: Policy, prefix: str = ""):
        self._model, self._policy, self._prefix = model, policy, prefix
        self._optimizers = optimizers_of(model)
        built = {name: x for name, x in self._optimizers.items() if x.built}
        self._anew = {name: _made_anew(inner_optimizer_of(x)) for name, x in built.items()}
        # On TensorFlow a variable is another one, to its optimizer, once its dtype has changed.
        self._excluded = {
            name: [excluded_from_weight_decay(each) for each in _with_parts(x)]
            for name, x in built.items()
        }
        self.exact: dict[int, Tensor] = {}
        for optimizer in built.values():
            self.exact |= _exact_weights(optimizer)

    def __call__(self) -> str:
        """Give the model its new optimizers; say what was done."""
        said = []
        for name, optimizer in self._optimizers.items():
            kind = self._prefix + type(inner_optimizer_of(optimizer)).__name__
            new = self._like(name, optimizer)
            if optimizer.built:
                new.build(trainable_variables_of(inner_optimizer_of(optimizer)))
                _copy_state(optimizer, new, self.exact)
                said.append(f"{kind} was rebuilt for the dtypes of the weights, with its state.")
            if isinstance(new, LossScaleOptimizer) > isinstance(optimizer, LossScaleOptimizer):
                said.append(f"{kind} was wrapped in kmp.LossScaleOptimizer: updates in float32.")
            if name == "optimizer":
                replace_optimizer(self._model, new)
            else:
                setattr(self._model, name, new)
        return "\n".join(said)

    def _like(self, name: str, optimizer: Any) -> Any:
        """An optimizer like the given one, not built, and in kmp's if half weights need that."""
        inner, by_kmp = inner_optimizer_of(optimizer), isinstance(optimizer, LossScaleOptimizer)
        half = self._policy.param_dtype in HALF_DTYPES
        if not optimizer.built and (by_kmp or not half):
            return optimizer
        if optimizer.built:
            inner = self._anew[name]
            for each, which in zip(_with_parts(inner), self._excluded[name], strict=True):
                each.exclude_from_weight_decay(**which)
        if by_kmp:
            return _with_inner(optimizer, inner)
        if is_loss_scale_optimizer(optimizer):  # Keras's own
            return LossScaleOptimizer(
                inner, optimizer.initial_scale, optimizer.dynamic_growth_steps
            )
        if not half:
            return inner
        # Nobody else is known to scale the loss of an optimizer that `compile` was not given.
        scales = name == "optimizer" and self._policy.compute_dtype == "float16"
        return LossScaleOptimizer(inner, loss_scale="dynamic" if scales else "none")


def _made_anew(inner: Any) -> Any:
    """A new optimizer of the same settings."""
    needed = "The optimizer has state, and must be made anew for weights of another dtype"
    if chooses_by_function(inner):  # which may return the old parts
        raise ValueError(
            f"{needed}. Received: {inner!r}, whose parts a function chooses. Choose them by a "
            "keras.optimizers.OptimizerMap instead, or convert the model before it trains."
        )
    try:
        return type(inner).from_config(inner.get_config())
    except Exception as error:
        raise ValueError(
            f"{needed}, from its config. Received: {inner!r}, which fails with "
            f"{type(error).__name__}: {error} Give it a get_config() that its constructor takes, "
            "or convert the model before it trains."
        ) from error


def _with_parts(optimizer: Any) -> list[Any]:
    """The bare optimizer, and those in it if it is a `keras.optimizers.MultiOptimizer`."""
    inner = inner_optimizer_of(optimizer)
    return [inner, *getattr(inner, "optimizers", ())]


def _exact_weights(optimizer: Any) -> dict[int, Tensor]:
    """The float32 values of weights for which a built optimizer keeps float32, or will keep it."""
    if not (isinstance(optimizer, LossScaleOptimizer) and optimizer.half_memory.master_weights):
        return {}
    inner = optimizer.inner_optimizer
    weights = trainable_variables_of(inner)
    copies = {id(v): ops.copy(ops.cast(v, "float32")) for v in weights}  # PyTorch's change in place
    return copies | exact_weights(optimizer.stored)


def _with_inner(optimizer: LossScaleOptimizer, inner: Any) -> LossScaleOptimizer:
    """A LossScaleOptimizer with the settings of another, around `inner`."""
    new = type(optimizer)(
        inner,
        name=optimizer.name,
        loss_scale=optimizer.loss_scale,
        on_overflow=optimizer.on_overflow,
        measure_gradients=optimizer.measure_gradients,
        spikes=optimizer.spikes,
        **dataclasses.asdict(optimizer.half_memory),
    )
    new.measures_details = optimizer.measures_details
    new.scale_was_read = optimizer.scale_was_read
    new.step_scales_loss = optimizer.step_scales_loss
    return new


def _copy_state(old: Any, new: Any, exact: dict[int, Tensor]) -> None:
    """Assign the state of one optimizer to another, which has slots of other dtypes, or masters."""
    inner, fresh = inner_optimizer_of(old), inner_optimizer_of(new)
    was, becomes = (getattr(x, "stored", None) for x in (old, new))
    sources, targets = numbers_of(inner, was), numbers_of(fresh, becomes)
    for source, target in zip(sources, targets, strict=True):
        if isinstance(target, Float32View):
            target.restore(ops.cast(source, "float32"))
        else:
            target.assign(ops.cast(source, target.dtype))
    for view in becomes.weights.values() if becomes else ():
        view.restore(exact[id(view.variable)])
    if new is fresh:
        return
    if isinstance(old, LossScaleOptimizer):
        own = {v.name: v for v in old.own_variables}
        for target in new.own_variables:
            if target.name in own:
                target.assign(own[target.name])
    else:
        new.steps.assign(ops.copy(steps_of(inner)))  # on JAX the inner one has that buffer now
        if is_loss_scale_optimizer(old):
            new.scale_variable.assign(ops.copy(old.dynamic_scale))
            new.step_counter.assign(ops.copy(old.step_counter))
