"""Detectors of training that diverges: a risen loss, and gradients and updates far too large."""

import collections
import math

import numpy as np

from kmp.callbacks.verdict.detector import Detector
from kmp.callbacks.verdict.observation import Observation
from kmp.callbacks.verdict.states import Verdict
from kmp.health.telemetry import FIRST_STEPS

_GROWN_GRADIENT = 100  # how many times as large a gradient has to be to count as exploding
_LOOKS = 10  # whose updates are compared


class _Ratios:
    """The medians of log10(update / weight) of the last looks after the first 100 steps."""

    def __init__(self):
        self.last: collections.deque[float] = collections.deque(maxlen=_LOOKS)

    def see(self, look: Observation) -> None:
        """Take in a look. The first ones do not count: weights may begin at zero."""
        if math.isfinite(look.update_ratio) and look.report.step > FIRST_STEPS:
            self.last.append(look.update_ratio)


class GradientSize:
    """Whether the gradient's norm is far above its smallest after the first 100 steps.

    Attributes:
        has_grown: bool, whether that is so at the last look.
    """

    def __init__(self):
        self.has_grown = False
        self._least = math.inf

    def see(self, look: Observation) -> None:
        """Take in a look. Looks at which nothing has moved do not count."""
        norm = look.report.grad_norm
        if math.isfinite(look.update_ratio) and look.report.step > FIRST_STEPS:
            self._least = min(self._least, norm)
        self.has_grown = norm > _GROWN_GRADIENT * self._least


class ExplodingGradients(Detector):
    """UNSTABLE: the gradient is huge, and larger than before or moving the weights far.

    A loss in large units has large gradients. They are sound if they are what they were, and if
    the optimizer makes updates of the usual size of them.
    """

    def __init__(self):
        self._ratios, self._size = _Ratios(), GradientSize()

    def see(self, look: Observation) -> Verdict | None:
        report, limits = look.report, look.limits
        self._ratios.see(look)
        self._size.see(look)
        known = [x for x in (self._ratios.last, list(report.update_ratio.values())) if x]
        largest = max((10 ** float(np.median(x)) for x in known), default=math.inf)
        moves_far = largest > (limits.max_update_ratio or math.inf) or not known
        if not (report.grad_norm > limits.max_grad_norm and (self._size.has_grown or moves_far)):
            return None
        norms = report.column("l2_norm")
        return Verdict(
            "UNSTABLE",
            max(norms, key=lambda path: norms[path]),
            f"the gradient's norm is {report.grad_norm:.3g}",
            "Lower the learning rate, or clip with global_clipnorm=1.0.",
        )


class LargeUpdates(Detector):
    """UNSTABLE: steps change the weights by too large a share of their norm."""

    def __init__(self):
        self._ratios = _Ratios()

    def see(self, look: Observation) -> Verdict | None:
        self._ratios.see(look)
        most, seen = look.limits.max_update_ratio, self._ratios.last
        ratio = float(np.median(seen)) if len(seen) == _LOOKS else -math.inf
        if not most or ratio <= math.log10(most):
            return None
        ratios = look.report.update_ratio
        return Verdict(
            "UNSTABLE",
            max(ratios, key=lambda path: ratios[path]) if ratios else "",
            f"a step changes the weights by {10**ratio:.2g} of their norm; 0.001 is usual",
            "Lower the learning rate.",
        )


_RISEN = 1.5  # times the loss of the first batch
_GROWN_WEIGHTS = 3.0  # times the norms with which the weights began
_BRISK = 0.01  # share of the weights that a step changes, 10 times the usual one
_FAR = 0.03  # 30 times
_LARGER = 1.2  # times the first norms, where steps are that large; in sound runs they shrink
_STEPS = 20  # in which weights that began at zero outgrow updates


class RisenLoss(Detector):
    """UNSTABLE: an epoch's loss is above that of the first batch, and the weights show why.

    The loss alone proves nothing: rare labels and outliers may be missing in the first batch. The
    weights must have grown much, and the loss too unless steps are large; or they have grown
    somewhat, and each step moves them very far.
    """

    def see(self, look: Observation) -> Verdict | None:
        first, loss = look.run.first_loss, (look.losses or {}).get("loss")
        if not (first and loss and 0 < first < loss < math.inf):
            return None
        growth, share = look.growth, 10**look.update_ratio
        grown = float(np.median(list(growth.values()))) if growth else 0.0
        step = f"a step changes the weights by {share:.2g} of their norm; 0.001 is usual"
        if grown > _GROWN_WEIGHTS and (loss > _RISEN * first or share > _BRISK):
            blame = max(growth, key=lambda path: growth[path])
            seen = f"the weights are {grown:.2g} times as large as when fit began"
            seen += "" if loss > _RISEN * first else f", and {step}"
        elif look.report.step >= _STEPS and grown > _LARGER and share > _FAR:
            ratios = look.report.update_ratio
            blame = max(ratios, key=lambda path: ratios[path])
            seen = step
        else:
            return None
        return Verdict(
            "UNSTABLE",
            blame,
            f"the loss of the last epoch, {loss:.3g}, is above that of the first batch, "
            f"{first:.3g}, and {seen}",
            "Begin again with a lower learning rate, or, if a single batch did it, with "
            'kmp.scaled(..., spikes="skip").',
        )
