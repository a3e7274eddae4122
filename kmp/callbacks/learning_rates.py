"""The learning rates of an optimizer, or of those inside a `keras.optimizers.MultiOptimizer`."""

from collections.abc import Collection
from typing import Any

from kmp._keras.optimizer import rate_of_last_step, trainable_variables_of
from kmp.precision.trees import as_number


def learning_rates(optimizer: Any) -> dict[str, float]:
    """The learning rate, or those of a `keras.optimizers.MultiOptimizer`, as Keras names them.

    Args:
        optimizer: `kmp.LossScaleOptimizer`.

    Example:

    >>> learning_rates(kmp.scaled("sgd", learning_rate=0.5))
    {'learning_rate': 0.5}
    """
    inner = optimizer.inner_optimizer
    parts = getattr(inner, "optimizers", None)
    named = {f"learning_rate_{part.name}": part for part in parts or ()} or {"learning_rate": inner}
    return {name: _rate(each) for name, each in named.items()}


def highest_rate(optimizer: Any, paths: Collection[str]) -> float:
    """The highest learning rate of any of the variables with these paths, in the last step.

    Args:
        optimizer: `kmp.LossScaleOptimizer`, built.
        paths: of at least one of its variables.
    """
    parts = [x for x in _parts(optimizer) if x.built]
    return max(
        as_number(rate_of_last_step(each))
        for each in parts
        if any(v.path in paths for v in trainable_variables_of(each))
    )


def weight_decay(optimizer: Any) -> float:
    """The largest share of a weight that weight decay takes in a step; 0 without it."""
    return max(_rate(x) * x.weight_decay if x.weight_decay else 0.0 for x in _parts(optimizer))


def _parts(optimizer: Any) -> list[Any]:
    """The optimizer inside kmp's, or those inside a `keras.optimizers.MultiOptimizer`."""
    inner = optimizer.inner_optimizer
    return getattr(inner, "optimizers", None) or [inner]


def _rate(optimizer: Any) -> float:
    return as_number(optimizer.learning_rate)
