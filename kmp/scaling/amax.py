"""A loss scale that is chosen from the gradients' measured maximum, not searched for."""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import keras
from keras import ops

from kmp._backend.types import Tensor
from kmp._common import number
from kmp.precision.float_formats import formats
from kmp.scaling.rules import DynamicLossScale

LARGEST = formats["float16"].largest


class AmaxState(NamedTuple):
    """Where an `AmaxLossScale` stands.

    Attributes:
        scale: float32[], what the loss is multiplied by.
        wait: int32[], finite steps until the scale follows the gradients again.
        zero_steps: int32[], all-zero steps in a row since the scale last doubled.
        overflows: int32[], overflows in a row up to now.
    """

    scale: Tensor
    wait: Tensor
    zero_steps: Tensor
    overflows: Tensor


@keras.saving.register_keras_serializable(package="kmp")
@dataclasses.dataclass(frozen=True, kw_only=True)
class AmaxLossScale(DynamicLossScale):
    """A loss scale that keeps the largest gradient a chosen number of bits below overflow.

    `DynamicLossScale` finds its scale by overflowing, one skipped step for each factor of two, and
    raises it every `growth_interval` steps. This one reads the largest gradient, which the step has
    measured. With the defaults in place:

    ```
    finite:    scale = largest power of two with  max_abs * scale * 2**headroom_bits <= 65504
    overflow:  scale = max(scale / 16, 2**-48), and it stays for 2000 finite steps
    all zero:  scale = min(scale * 2, 2048); above that it doubles every 2000 steps
    ```

    The scale starts at 1, fits the gradients from the second step on, and follows them up and down
    within one step. The headroom allows for larger gradients in the next batch, and for gradients
    of activations, which are not measured. If it was too small, a step overflows, and the lower
    scale stays for a while. If all gradients are zero, they may have underflowed: the scale doubles
    at each step up to 2048, where a gradient of 1 still has its headroom, then every
    `growth_interval` steps.

    Args:
        initial_scale: float in [`min_scale`, `max_scale`], the scale of the first step.
        growth_factor: float > 1, what the scale is multiplied by while all gradients are zero.
        backoff_factor: float in (0, 1), what it is multiplied by when it backs off.
        growth_interval: int >= 1, finite steps after an overflow before the scale follows the
            gradients again, and all-zero steps before a scale above 2048 doubles.
        min_scale, max_scale, hysteresis: as in `DynamicLossScale`.
        headroom_bits: float in [0, 16), how far the largest gradient stays below 65504.

    Raises:
        ValueError: if an argument is out of its range.

    Example:

    >>> rule = AmaxLossScale(headroom_bits=4)
    >>> state = rule.init()
    >>> for max_abs in [0.5, 0.5, 100.0]:
    ...     state = rule.next(state, True, max_abs)
    ...     print(float(state.scale))
    4096.0
    4096.0
    32.0

    Source: the per-tensor scales of NVIDIA's Transformer Engine ("delayed scaling"), here one for
    the loss.
    """

    headroom_bits: float = 4.0
    initial_scale: float = 1.0
    backoff_factor: float = 1 / 16

    reads_max_abs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        bits = number("headroom_bits", self.headroom_bits, "AmaxLossScale")
        if not 0 <= bits < 16:
            raise ValueError(
                "`headroom_bits` of AmaxLossScale must lie between 0 and 16, the bits of float16 "
                f"above 1. Received: headroom_bits={bits}. Write headroom_bits=4, the default."
            )
        object.__setattr__(self, "headroom_bits", bits)

    def init(self) -> Any:
        """Return the state before the first step, an `AmaxState`."""
        zero = ops.zeros((), "int32")
        return AmaxState(ops.convert_to_tensor(self.initial_scale, "float32"), zero, zero, zero)

    def next(self, state: Any, finite: Tensor, max_abs: Tensor | None = None) -> Any:
        """Return the state after a step, as `DynamicLossScale.next` does.

        Args:
            state: `AmaxState` before the step.
            finite: bool[].
            max_abs: float32[], the largest absolute value of all gradients, after division by the
                scale.

        Raises:
            ValueError: if `max_abs` is missing.
        """
        if max_abs is None:
            raise ValueError(
                "AmaxLossScale needs the largest gradient of the step. Received: max_abs=None. "
                "Write rule.next(state, finite, max_abs) with the maximum of the absolute unscaled "
                "gradients, or leave it to kmp.scaled."
            )
        scale, wait, zero_steps, overflows = map(ops.convert_to_tensor, state)
        max_abs = ops.cast(max_abs, "float32")
        follows, has_numbers = wait <= 0, max_abs > 0
        overflows = ops.where(finite, 0, overflows + 1)
        doubled, zeros = self._of_zeros(scale, zero_steps)
        chosen = ops.where(has_numbers, self._fitting(max_abs), doubled)
        smaller = ops.where(overflows >= self.hysteresis, scale * self.backoff_factor, scale)
        scale = ops.where(finite, ops.where(follows, chosen, scale), smaller)
        counts_zeros = follows & ops.logical_not(has_numbers) & finite
        return AmaxState(
            scale=ops.clip(scale, self.min_scale, self.max_scale),
            wait=ops.where(finite, ops.maximum(wait - 1, 0), self.growth_interval),
            zero_steps=ops.where(counts_zeros, zeros, 0),
            overflows=overflows,
        )

    def _of_zeros(self, scale: Tensor, zero_steps: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and `zero_steps` after a step whose gradients are all zero."""
        grown, enough = scale * self.growth_factor, self._fitting(ops.ones((), "float32"))
        steps = zero_steps + 1
        small, grows = scale < enough, steps >= self.growth_interval
        scale = ops.where(small, ops.minimum(grown, enough), ops.where(grows, grown, scale))
        return scale, ops.where(small | grows, 0, steps)

    def _fitting(self, max_abs: Tensor) -> Tensor:
        """The largest power of two at which `max_abs` keeps its headroom; 0 if there is none.

        From a list: logarithms and powers are not exact in float32, powers of two have to be.
        """
        lowest, highest = math.log2(self.min_scale), math.log2(self.max_scale)
        exponents = range(math.ceil(lowest), math.floor(highest) + 1)
        powers = ops.convert_to_tensor([2.0**k for k in exponents] or [self.min_scale], "float32")
        fits = powers * (max_abs * 2.0**self.headroom_bits) <= LARGEST
        return ops.max(ops.where(fits, powers, ops.zeros_like(powers)))
