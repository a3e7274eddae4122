"""Leaving out spikes: steps whose gradients are finite, and far larger than they were lately.

As with loss scales, a *rule* is a frozen dataclass of pure functions, and its *state* a NamedTuple.
It is no loss scale, and a spike does not move one.
"""

import dataclasses
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from kmp._backend.types import ON_HOST, Tensor
from kmp._common import number, whole_number

_KNOWN = 16  # norms that the rule waits for
_FIRST_STEPS = 100  # in which batch statistics may grow by any factor
_REPLENISHES = 10_000  # steps after which the budget allows for one more spike


class PeakState(NamedTuple):
    """What a `SkipSpikes` remembers of the gradients' norms.

    Attributes:
        peak: float32[], the largest norm lately.
        norms: int32[], how many norms above 0 it has seen, up to 16.
        spent: int32[], what spikes have cost of the budget: 10,000 each, and 1 less at each step.
    """

    peak: Tensor
    norms: Tensor
    spent: Tensor


@keras.saving.register_keras_serializable(package="kmp")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SkipSpikes:
    """Leaves out a step whose gradient is many times larger than the largest lately.

    ```
    spike:   norm > factor * peak         once 16 norms above 0 are known, within the budget
    peak   = max(peak / 2**(1 / half_life), norm, or 2 * peak after a spike)
    budget:  `patience` spikes, and one more for every 10,000 steps
    ```

    `norm` is the l2 norm of all gradients together, in true units, before clipping. In training on
    rare labels or sparse rewards their own gradients make the peak, so they are not spikes. Once
    the budget is spent, large gradients are taken for what the data or the learning rate bring now,
    and the peak follows them at once.

    It finds bad batches. Gradients that grow step by step, as with too high a learning rate, are
    never spikes: lower the learning rate, or clip.

    Args:
        factor: float > 1, how many times the peak a spike exceeds.
        half_life: int >= 1, steps in which the peak halves.
        patience: int >= 1, spikes that may follow one another.

    Raises:
        ValueError: if an argument is out of its range.

    Example:

    >>> rule = SkipSpikes(factor=10)
    >>> state = rule.init()
    >>> for norm in [1.0, 3.0] * 8 + [40.0]:
    ...     limit = float(rule.limit(state))
    ...     state = rule.next(state, norm, True)
    >>> limit, float(state.peak)  # 40 was a spike
    (30.0, 6.0)

    Source: the idea of leaving such steps out is that of PaLM (Chowdhery et al. 2022, section 5.1)
    and of OLMo-core's `SkipStepOptimizer`; the rule is ours.
    """

    factor: float = 10.0
    half_life: int = 128
    patience: int = 8

    def __post_init__(self) -> None:
        owner = type(self).__name__
        factor = number("factor", self.factor, owner)
        if not 1 < factor < 2.0**64:
            raise ValueError(
                f"`factor` of {owner} must be above 1. Received: factor={factor}. Write factor=10, "
                "the default."
            )
        object.__setattr__(self, "factor", factor)
        for name in ("half_life", "patience"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), owner))

    def init(self) -> PeakState:
        """Return the state before the first step: zeros."""
        zero = ops.zeros((), "int32")
        return PeakState(ops.zeros((), "float32"), zero, zero)

    def limit(self, state: PeakState) -> Tensor:
        """Return float32[], the largest norm that is not a spike; inf if no step can be one now."""
        xp = _operations(state)
        watches = (state.norms >= _KNOWN) & self.has_budget(state.spent)
        with np.errstate(over="ignore"):
            limit = state.peak * np.float32(self.factor)
        return xp.where(watches, limit, np.float32(np.inf))

    def next(self, state: PeakState, norm: Tensor, finite: Tensor) -> PeakState:
        """Return the state after a step.

        Args:
            state: `PeakState` before the step.
            norm: float32[], of the step's gradients.
            finite: bool[], whether they all were finite. If not, or if all are zero, the state
                stays.
        """
        xp = _operations(state)
        norm = norm if xp is np else ops.convert_to_tensor(norm, "float32")
        spike = norm > self.limit(state)
        counts = finite & (norm > 0)
        faded = state.peak * np.float32(0.5 ** (1 / self.half_life))
        doubled = state.peak + xp.minimum(state.peak, _LARGEST - state.peak)
        peak = xp.maximum(faded, xp.where(spike, doubled, norm))
        return PeakState(
            peak=xp.where(counts, peak, state.peak),
            norms=xp.where(counts, xp.minimum(state.norms + 1, _KNOWN), state.norms),
            spent=xp.where(counts, self.spend(state.spent, spike), state.spent),
        )

    def has_budget(self, spent: Tensor) -> Tensor:
        """Return bool[]: whether one more spike may be left out."""
        return spent <= (self.patience - 1) * _REPLENISHES

    def spend(self, spent: Tensor, spike: Tensor) -> Tensor:
        """Return int32[]: what is spent after a step, which was a `spike`, bool[], or not."""
        xp = np if isinstance(spent, ON_HOST) else ops
        costs = xp.where(spike, np.int32(_REPLENISHES), np.int32(0))  # whatever Keras's floatx is
        return xp.maximum(spent - 1, 0) + costs

    def keeps_statistics(
        self, before: Tensor, after: Tensor, steps: Tensor, spent: Tensor
    ) -> Tensor:
        """Return bool[]: whether batch statistics must stay as they were before a step.

        Args:
            before: [channels], of any float dtype, a moving variance.
            after: of the same shape, what it would be after the step.
            steps: int32[] or float32[], steps so far. In the first 100 a moving variance comes
                down, or up, from 1.
            spent: int32[], as in `PeakState`, but of this budget.
        """
        before, after = (ops.cast(ops.max(each), "float32") for each in (before, after))
        return (after > self.factor * before) & (steps > _FIRST_STEPS) & self.has_budget(spent)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SkipSpikes":
        """Build the rule from what `get_config` returned."""
        return cls(**config)


_LARGEST = np.finfo("float32").max


def get(identifier: Any) -> SkipSpikes | None:
    """Return the rule that an argument `spikes` names, or whose saved config it is.

    Example:

    >>> get("skip")
    SkipSpikes(factor=10.0, half_life=128, patience=8)
    """
    if identifier == "skip":
        return SkipSpikes()
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if identifier is None or isinstance(identifier, SkipSpikes):
        return identifier
    raise ValueError(
        '`spikes` must be None, "skip" or a kmp.SkipSpikes. Received: '
        f'spikes={identifier!r} (of type {type(identifier).__name__}). Write spikes="skip" for '
        "the rule with its defaults, kmp.SkipSpikes(factor=10)."
    )


def _operations(state: PeakState) -> Any:
    """`numpy` if the state has been read to the host, else `keras.ops`."""
    return np if isinstance(state.peak, ON_HOST) else ops
