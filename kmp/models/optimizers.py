"""The optimizers of a model, and whether they scale the loss."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from kmp._backend.types import Tensor
from kmp._keras import replace_optimizer
from kmp._keras.optimizer import inner_optimizer_of, steps_of, trainable_variables_of
from kmp._keras.updates import excluded_from_weight_decay
from kmp.precision.policy import Policy
from kmp.precision.trees import HALF_DTYPES, half_dtype
from kmp.scaling.float32_updates import exact_weights, is_master, masters_of
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


class Rebuilding:
    """Optimizers for weights whose dtype changes, with the state of those that a model has.

    Make it before the dtypes change, and call it afterwards.

    Args:
        model: compiled or not.
        policy: that it is converted to. Optimizers that kmp has not wrapped are wrapped where it
            has parameters in half precision.

    Attributes:
        exact: float32 values of the weights that have masters, or will have, by their ids.
    """

    def __init__(self, model: Any, policy: Policy):
        self._model, self._policy = model, policy
        self._optimizers = optimizers_of(model)
        self._makers = {
            name: _carry(x, policy, name == "optimizer") if x.built else None
            for name, x in self._optimizers.items()
        }
        self.exact: dict[int, Tensor] = {}
        for each in self._optimizers.values():
            self.exact |= _exact_weights(each)

    def __call__(self) -> str:
        """Give the model its new optimizers; say what was done."""
        said = []
        for name, optimizer in self._optimizers.items():
            kind = type(inner_optimizer_of(optimizer)).__name__
            make = self._makers[name]
            if make:
                new = make(self.exact)
                said.append(f"{kind} was built anew for the dtypes of the weights, with its state.")
            else:
                new = _wrapped(optimizer, self._policy, name == "optimizer")
            if isinstance(new, LossScaleOptimizer) > isinstance(optimizer, LossScaleOptimizer):
                said.append(f"{kind} was wrapped in kmp.LossScaleOptimizer: updates in float32.")
            if name == "optimizer":
                replace_optimizer(self._model, new)
            else:
                setattr(self._model, name, new)
        return "\n".join(said)


def _wrapped(optimizer: Any, policy: Policy, is_compiled: bool) -> Any:
    """An optimizer that is not built, in kmp's if the policy has parameters in half precision."""
    if isinstance(optimizer, LossScaleOptimizer) or policy.param_dtype not in HALF_DTYPES:
        return optimizer
    scales = is_compiled and policy.compute_dtype == "float16"  # else nobody may scale the loss
    return LossScaleOptimizer(
        inner_optimizer_of(optimizer), loss_scale="dynamic" if scales else "none"
    )


def _exact_weights(optimizer: Any) -> dict[int, Tensor]:
    """float32 values of the weights that a built optimizer has masters of, or will have."""
    has_masters = isinstance(optimizer, LossScaleOptimizer) and optimizer.half_memory.master_weights
    if not (has_masters and optimizer.built):
        return {}
    inner = optimizer.inner_optimizer
    weights = trainable_variables_of(inner)
    copies = {id(v): ops.copy(ops.cast(v, "float32")) for v in weights}  # PyTorch's change in place
    return copies | exact_weights(inner)


def _carry(optimizer: Any, policy: Policy, is_compiled: bool) -> Callable[[dict], Any]:
    """Note what a built optimizer is; the result builds one like it, for retyped weights."""
    inner = inner_optimizer_of(optimizer)
    variables = trainable_variables_of(inner)
    excluded = [excluded_from_weight_decay(each) for each in _with_parts(inner)]

    def build(exact: dict[int, Tensor]) -> Any:
        new: Any = type(inner).from_config(inner.get_config())
        for each, which in zip(_with_parts(new), excluded, strict=True):
            each.exclude_from_weight_decay(**which)
        fresh = _like(optimizer, new, policy, is_compiled)
        fresh.build(variables)
        _copy_state(optimizer, fresh, exact)
        return fresh

    return build


def _with_parts(optimizer: Any) -> list[Any]:
    """An optimizer, and those in it if it is a `keras.optimizers.MultiOptimizer`."""
    return [optimizer, *getattr(optimizer, "optimizers", ())]


def _like(optimizer: Any, inner: Any, policy: Policy, is_compiled: bool) -> Any:
    """An optimizer like one that is built, around `inner`."""
    if not isinstance(optimizer, LossScaleOptimizer):
        return _wrapped(inner, policy, is_compiled)
    return type(optimizer)(
        inner,
        name=optimizer.name,
        loss_scale=optimizer.loss_scale,
        on_overflow=optimizer.on_overflow,
        measure_gradients=optimizer.measure_gradients,
        **dataclasses.asdict(optimizer.half_memory),
    )


def _copy_state(old: Any, new: Any, exact: dict[int, Tensor]) -> None:
    """Assign the state of one optimizer to another, which has slots of other dtypes, or masters."""
    inner, fresh = inner_optimizer_of(old), inner_optimizer_of(new)
    sources, targets = ([v for v in each.variables if not is_master(v)] for each in (inner, fresh))
    for source, target in zip(sources, targets, strict=True):
        target.assign(ops.cast(source, target.dtype))
    for variable, master in masters_of(fresh):
        master.assign(exact[id(variable)])
    if new is fresh:
        return
    if isinstance(old, LossScaleOptimizer):
        own = {v.name: v for v in old.own_variables}
        for target in new.own_variables:
            if target.name in own:
                target.assign(own[target.name])
    else:
        new.steps.assign(ops.copy(steps_of(inner)))  # on JAX the inner one has that buffer now
