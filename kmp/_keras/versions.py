"""What older releases of Keras lack, and what kmp says when it is asked for it.

kmp imports on Keras 3.10 and later. Where a release lacks what a function needs, the call of that
function raises; nothing else is affected.
"""

from typing import NamedTuple

import keras


class Feature(NamedTuple):
    """Something that Keras got in a later release.

    Attributes:
        since: the first release that has it.
        name: what Keras calls it.
    """

    since: str
    name: str


FEATURES = {
    "quantization_config": Feature("3.13.0", "keras.quantizers.Int8QuantizationConfig"),
}


def release(version: str) -> tuple[int, ...]:
    """The numbers of a release: (3, 15, 1) of "3.15.1", and (3, 16) of "3.16.dev2026"."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def has(feature: str) -> bool:
    """Whether the Keras that is installed has a feature of `FEATURES`."""
    return release(keras.__version__) >= release(FEATURES[feature].since)


def require(feature: str, owner: str, instead: str) -> None:
    """Check that the Keras that is installed has what a function needs.

    Args:
        feature: key in `FEATURES`.
        owner: name of the function that the user called.
        instead: a sentence that says what to do with an older Keras.

    Raises:
        NotImplementedError: if it does not.
    """
    since, name = FEATURES[feature]
    if not has(feature):
        raise NotImplementedError(
            f"{owner} needs {name}, which Keras has since {since}. Received: Keras "
            f"{keras.__version__}. {instead}"
        )
