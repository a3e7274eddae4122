"""The detector of weights whose gradients are exactly zero, look after look."""

import math
from typing import NamedTuple

from kmp.callbacks.verdict.detector import Detector, named
from kmp.callbacks.verdict.observation import Observation
from kmp.callbacks.verdict.states import Verdict
from kmp.callbacks.verdict.underflow import loses_gradients
from kmp.health.report import GradientReport
from kmp.scaling.rules import DynamicLossScale

_LOOKS, _STEPS = 3, 20  # so many in a row, so many steps apart: less says nothing
_HIGHEST = DynamicLossScale.max_scale  # by default


class _Silent(NamedTuple):
    """Weights without a gradient."""

    paths: list[str]
    of: int  # variables that were looked at
    looks: int  # in a row
    steps: int  # between the first and the last of these looks


class ZeroGradients(Detector):
    """STALLED: the gradients of half of the weights, biases aside, are exactly zero.

    If all are, the output has nothing to do with the input any more, and at best a bias still
    moves; but if all become zero that were not, as under a hinge loss, the run has arrived. Half of
    them count as well, or a quarter that never had another gradient, unless something moves them
    all the same, as experts that other batches call, or they are all of a network that the loss may
    not depend on.
    """

    def __init__(self):
        self._skipped = 0
        self._had_gradients = False
        self._spoke: set[str] = set()  # weights that had a gradient
        self._heard: set[str] = set()  # networks that had a gradient
        self._first: dict[str, tuple[int, int]] = {}  # look and step at which a silence began
        self._looks = 0
        self._before: GradientReport | None = None

    def see(self, look: Observation) -> Verdict | None:
        silent = self._silent(look)
        if silent is None or loses_gradients(look):  # a higher scale may bring them back
            return None
        paths, number = silent.paths, len(silent.paths)
        seen = f"exactly zero in {silent.looks} looks over {silent.steps} steps"
        if number == silent.of:
            return Verdict(
                "STALLED",
                paths[0],
                f"the gradients of all {number} weights, biases aside, were {seen}",
                "The outputs do not depend on the inputs, or the loss not on the outputs: look for "
                "relu units that are all dead, weights that all begin at zero, a softmax over a "
                "single unit, or a loss or sample weights of zero. A softmax or sigmoid that is "
                "exactly 0 or 1 has no gradient either: end the model with "
                "kmp.layers.Float32OutputDense, and write from_logits=True in the loss."
                + _higher_scale(look, paths),
            )
        in_float16 = any(look.weights[path].compute_dtype == "float16" for path in paths)
        return Verdict(
            "STALLED",
            paths[-1],
            f"the gradients of {number} of {silent.of} weights, biases aside, were {seen} "
            f"({named(paths)})",
            "They do not learn: look for relu units that are all dead, an output whose loss or "
            "sample weights are zero, or ops.stop_gradient. Where it is meant, set "
            "layer.trainable = False."
            + (" In float16 the loss scale may be too low as well." if in_float16 else ""),
        )

    def _silent(self, look: Observation) -> _Silent | None:
        """The weights without a gradient, once they are half and have been for long enough."""
        report = look.report
        skips = report.skipped_steps - self._skipped
        self._skipped = report.skipped_steps
        paths = [] if skips else self._watched(look)
        if not paths:
            return None
        self._looks += 1
        before, self._before = self._before, report
        silent = self._newly_silent(look, paths, before)
        began = (self._looks, report.step)
        self._first = {path: self._first.get(path, began) for path in silent}
        self._spoke |= set(paths) - set(silent)
        long = [path for path in silent if self._is_long(path, report)]
        never = set(long) - self._spoke
        if not long or (2 * len(long) < len(paths) and 4 * len(never) < len(paths)):
            return None
        index, step = max(self._first[path] for path in long)
        return _Silent(long, len(paths), self._looks - index + 1, report.step - step)

    def _watched(self, look: Observation) -> list[str]:
        """The weights that have a gradient, if only of zeros, in networks that once had another."""
        weights = look.weights
        norms, zeros = look.report.column("l2_norm"), look.report.column("zero_share")
        known = [path for path in weights if norms.get(path) or zeros.get(path)]
        self._heard |= {weights[path].network for path in known if norms[path]}
        heard = self._heard and [x for x in known if weights[x].network in {*self._heard, ""}]
        known = heard or known
        return [path for path in known if weights[path].is_matrix] or known

    def _newly_silent(
        self, look: Observation, paths: list[str], before: GradientReport | None
    ) -> list[str]:
        """The weights without a gradient in this look, unless the run has arrived."""
        report = look.report
        norms = report.column("l2_norm")
        silent = [path for path in paths if not norms[path]]
        arrived = self._had_gradients and not report.grad_norm
        self._had_gradients |= len(silent) < len(paths)
        if arrived or not silent:
            return []
        decay = look.run.weight_decay()
        return [path for path in silent if not _was_moved(path, report, before, decay)]

    def _is_long(self, path: str, report: GradientReport) -> bool:
        enough = _LOOKS if path in self._spoke else 2  # where it never had a gradient
        index, step = self._first[path]
        return self._looks - index + 1 >= enough and report.step - step >= _STEPS


def _higher_scale(look: Observation, paths: list[str]) -> str:
    """What else to try if all gradients were computed in float16; a sentence, or nothing."""
    scale = look.report.loss_scale
    if scale >= _HIGHEST or any(look.weights[path].compute_dtype != "float16" for path in paths):
        return ""
    return (
        f" Or they are too small for a loss scale of {scale:g}: write "
        f"kmp.DynamicLossScale(initial_scale=2.0**{math.log2(_HIGHEST):g})."
    )


def _was_moved(
    path: str, report: GradientReport, before: GradientReport | None, decay: float
) -> bool:
    """Whether a weight has changed since the report before by more than its weight decay."""
    norm, last = report.weight_norm.get(path), before and before.weight_norm.get(path)
    if not (norm and last and before):
        return False
    # Twice, for the learning rate may have been higher.
    return abs(norm - last) > 2 * decay * (report.step - before.step) * last
