"""The report of a conversion or a quantization, one row for each layer."""

import dataclasses
from typing import NamedTuple

import keras

from kmp._common import table
from kmp.precision.policy import Policy


class LayerConversion(NamedTuple):
    """What happened to one layer.

    Attributes:
        path: str, `layer.path`, or its name where Keras gives no path.
        layer: str, the name of its class.
        before: str, the policy that it had.
        after: str, the policy that it has now.
        reason: str, why it was left alone; empty if it was converted.
    """

    path: str
    layer: str
    before: str
    after: str
    reason: str


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What `kmp.to_mixed_precision`, `quantize_aware` or `to_int8` did; it prints as a table.

    Attributes:
        rows: tuple of `LayerConversion`, outer layers before inner ones.
        optimizer: str, what was done with the optimizer; empty if it was left alone.
        untried: str, why the model was not called in its new precision; empty if it was. Call it on
            a batch then, to see whether it runs.
        rounded: str, what the code of the model itself rounds, and what to write; empty if nothing.
    """

    rows: tuple[LayerConversion, ...]
    optimizer: str = ""
    untried: str = ""
    rounded: str = ""

    @property
    def converted(self) -> tuple[str, ...]:
        """The paths of the layers that were converted."""
        return tuple(row.path for row in self.rows if not row.reason)

    @property
    def kept(self) -> dict[str, str]:
        """The paths of the layers that were left alone, each with the reason."""
        return {row.path: row.reason for row in self.rows if row.reason}

    def __str__(self) -> str:
        header = LayerConversion("layer", "class", "before", "after", "left alone because")
        lines = [table([header, *self.rows], left=len(header)), self.optimizer, self.untried]
        lines.append(self.rounded)
        return "\n".join(filter(None, lines))


def policy_word(policy: keras.DTypePolicy) -> str:
    """How a report names a policy."""
    return str(policy) if isinstance(policy, Policy) else policy.name
