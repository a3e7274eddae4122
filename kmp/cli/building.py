"""The model that a command works on: imported, built, and put under a policy."""

import importlib
from collections.abc import Callable
from typing import Any

import keras

from kmp.cli.options import UsageError
from kmp.models.convert import to_mixed_precision
from kmp.precision.policy import Policy, get_policy, set_policy
from kmp.scaling.optimizer import LossScaleOptimizer


def load(path: str) -> Callable:
    """Import the function that `module:function` names.

    Raises:
        UsageError: there is no such module, or no such function in it.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name, None) if name else None
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{path!r} cannot be imported: {error}. Run the command in the directory that holds "
            "the module, or set PYTHONPATH."
        ) from error
    if not callable(function):
        raise UsageError(
            "A model is named by a module and a function in it that builds the model. Received: "
            f"{path!r}. Write for example my_package.train:build."
        )
    return function


def build_under(build: Callable[[], tuple], policy: Any, seed: int) -> tuple:
    """Call `build` and put its model under a policy, with the weights that `seed` gives in float32.

    `kmp.to_mixed_precision` converts to a policy with float32 parameters. Under any other policy
    the model is built again, with the float32 weights rounded to its dtype. kmp scales the loss
    under float16 with float32 parameters, and updates bfloat16 parameters in float32.

    Args:
        build: takes nothing and returns a tuple, a compiled model first. The global dtype policy
            is restored after it.
        policy: what `kmp.get_policy` takes.
        seed: int, for all random numbers.

    Returns:
        What `build` returns.
    """
    policy = get_policy(policy)
    before = keras.config.dtype_policy()
    try:
        model, *rest = _build(build, Policy("float32"), seed)
        if policy.param_dtype != "float32":
            reference = model
            model, *rest = _build(build, policy, seed)
            for variable, weight in zip(model.weights, reference.weights, strict=True):
                variable.assign(keras.ops.cast(weight.value, variable.dtype))
    finally:
        keras.config.set_dtype_policy(before)
    is_mixed = policy.param_dtype == "float32"
    scales = is_mixed and policy.compute_dtype == "float16"
    # Keras's own LossScaleOptimizer gives way to the optimizer in it.
    if not (scales and isinstance(model.optimizer, LossScaleOptimizer)):
        model.optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if policy.param_dtype == "bfloat16":
        model.optimizer = LossScaleOptimizer(model.optimizer, loss_scale="none")
    if is_mixed:
        to_mixed_precision(model, policy)  # and wraps the optimizer under float16
    return model, *rest


def _build(build: Callable[[], tuple], policy: Policy, seed: int) -> tuple:
    keras.utils.set_random_seed(seed)
    set_policy(policy)
    built = build()
    model: Any = built[0] if isinstance(built, tuple) and built else built
    if not isinstance(built, tuple) or not isinstance(model, keras.Model):
        raise UsageError(
            "The function that builds must return a tuple, a Keras model first and then its data. "
            f"Received: {type(built).__name__} from {getattr(build, '__name__', build)}. Write for "
            "example return model, x, y."
        )
    if not model.compiled:
        raise UsageError(
            f"The model that is built must be compiled. Received: {model.name!r}, which is not. "
            "Call model.compile(optimizer, loss) before returning it."
        )
    return built
