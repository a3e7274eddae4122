"""What `SummaryWriter` checks, and what it says to write instead."""

import importlib
import re
from collections.abc import Mapping, Sequence


def message(expected: str, received: object, example: str) -> str:
    """The text of an error: what was expected, what was received, what to write instead."""
    kind = type(received).__name__
    return f"{expected}. Received: {received!r} (of type {kind}). Write {example}."


def check_installed(modules: Sequence[str], what: str) -> None:
    """Raise ModuleNotFoundError unless these modules of the extra `tensorboard` can be imported.

    Args:
        modules: their names.
        what: what needs them, as the subject of a sentence.

    Example:

    >>> check_installed(["PIL"], "The heat map")
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{what} needs the package {module.partition('.')[0]}, which is not installed. "
                "Write pip install 'kmp[tensorboard]'."
            ) from error


def check_unicode(name: str, text: str) -> None:
    """Raise ValueError for a text that files cannot hold: half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        example = "text.encode(errors='replace').decode()"
        raise ValueError(message(f"{name} must be Unicode ({error})", text, example)) from error


def check_layout(layout: object) -> None:
    """Raise TypeError or ValueError unless `layout` is one of `custom_scalars_layout`."""
    example = '{"Mixed precision": {"loss scale": ["loss_scale$"]}}'
    expected = "`layout` must be {category: {chart title: [regular expressions]}}"
    if not isinstance(layout, Mapping):
        raise TypeError(message(expected, layout, example))
    for charts in layout.values():
        if not isinstance(charts, Mapping):
            raise TypeError(message(expected, charts, example))
        for patterns in charts.values():
            if isinstance(patterns, Mapping):
                if set(patterns) != {"value", "lower", "upper"}:
                    tags = '{"value": "loss", "lower": "loss_min", "upper": "loss_max"}'
                    expected = "A band in `layout` must have the keys value, lower and upper"
                    raise ValueError(message(expected, patterns, tags))
                continue
            if not isinstance(patterns, list | tuple):
                raise TypeError(message(expected, patterns, example))
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except (TypeError, re.error) as error:
                    expected = f"`layout` must hold regular expressions ({error})"
                    raise ValueError(
                        message(expected, pattern, "re.escape(tag) for a literal tag")
                    ) from error
