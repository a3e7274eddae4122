"""What `GradientHealth` is given: checks that say what to write instead."""

from collections.abc import Sequence
from typing import Any

from kmp.callbacks.curves.outlets import ALWAYS, MORE
from kmp.scaling.optimizer import LossScaleOptimizer


def checked_logs(logs: Any) -> tuple[str, ...]:
    """The names of the numbers that go into the logs: those that always do, and those asked for.

    Example:

    >>> checked_logs(["lost_share"])
    ('loss_scale', 'skipped_steps', 'grad_norm', 'verdict', 'lost_share')
    """
    known = ALWAYS + MORE
    names = known if logs == "all" else logs
    listed = isinstance(names, Sequence | set | frozenset) and not isinstance(names, str)
    if not listed or any(name not in known for name in names):
        raise ValueError(
            f'`logs` of GradientHealth must be "all" or a list of names among {MORE}. '
            f"Received: logs={logs!r}. Write for example logs=[{MORE[0]!r}]."
        )
    return tuple(name for name in known if name in ALWAYS or name in names)


def checked_verbose(verbose: Any) -> bool:
    """Whether to print; raise ValueError unless `verbose` is 0 or 1."""
    if verbose not in (0, 1):
        raise ValueError(
            f"`verbose` of GradientHealth must be 0 or 1. Received: verbose={verbose!r}. Write "
            "verbose=1 to have the verdict printed whenever it changes."
        )
    return bool(verbose)


def checked_on_report(on_report: Any) -> Any:
    """Return `on_report`; raise ValueError unless it is a function or None."""
    if on_report is not None and not callable(on_report):
        raise ValueError(
            "`on_report` of GradientHealth must be a function that takes a dict. Received: "
            f"on_report={on_report!r} (of type {type(on_report).__name__}). Write for example "
            "on_report=print."
        )
    return on_report


def require_measurements(optimizer: Any, model: Any = None) -> None:
    """Raise ValueError unless `optimizer`, of `model` if that is given, measures gradients."""
    if not isinstance(optimizer, LossScaleOptimizer):
        raise ValueError(
            "GradientHealth reads what kmp's optimizer measures. Received: "
            + ("a model compiled with " if model else "")
            + f"{type(optimizer).__name__}. {_measured_instead(optimizer, model)}"
        )
    if not optimizer.measure_gradients:
        raise ValueError(
            "GradientHealth needs the optimizer's measurements. Received: measure_gradients=False. "
            "Leave the argument out of kmp.LossScaleOptimizer(...), or the callback out of `fit`."
        )


def _measured_instead(optimizer: Any, model: Any) -> str:
    """Say how to have kmp's optimizer in place of this one."""
    own = [k for k, v in vars(model).items() if isinstance(v, LossScaleOptimizer)] if model else []
    if own:
        return f"For one of several write GradientHealth(optimizer=model.{own[0]})."
    inner = optimizer
    while getattr(inner, "inner_optimizer", None) is not None:  # under mixed_float16 Keras wraps
        inner = inner.inner_optimizer
        if isinstance(inner, LossScaleOptimizer):
            return (
                "It wraps kmp's optimizer, which scales the loss by itself: compile with its "
                "`inner_optimizer` alone."
            )
    name = type(inner).__name__ if inner else "keras.optimizers.Adam"
    return (
        f"Write model.compile(optimizer=kmp.scaled({name}, ...), ...); with "
        'loss_scale="none" where nothing needs scaling.'
    )
