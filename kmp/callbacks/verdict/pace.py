"""Whether weights move far less than before, though gradients and learning rate have not fallen.

Optimizers such as Adam divide by the size of past gradients. One batch with finite but huge
gradients stays in that size for thousands of steps, in which the weights hardly move.
"""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kmp.callbacks.verdict.standstill import Weight
from kmp.health.report import GradientReport

_FALL = 30.0  # times; noise in the gradients makes Adam's updates 10 times smaller
_FELT = 1e-6  # share of the weights below which their own rounding shrinks an update
_COMPARED = 3  # epochs


class _Point(NamedTuple):
    step: int
    update: float  # median norm of the updates
    rate: float  # the learning rate
    grad_norm: float

    def fall_since(self, before: "_Point") -> float:
        """How many times smaller updates are than before, beyond what is to be expected.

        A lower learning rate, a smaller gradient and the growing sum of Adagrad explain a part. A
        higher rate does not count against an update, since momentum still holds the earlier ones.
        """
        fall = before.update / self.update * min(self.rate / before.rate, 1.0)
        gradient_fall = before.grad_norm / self.grad_norm if self.grad_norm else math.inf
        by_adagrad = math.sqrt(max(self.step / before.step / 10, 1.0))  # felt after long epochs
        return fall / max(gradient_fall, 1.0) / by_adagrad


class Pace:
    """Compares how far a step moves the weights with the last epochs."""

    def __init__(self):
        self._sound: collections.deque[_Point] = collections.deque(maxlen=_COMPARED)

    @property
    def is_known(self) -> bool:
        """Whether there is anything to compare with."""
        return bool(self._sound)

    def see(
        self,
        report: GradientReport,
        weights: Mapping[str, Weight],
        learning_rate: Callable[[Sequence[str]], float],
    ) -> tuple[str, str] | None:
        """Take in a report.

        Args:
            report: what the steps have measured.
            weights: the trainable variables by their paths.
            learning_rate: returns that of the variables with some paths.

        Returns:
            If the weights move far less than before, the path of the variable that moves least, and
            what was seen. Such a report is not compared with later.
        """
        watched = {x for x, weight in weights.items() if weight.is_matrix} or set(weights)
        ratios = {x: r for x, r in report.update_ratio.items() if x in watched}
        rate = learning_rate(list(ratios)) if ratios else 0.0
        if not rate:
            return None  # nothing has moved, as in a skipped step
        norms = report.weight_norm
        update = float(np.median([10**r * norms[x] for x, r in ratios.items()]))
        now = _Point(report.step, update, rate, report.grad_norm)
        falls = [(now.fall_since(before), before.step) for before in self._sound]
        fall, step = max(falls, default=(0.0, 0))
        largest = float(np.median(list(ratios.values()))) + math.log10(max(fall, 1.0))
        if fall > _FALL and 10**largest > _FELT:
            reason = (
                f"updates are {fall:.0f} times smaller than after step {step}, which neither the "
                "gradients nor the learning rate explain"
            )
            return min(ratios, key=lambda x: ratios[x]), reason
        self._sound.append(now)
        return None
