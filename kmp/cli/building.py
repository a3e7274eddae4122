"""The model that a command works on: imported, built, and put under a policy."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import keras
from keras import Model

from kmp._common import checked_choice
from kmp.cli.options import UsageError
from kmp.half_memory import HalfMemory
from kmp.models.convert import to_mixed_precision
from kmp.precision.policy import Policy, get_policy, set_policy
from kmp.scaling.optimizer import LossScaleOptimizer

_SETTINGS = tuple(f"{field.name}=" for field in dataclasses.fields(HalfMemory))


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


def parse_policy(text: str) -> tuple[Policy, dict[str, Any]]:
    """A policy and how `kmp.scaled` shall update under it, as in `"bfloat16,slot_dtype=float32"`.

    Raises:
        ValueError: it names no policy, or a setting that `kmp.scaled` does not take.

    Example:

    >>> policy, settings = parse_policy("bfloat16,rounding=nearest")
    >>> str(policy), settings["rounding"]
    ('bfloat16', 'nearest')
    """
    parts = text.split(",")
    pairs = [part.split("=") for part in parts if part.startswith(_SETTINGS)]
    policy = get_policy(",".join(part for part in parts if not part.startswith(_SETTINGS)))
    settings: dict[str, Any] = dict(pairs)
    if "master_weights" in settings:
        values = {"false": False, "true": True, "24": 24}
        word = checked_choice("master_weights", settings["master_weights"], tuple(values))
        settings["master_weights"] = values[word]
    return policy, dataclasses.asdict(HalfMemory(**settings)) if settings else {}


def build_under(build: Callable[[], tuple], policy: str, seed: int) -> tuple:
    """Call `build` and put its model under a policy, with the weights that `seed` gives in float32.

    `kmp.to_mixed_precision` converts to the policy, and scales the loss under float16. If the
    policy has float16 parameters and `policy` has no settings, the model is instead built again
    under it, with its weights rounded, and Keras trains it.

    Args:
        build: takes nothing and returns a tuple, a compiled model first. The global dtype policy
            is restored after it.
        policy: what `parse_policy` takes.
        seed: int, for all random numbers.

    Returns:
        What `build` returns.

    Raises:
        UsageError: the model cannot be built under the policy, or `build` returns something else.
    """
    parsed, settings = parse_policy(policy)
    before = keras.config.dtype_policy()
    by_keras = parsed.param_dtype == "float16" and not settings
    try:
        model, *rest = _build(build, Policy("float32"), seed)
        if by_keras:
            reference = model
            model, *rest = _build_in_half(build, parsed, seed)
            for variable, weight in zip(model.weights, reference.weights, strict=True):
                variable.assign(keras.ops.cast(weight.value, variable.dtype))
    finally:
        keras.config.set_dtype_policy(before)
    scales = parsed.compute_dtype == "float16" and not by_keras
    # Keras's own LossScaleOptimizer gives way to the optimizer in it.
    if settings or not (scales and isinstance(model.optimizer, LossScaleOptimizer)):
        model.optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if settings:
        loss_scale = "dynamic" if scales else "none"
        model.optimizer = LossScaleOptimizer(model.optimizer, loss_scale=loss_scale, **settings)
    if not by_keras:
        to_mixed_precision(model, parsed)
    return model, *rest


def _build_in_half(build: Callable[[], tuple], policy: Policy, seed: int) -> tuple:
    """Build a model whose weights are in half precision, which some layers do not have."""
    try:
        return _build(build, policy, seed)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"The model cannot be built in {policy}: some layers cannot draw weights in it. "
            f"Received: {type(error).__name__} from the function that builds the model. Leave this "
            "policy out: write --policies and the others."
        ) from error


def _build(build: Callable[[], tuple], policy: Policy, seed: int) -> tuple:
    keras.utils.set_random_seed(seed)
    set_policy(policy)
    built = build()
    model: Any = built[0] if isinstance(built, tuple) and built else built
    if not isinstance(built, tuple) or not isinstance(model, Model):
        raise UsageError(
            "The function that builds must return a tuple, a Keras model first and then its data. "
            f"Received: {type(built).__name__} from {getattr(build, '__name__', build)}. Write for "
            "example return model, x, y."
        )
    if not model.built:
        raise UsageError(
            f"The model that is built must have weights. Received: {model.name!r}, which has none "
            "yet. Call it on a batch before returning it."
        )
    if not model.compiled:
        raise UsageError(
            f"The model that is built must be compiled. Received: {model.name!r}, which is not. "
            "Call model.compile(optimizer, loss) before returning it."
        )
    return built
