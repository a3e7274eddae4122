"""Whether the weights of a run stand still."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from keras import Model

from kmp._backend import backend
from kmp._keras import layers_of, path_of
from kmp.health.report import GradientReport

_UNMOVED = 0.99  # share of a variable's gradients above which it counts as standing still
_LOOKS, _STEPS = 3, 20  # so many in a row, so many steps apart: less says nothing
_NEGLIGIBLE = 1e-6  # gradients below this share of the weights are rounding errors
_CONVERGED = 0.01  # below this share of the largest gradient so far a run has arrived

# Four times the unit roundoff. A gradient that is zero by mathematics, as that of a bias right
# before a batch normalization or of the keys of an attention, is a sum of rounding errors of the
# dtype that the layer computes in.
_NOISE = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
_NOISE_OF_FLOAT32 = 1e-4


class Weight(NamedTuple):
    """A trainable variable, as far as the verdict needs to know it.

    Attributes:
        layer: path of its layer.
        compute_dtype: what the layer computes in.
        dtype: what the variable is stored in.
        is_matrix: whether it has more than one axis.
        moves_rarely: whether an update leaves most of its numbers as they are, and moves the
            others by a whole unit in the last place: bfloat16 that is rounded at random, or half
            precision beside a float32 master.
        network: path of the model inside the model that it belongs to, if a gradient of zeros can
            mean there that the loss does not depend on that model; see `networks_of`.
    """

    layer: str
    compute_dtype: str = "float32"
    dtype: str = "float32"
    is_matrix: bool = True
    moves_rarely: bool = False
    network: str = ""


def networks_of(model: Any) -> dict[int, str]:
    """The path of the innermost model inside `model` for each of its layers, by the layers' ids.

    Empty where a weight that the loss does not depend on has no gradient. In JAX's pure functions
    it has one of zeros, which a target network, or a teacher behind `ops.stop_gradient`, has in
    every step of a sound run.
    """
    nested = [x for x in layers_of(model)[1:] if isinstance(x, Model)]
    if backend.SEES_LOSS:
        return {}
    return {id(layer): path_of(each) for each in nested for layer in layers_of(each)}


class Still(NamedTuple):
    """Weights that stand still.

    Attributes:
        paths: those of the variables.
        of: how many variables were looked at.
        looks: how often in a row they were seen to stand still.
        steps: how many training steps lie between the first and the last of these looks.
    """

    paths: list[str]
    of: int
    looks: int
    steps: int


class Standstill:
    """Counts the looks in a row at which the weights of a run did not move.

    A weight stands still if it has a gradient, not a negligible one, and is the same after the
    update. A run stands still if half of its matrices do, while its gradient has not become small:
    then it has converged.

    Args:
        window: int, micro-batches that gradient accumulation makes one update of.
    """

    def __init__(self, window: int = 1):
        self._window = window
        self._before: GradientReport | None = None
        self._largest_norm = 0.0
        self._looks = self._first = 0

    def see(self, report: GradientReport, weights: Mapping[str, Weight]) -> Still | None:
        """Take in a report; return what stands still, once it has for long enough."""
        before, self._before = self._before, report
        self._largest_norm = max(self._largest_norm, report.grad_norm)
        skips = report.skipped_steps - (before.skipped_steps if before else 0)
        if report.details is None or (skips and self._window == 1):
            return None  # the details may be those of a skipped step, which moves nothing
        watched = self._watched(report, weights)
        paths = [path for path in watched if self._is_still(path, weights[path], report, before)]
        arrived = report.grad_norm < _CONVERGED * self._largest_norm
        if arrived or not paths or 2 * len(paths) < len(watched):
            self._looks = 0
            return None
        self._first = self._first if self._looks else report.step
        self._looks += 1
        steps = report.step - self._first
        if self._looks < _LOOKS or steps < max(_STEPS, 2 * self._window):
            return None
        return Still(paths, len(watched), self._looks, steps)

    def _watched(self, report: GradientReport, weights: Mapping[str, Weight]) -> list[str]:
        norms, weight_norms = report.column("l2_norm"), report.weight_norm
        paths = [
            path
            for path in significant(report, weights)
            if norms[path] > _NEGLIGIBLE * weight_norms[path]
        ]
        return [path for path in paths if weights[path].is_matrix] or paths

    def _is_still(
        self, path: str, weight: Weight, report: GradientReport, before: GradientReport | None
    ) -> bool:
        if report.unmoved_share[path] < _UNMOVED:
            return False
        if self._window == 1 and not weight.moves_rarely:
            return True
        # Most micro-batches, or most numbers, do not move: the norm must be the same as well.
        return (before.weight_norm if before else {}).get(path) == report.weight_norm[path]


class Silence:
    """Counts the looks in a row at which weights had gradients of exactly zero, biases aside.

    If all have, the output has nothing to do with the input any more, and at best a bias still
    moves; but if all become zero that were not, as under a hinge loss, the run has arrived. Half of
    them count as well, unless something moves them all the same, as experts that other batches
    call, or they are all of a network that the loss may not depend on.

    Args:
        decay: returns the share of a weight that decay takes in each step; asked where some rest.
    """

    def __init__(self, decay: Callable[[], float] = lambda: 0.0):
        self._decay = decay
        self._skipped = 0
        self._had_gradients = False
        self._heard: set[str] = set()  # networks that had a gradient
        self._first: dict[str, tuple[int, int]] = {}  # look and step at which a silence began
        self._looks = 0
        self._before: GradientReport | None = None

    def see(self, report: GradientReport, weights: Mapping[str, Weight]) -> Still | None:
        """Take in a report; return the weights, once half have been silent for long enough."""
        skips, self._skipped = report.skipped_steps - self._skipped, report.skipped_steps
        norms, zeros = report.column("l2_norm"), report.column("zero_share")
        known = [path for path in weights if norms.get(path) or zeros.get(path)]
        if skips or not known:
            return None
        self._heard |= {weights[path].network for path in known if norms[path]}
        heard = self._heard and [x for x in known if weights[x].network in {*self._heard, ""}]
        known = heard or known
        paths = [path for path in known if weights[path].is_matrix] or known
        self._looks += 1
        before, self._before = self._before, report
        silent = [path for path in paths if not norms[path]]
        arrived = self._had_gradients and not report.grad_norm
        self._had_gradients |= len(silent) < len(paths)
        if arrived:
            silent = []
        elif silent and len(silent) < len(paths):
            decay = self._decay()
            silent = [path for path in silent if not _was_moved(path, report, before, decay)]
        began = (self._looks, report.step)
        self._first = {path: self._first.get(path, began) for path in silent}
        long = [path for path in silent if self._is_long(path, report.step)]
        if not long or 2 * len(long) < len(paths):
            return None
        look, step = max(self._first[path] for path in long)
        return Still(long, len(paths), self._looks - look + 1, report.step - step)

    def _is_long(self, path: str, now: int) -> bool:
        look, step = self._first[path]
        return self._looks - look + 1 >= _LOOKS and now - step >= _STEPS


def _was_moved(
    path: str, report: GradientReport, before: GradientReport | None, decay: float
) -> bool:
    """Whether a weight has changed since the report before by more than its weight decay."""
    norm, last = report.weight_norm.get(path), before and before.weight_norm.get(path)
    if not (norm and last and before):
        return False
    # Twice, for the learning rate may have been higher.
    return abs(norm - last) > 2 * decay * (report.step - before.step) * last


def significant(report: GradientReport, weights: Mapping[str, Weight]) -> list[str]:
    """The paths of the variables whose gradient is more than rounding errors.

    Left out are those whose norm is small beside the largest in the same layer.
    """
    norms = report.column("l2_norm")
    largest: dict[str, float] = {}
    for path, weight in weights.items():
        largest[weight.layer] = max(largest.get(weight.layer, 0.0), norms.get(path, 0.0))
    return [
        path
        for path, weight in weights.items()
        if path in norms
        and norms[path]
        >= _NOISE.get(weight.compute_dtype, _NOISE_OF_FLOAT32) * largest[weight.layer]
    ]
