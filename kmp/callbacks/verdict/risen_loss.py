"""The detector of training that has made the model worse than it was."""

import math

import numpy as np

from kmp.callbacks.verdict.detector import Detector
from kmp.callbacks.verdict.observation import Observation
from kmp.callbacks.verdict.states import Verdict

_RISEN = 1.5  # times the loss of the first batch
_GROWN = 3.0  # times the norms with which the weights began
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
        if grown > _GROWN and (loss > _RISEN * first or share > _BRISK):
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
