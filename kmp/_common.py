"""Checks of what users pass in, with what to write instead; warnings; the table of reports."""

import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len

# Between the smallest normal float32 and its reciprocal, neither S nor 1/S leaves float32.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-126, 2.0**126

# Whose frames lie between the user's line and a warning: they run `fit` and compile its steps.
_BETWEEN = ("kmp", "keras", "tensorflow", "jax", "torch", "contextlib", "functools")


class PrecisionWarning(UserWarning):
    """What kmp warns of: precision, loss scaling, and runs that go wrong.

    Example:

    >>> import warnings
    >>> warnings.simplefilter("ignore", PrecisionWarning)
    """


def warn(message: str) -> None:
    """Warn, and let the warning point at the line of the user's code that led here."""
    level, frame = 1, inspect.currentframe()
    while frame and frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, PrecisionWarning, stacklevel=level)


def is_number(value: Any) -> bool:
    """Tell whether `value` is a real number or a scalar array of one."""
    if isinstance(value, (bool, str, bytes)):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def number(name: str, value: Any, owner: str) -> float:
    """Return `value` as a float, or say which argument of `owner` is not a number."""
    if not is_number(value):
        raise ValueError(
            f"`{name}` of {owner} must be a number. Received: {name}={value!r} (of type "
            f"{type(value).__name__})."
        )
    return float(value)


def scale_number(name: str, value: Any, owner: str) -> float:
    """Return `value` if it can be a loss scale."""
    value = number(name, value, owner)
    if not _SMALLEST_SCALE <= value <= _LARGEST_SCALE:
        raise ValueError(
            f"`{name}` of {owner} must be a positive, finite number between 2**-126 and 2**126, so "
            f"that its reciprocal is finite too. Received: {name}={value}. Write a power of two, "
            f"such as {name}={2.0**15 if name != 'min_scale' else '2.0**-48'}."
        )
    return value


def whole_number(name: str, value: Any, owner: str) -> int:
    """Return `value` if it is a count of steps, at least 1."""
    count = number(name, value, owner)
    if not (1 <= count < 2**31 and count == int(count)):
        raise ValueError(
            f"`{name}` of {owner} must be a whole number of steps, at least 1. "
            f"Received: {name}={value!r}. Write for example {name}=1."
        )
    return int(count)


def check_factors(owner: str, growth_factor: float, backoff_factor: float) -> None:
    """Raise ValueError unless growth makes the scale larger, and backing off makes it smaller."""
    for name, value, fits, wanted, instead in (
        ("growth_factor", growth_factor, 1 < growth_factor < math.inf, "above 1", "2.0"),
        ("backoff_factor", backoff_factor, 0 < backoff_factor < 1, "between 0 and 1", "0.5"),
    ):
        if not fits:
            raise ValueError(
                f"`{name}` of {owner} must be a finite number {wanted}. Received: {name}={value}. "
                f"Write {name}={instead}, the usual choice."
            )


def check_scales(owner: str, initial_scale: float, min_scale: float, max_scale: float) -> None:
    """Raise ValueError unless `min_scale <= initial_scale <= max_scale`."""
    if min_scale > max_scale:
        raise ValueError(
            f"`min_scale` of {owner} must not be above `max_scale`. Received: "
            f"min_scale={min_scale}, max_scale={max_scale}. Swap the two, or leave one at its "
            "default (2**-48 and 2**24)."
        )
    if not min_scale <= initial_scale <= max_scale:
        raise ValueError(
            f"`initial_scale` of {owner} must lie in [min_scale, max_scale]. Received: "
            f"initial_scale={initial_scale}, min_scale={min_scale}, max_scale={max_scale}. Pass "
            f"min_scale={min(initial_scale, min_scale)} or "
            f"max_scale={max(initial_scale, max_scale)} with it."
        )


def checked_choice(name: str, value: str, choices: Sequence[str]) -> str:
    """Return `value` if it is one of `choices`."""
    if value not in choices:
        raise ValueError(
            f"`{name}` must be one of {tuple(choices)}. Received: {name}={value!r}. "
            f"Write {name}={choices[0]!r}, the default."
        )
    return value


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Align the columns of rows of equal length, the header first.

    The first `left` columns are text and aligned left; the others are numbers and aligned right.
    """
    # `rich.table` takes 0.7 ms a row, and a run prints many reports.
    aligned = []
    for i, column in enumerate(zip(*rows, strict=True)):
        width = max(map(cell_len, column))
        gaps = [" " * (width - cell_len(cell)) for cell in column]
        pairs = zip(column, gaps, strict=True)
        aligned.append([cell + gap if i < left else gap + cell for cell, gap in pairs])
    return "\n".join("  ".join(row).rstrip() for row in zip(*aligned, strict=True))
