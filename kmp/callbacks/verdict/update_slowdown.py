"""The detector of weights that move far less than before, though the gradients have not fallen.

Optimizers such as Adam divide by the size of past gradients. One batch with finite but huge
gradients stays in that size for thousands of steps, in which the weights hardly move.
"""

import collections
import math
from typing import NamedTuple

import numpy as np

from kmp.callbacks.verdict.corrupted_state import corrupted
from kmp.callbacks.verdict.detector import Detector
from kmp.callbacks.verdict.observation import Corrupted, Observation
from kmp.callbacks.verdict.states import Verdict
from kmp.health.report import GradientReport
from kmp.health.telemetry import FIRST_STEPS

_FALL = 30.0  # times; noise in the gradients makes Adam's updates 10 times smaller
_FELT = 1e-6  # share of the weights below which their own rounding shrinks an update
_COMPARED = 3  # epochs


class _Point(NamedTuple):
    """How far a step moved the weights."""

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


class UpdateSlowdown(Detector):
    """UNSTABLE: a step moves the weights far less than in the last epochs.

    An epoch is compared by its last step that updated the weights. A step that is too small is not
    what later ones are compared with.
    """

    def __init__(self):
        self._sound: collections.deque[_Point] = collections.deque(maxlen=_COMPARED)
        self._moved: GradientReport | None = None  # the last of this epoch whose step updated

    def see(self, look: Observation) -> Verdict | None:
        self._moved = look.report if look.report.update_ratio else self._moved
        is_first = look.report.step > FIRST_STEPS and not self._sound
        moved = self._moved if look.is_epoch_end or is_first else None
        self._moved = None if look.is_epoch_end else self._moved
        return self._compare(look, moved) if moved else None

    def _compare(self, look: Observation, report: GradientReport) -> Verdict | None:
        weights = look.weights
        watched = {x for x, weight in weights.items() if weight.is_matrix} or set(weights)
        ratios = {x: r for x, r in report.update_ratio.items() if x in watched}
        rate = look.run.learning_rate(list(ratios)) if ratios else 0.0
        if not rate:
            return None  # nothing has moved, as in a skipped step
        norms = report.weight_norm
        update = float(np.median([10**r * norms[x] for x, r in ratios.items()]))
        now = _Point(report.step, update, rate, report.grad_norm)
        falls = [(now.fall_since(before), before.step) for before in self._sound]
        fall, step = max(falls, default=(0.0, 0))
        largest = float(np.median(list(ratios.values()))) + math.log10(max(fall, 1.0))
        if fall <= _FALL or 10**largest <= _FELT:
            self._sound.append(now)
            return None
        reason = (
            f"updates are {fall:.0f} times smaller than after step {step}, which neither the "
            "gradients nor the learning rate explain"
        )
        slowest = min(ratios, key=lambda x: ratios[x])
        return corrupted([Corrupted(slowest, reason, of_layer=False)])
