"""The detector of weights that stand still although they have gradients."""

from typing import NamedTuple

from kmp.callbacks.verdict.detector import Detector, named
from kmp.callbacks.verdict.observation import Observation, Weight
from kmp.callbacks.verdict.overflows import LOCATE, OTHER_MICRO_BATCHES
from kmp.callbacks.verdict.states import Verdict
from kmp.health.report import GradientReport

_UNMOVED = 0.99  # share of a variable's gradients above which it counts as standing still
_LOOKS, _STEPS = 3, 20  # so many in a row, so many steps apart: less says nothing
_UNFELT = -7.0  # log10 of update over weight: below what float32 keeps of the norm
_NEGLIGIBLE = 1e-6  # gradients below this share of the weights are rounding errors
_CONVERGED = 0.01  # below this share of the largest gradient so far a run has arrived
_FELT = 1e-6  # share of a weight that float32 does not round away
_SMALL_RATE = 1e-7  # a learning rate that float32 weights of usual size round away


class _Still(NamedTuple):
    """Weights that stand still."""

    paths: list[str]
    of: int  # variables that were looked at
    looks: int  # in a row
    steps: int  # between the first and the last of these looks


class FrozenWeights(Detector):
    """STALLED: half of the weight matrices do not move although they have gradients.

    A weight stands still if it has a gradient, not a negligible one, and is the same after the
    update, or as good as the same. A run whose gradient has become small has converged. Where
    nothing has moved since `fit` began, two looks are enough; they may be close together if the
    learning rate is 0.
    """

    def __init__(self):
        self._begin_fit(None)

    def _begin_fit(self, start: GradientReport | None) -> None:
        self._fit_start = start
        self._before: GradientReport | None = None
        self._largest_norm = 0.0
        self._looks = self._first = 0
        self._has_moved = False

    def see(self, look: Observation) -> Verdict | None:
        if look.fit_start is not self._fit_start:
            self._begin_fit(look.fit_start)
        still = self._still(look)
        cause = still and _cause(look, still)
        if not (still and cause):
            return None
        reason, advice = cause
        return Verdict(
            "STALLED",
            still.paths[0],
            f"{len(still.paths)} of {still.of} weights with a gradient have not moved in "
            f"{still.looks} looks over {still.steps} steps ({named(still.paths)}): {reason}",
            advice,
        )

    def _still(self, look: Observation) -> _Still | None:
        """The weights that stand still, once they have for long enough."""
        report = look.report
        before, self._before = self._before, report
        self._largest_norm = max(self._largest_norm, report.grad_norm)
        if report.details is None:
            return None
        watched = _watched(look)
        rate = look.run.learning_rate(watched) if watched else None
        is_certain = not self._has_moved and rate == 0
        skips = report.skipped_steps - (before.skipped_steps if before else 0)
        if skips and look.window == 1 and not (report.update_ratio or is_certain):
            return None  # the details may be those of a skipped step, which moves nothing
        paths = [path for path in watched if is_certain or _is_still(path, look, before)]
        arrived = report.grad_norm < _CONVERGED * self._largest_norm
        if arrived or not paths or 2 * len(paths) < len(watched):
            self._looks, self._has_moved = 0, True
            return None
        self._first = self._first if self._looks else report.step
        self._looks += 1
        steps = report.step - self._first
        rarely = look.window > 1 or any(look.weights[path].moves_rarely for path in watched)
        enough = _LOOKS if self._has_moved or (rarely and not is_certain) else 2
        far_apart = 0 if is_certain else max(_STEPS, 2 * look.window)
        if self._looks < enough or steps < far_apart:
            return None
        return _Still(paths, len(watched), self._looks, steps)


def _watched(look: Observation) -> list[str]:
    norms, weight_norms = look.report.column("l2_norm"), look.report.weight_norm
    paths = [x for x in look.significant if norms[x] > _NEGLIGIBLE * weight_norms[x]]
    return [path for path in paths if look.weights[path].is_matrix] or paths


def _is_still(path: str, look: Observation, before: GradientReport | None) -> bool:
    weight: Weight = look.weights[path]
    if not weight.moves_rarely and look.report.update_ratio.get(path, 0) <= _UNFELT:
        return True
    if look.report.unmoved_share[path] < _UNMOVED:
        return False
    if look.window == 1 and not weight.moves_rarely:
        return True
    # Most micro-batches, or most numbers, do not move: the norm must be the same as well, once one
    # is known to compare it with.
    return before is None or before.weight_norm.get(path) == look.report.weight_norm[path]


def _cause(look: Observation, still: _Still) -> tuple[str, str] | None:
    """Why, and what to do; None if there is no cause but that the gradients are small."""
    rate = look.run.learning_rate(still.paths)
    if rate == 0:
        return "the learning rate is 0", "Set it, or look at where its schedule ends."
    if look.drops_windows and look.skips:
        return (
            f"{look.skips} of the last {look.steps} steps were skipped",
            f"{LOCATE}, or a loss scale if one can hold it. {OTHER_MICRO_BATCHES}",
        )
    norms, weight_norms = look.report.column("l2_norm"), look.report.weight_norm
    felt = all(rate * norms[path] > _FELT * weight_norms[path] for path in still.paths)
    dtypes = {look.weights[path].dtype for path in still.paths}
    half = dtypes & {"bfloat16", "float16"}
    if half and (felt or rate >= _SMALL_RATE):
        dtype = half.pop()
        return (
            f"they are stored in {dtype}, where the optimizer's updates round to nothing",
            f'Keep them in float32: the policy "mixed_{dtype}" computes in {dtype} and updates '
            "in float32. Or write kmp.scaled(..., master_weights=True).",
        )
    if rate < _SMALL_RATE:
        return f"the learning rate is {rate:.2g}", "Raise it: float32 rounds such updates away."
    if felt and not look.skips:  # else the skipped steps do, of which other detectors tell
        return (
            f"at a learning rate of {rate:.2g} their gradients would move them",
            "Look at what holds them back: clipnorm, global_clipnorm, clipvalue, a constraint, or "
            "the optimizer's own update.",
        )
    return None
