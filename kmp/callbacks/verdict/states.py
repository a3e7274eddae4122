"""The states that a run can be in, and the limits between them."""

import dataclasses
from typing import Any

from kmp._common import number

# From the best to the worst; a state's place is its number in logs and charts.
STATES = (
    "HEALTHY",
    "CALIBRATING",
    "UNDERFLOW",
    "UNSTABLE",
    "STALLED",
    "COLLAPSED",
    "FORWARD-NAN",
)


class Grade(float):
    """The number of a state, which prints as its name.

    Keras's progress bar and its writers of files want numbers in the logs, and people a word. The
    progress bar divides a value by one and formats it, which leaves this one as it is.

    Example:

    >>> grade = Grade(3)
    >>> grade, f"{grade / 1:.4f}", float(grade), grade == "UNSTABLE", grade > 2
    (UNSTABLE, 'UNSTABLE', 3.0, True, True)
    """

    def __str__(self) -> str:
        return STATES[int(self)]

    __repr__ = __str__
    __hash__ = float.__hash__

    def __format__(self, format_spec: str) -> str:
        return str(self)

    def __truediv__(self, other: Any) -> float:
        return self if other == 1 else float.__truediv__(self, other)

    def __eq__(self, other: object) -> bool:
        return str(self) == other if isinstance(other, str) else float(self) == other


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The state of a run.

    ```
    HEALTHY      nothing to do
    CALIBRATING  the loss scale is being found, by overflows that began in the first 100 steps; up
                 to step 200
    UNDERFLOW    float16 loses gradients at a scale that could be higher
    UNSTABLE     there are far more overflows, or far larger gradients or updates, than in sound
                 training; or gradients hold inf or NaN though no layer computes in float16; or
                 weights, moving statistics or the optimizer's own state hold inf or NaN, or one
                 huge batch has ruined them, after which updates may be far too small; or losses
                 are higher since a batch with a huge loss, or the optimizer remembers that batch;
                 or an epoch's loss is above that of the first batch, and weights or updates have
                 become far too large
    STALLED      the weights stand still, although there are gradients; or the optimizer takes no
                 step, or nothing scales the loss; or the loss hardly depends on the weights; or the
                 gradients of half of the weights, biases aside, are exactly zero; or there are no
                 weights, or all are frozen, or half of them have decayed to nothing
    COLLAPSED    gradients overflow although the loss scale cannot fall any further, or no scale
                 helps
    FORWARD-NAN  the loss itself is not finite: no loss scale can help
    ```

    Attributes:
        state: one of these.
        blame: path of the variable to look at; empty if there is none, or none can be told. Of
            several that overflow together it is the last in the model's order, whose gradient is
            computed first.
        reason: what was seen, in numbers.
        advice: one line, what to do.
        code: int, the place of `state` in this list, from 0.

    Example:

    >>> print(Verdict("UNDERFLOW", "dense/kernel", "12% are lost", "Raise the loss scale."))
    UNDERFLOW in dense/kernel: 12% are lost. Raise the loss scale.
    """

    state: str
    blame: str = ""
    reason: str = ""
    advice: str = ""

    @property
    def code(self) -> int:
        return STATES.index(self.state)

    def __str__(self) -> str:
        where = f" in {self.blame}" if self.blame else ""
        return f"{self.state}{where}: {self.reason}. {self.advice}".strip()


@dataclasses.dataclass(frozen=True)
class Limits:
    """The thresholds of the verdict and the warnings of `kmp.callbacks.GradientHealth`.

    Args:
        min_grad_norm: float >= 0, the l2 norm below which the gradient of a variable is reported as
            vanishing; in true units (after division by the loss scale). Source: ours, as
            `max_grad_norm`.
        max_grad_norm: float > `min_grad_norm`, the l2 norm above which a gradient is exploding, in
            true units. That alone does not make the run UNSTABLE, because some losses have large
            gradients throughout: the norm must also be 100 times its smallest since step 100, or
            updates must exceed `max_update_ratio`.
        max_overflow_rate: float, share of steps that overflow above which a run is UNSTABLE. It is
            taken over the last 500 steps, without the first 100. There must also be at least 5
            overflows, and more than five times the share that the rule itself causes (about 1 /
            `growth_interval`) or, if that is less, more than the middle between that share and 1.
            Overflows at the floor of the scale, which are not due to its growth, count from a share
            of 1 / 2000 on. Also the share of an epoch's steps above which a warning says that steps
            were skipped. Source: ours.
        max_update_ratio: float, norm of the update over norm of the weights, above which a run is
            UNSTABLE: the median over the weight matrices and ten looks. 0: no ratio is too large.
            Source: 0.001 is healthy (CS231n); the two decades above it are ours.
        max_lost_share: float, share of a float16 variable's non-zero gradient that float16 rounds
            to zero, above which the run is in UNDERFLOW. Source: AdaLoss (Zhao et al. 2019), 1e-3.
        max_degraded_share: float, share below float16's smallest normal number, the mean of the
            float16 variables, above which the run is in UNDERFLOW. A variable counts if its largest
            gradient, times the scale, is below 2**-17: there float16 keeps fewer bits than
            bfloat16. Source: ours.
        spare_bits: float, how many times the scale must be able to double for UNDERFLOW; otherwise
            a higher scale would overflow (65504, Micikevicius et al. 2018). Source: ours.

    Raises:
        ValueError: if a value is negative or not a number, or `min_grad_norm` is not below
            `max_grad_norm`.

    Example:

    >>> Limits(max_grad_norm=1e6).max_grad_norm
    1000000.0
    """

    min_grad_norm: float = 1e-7
    max_grad_norm: float = 1e4
    max_overflow_rate: float = 0.01
    max_update_ratio: float = 0.1
    max_lost_share: float = 1e-3
    max_degraded_share: float = 0.05
    spare_bits: float = 4.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = number(field.name, getattr(self, field.name), "Limits")
            if not value >= 0:
                raise ValueError(
                    f"`{field.name}` of Limits must not be negative. Received: {field.name}="
                    f"{value}. Write {field.name}={field.default}, the default."
                )
            object.__setattr__(self, field.name, value)
        if not self.min_grad_norm < self.max_grad_norm:
            raise ValueError(
                "`min_grad_norm` of Limits must lie below `max_grad_norm`. Received: "
                f"min_grad_norm={self.min_grad_norm}, max_grad_norm={self.max_grad_norm}. The "
                "defaults are 1e-7 and 1e4."
            )


def checked_limits(limits: Any) -> Limits:
    """Return `limits`, or the defaults for None; raise ValueError if it is not a `Limits`."""
    if limits is None:
        return Limits()
    if not isinstance(limits, Limits):
        raise ValueError(
            "`limits` of GradientHealth must be a kmp.callbacks.Limits. Received: "
            f"limits={limits!r} (of type {type(limits).__name__}). Write for example "
            "limits=kmp.callbacks.Limits(max_grad_norm=1e6)."
        )
    return limits
