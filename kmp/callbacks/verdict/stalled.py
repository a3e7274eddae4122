"""Detectors of STALLED: a run that cannot train whatever the data, and weights that stand still."""

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kmp.callbacks.loss_tracker import RECENT
from kmp.callbacks.verdict.loss_scale import LOCATE, OTHER_MICRO_BATCHES, loses_gradients
from kmp.callbacks.verdict.observation import Detector, Observation, Weight, named
from kmp.callbacks.verdict.states import Verdict
from kmp.health.measure import L2_NORM, MAX_ABS
from kmp.health.report import GradientReport
from kmp.scaling.rules import DynamicLossScale

_UNMOVED = 0.99  # share of a variable's gradients above which it counts as standing still
_LOOKS, _STEPS = 3, 20  # looks in a row, over this many steps: fewer prove nothing
# Steps times numbers: in half precision a step of a hundred-thousandth moves one number in 200.
_RARE = 100_000
_UNFELT = -7.0  # log10 of update over weight: below what float32 keeps of the norm
_NEGLIGIBLE = 1e-6  # gradients below this share of the weights are rounding errors
_CONVERGED = 0.01  # below this share of the largest gradient so far a run has arrived
_FELT = 1e-6  # share of a weight that float32 does not round away
_SMALL_RATE = 1e-7  # a learning rate that float32 weights of usual size round away
_INSENSITIVE = 1e-4  # share of what losses differ by: a smaller change of the loss is none
_PATIENCE = 20  # the most batches between two steps of an optimizer that does step


class _Still(NamedTuple):
    """Weights that stand still, or have no gradient."""

    paths: list[str]
    of: int  # variables that were looked at
    looks: int  # in a row
    steps: int  # between the first and the last of these looks


class FrozenWeights(Detector):
    """STALLED: half of the weight matrices do not move although they have gradients.

    A weight stands still if its gradient is not negligible, and the update leaves it the same or
    practically the same. A run whose gradient has become small has converged instead. If nothing
    has moved since `fit` began, two looks are enough; they may be close together if the learning
    rate is 0.
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
        rare = [look.weights[path].sample for path in paths if look.weights[path].moves_rarely]
        if rare and rate is not None and rate >= _SMALL_RATE:
            far_apart = max(far_apart, _RARE // sum(rare))
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
    if felt and not look.skips:  # if steps were skipped, that is why: other detectors report it
        return (
            f"at a learning rate of {rate:.2g} their gradients would move them",
            "Look at what holds them back: clipnorm, global_clipnorm, clipvalue, a constraint, or "
            "the optimizer's own update.",
        )
    return None


_HIGHEST = DynamicLossScale.max_scale  # by default


class ZeroGradients(Detector):
    """STALLED: the gradients of half of the weights, biases aside, are exactly zero.

    If all of them are zero, the output no longer depends on the input, and at best a bias still
    moves. But if all gradients become zero that were not zero before, as under a hinge loss, or all
    losses become zero that were above it before, the run has converged. Half of the weights are
    enough, or a quarter if these never had another gradient. A weight does not count if something
    moves it all the same, as with experts that other batches call. Nor does it count if all weights
    of its network are like this and the loss may not depend on that network.
    """

    def __init__(self):
        self._skipped = 0
        self._had_gradients = False
        self._losses = math.inf, -math.inf  # the lowest and the highest so far
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

    def _silent(self, look: Observation) -> _Still | None:
        """The weights without a gradient, once they are half and have been for long enough."""
        report = look.report
        skips = report.skipped_steps - self._skipped
        self._skipped = report.skipped_steps
        is_solved = self._is_solved(look.new_losses)
        paths = [] if skips or is_solved else self._watched(look)
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
        return _Still(long, len(paths), self._looks - index + 1, report.step - step)

    def _is_solved(self, losses: Sequence[float]) -> bool:
        """Whether all losses since the last look are zero, the least that there is."""
        lowest, highest = self._losses
        self._losses = min(lowest, *losses, math.inf), max(highest, *losses, -math.inf)
        return bool(losses) and not any(losses) and lowest >= 0 and highest > 0

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


class InsensitiveLoss(Detector):
    """STALLED: the loss hardly depends on the weights, and never has since the watch began.

    If each weight changes by its own size, or by 1 if that is more, the loss changes by about the
    product of these sizes and the gradients. If that is less than a ten-thousandth of the spread
    between the losses of batches, the gradients are rounding errors, or too small to achieve
    anything.
    """

    def __init__(self):
        self._losses: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._largest = 0.0  # change of the loss, over all looks
        self._looks = self._first = 0

    def see(self, look: Observation) -> Verdict | None:
        report, sizes = look.report, look.report.weight_norm
        self._losses.extend(filter(math.isfinite, look.new_losses))
        norms = report.column("l2_norm")
        known = [path for path in look.weights if path in norms]
        change = sum(norms[path] * max(sizes.get(path, 0.0), 1.0) for path in known)
        if not math.isfinite(change) or not (sizes and self._losses):
            return None
        self._largest = max(self._largest, change)
        self._looks += 1
        self._first = self._first or report.step
        low, high = np.quantile(self._losses, (0.25, 0.75))
        is_long = self._looks >= _LOOKS and report.step - self._first >= _STEPS
        if not is_long or not 0 < self._largest < _INSENSITIVE * (high - low):
            return None
        return Verdict(
            "STALLED",
            known[0],
            f"the loss hardly depends on the weights: if all changed by their own size, it would "
            f"change by {self._largest:.1g}, and losses of batches differ by {high - low:.1g}",
            "Look for a softmax over a single unit, for outputs that are saturated, and for "
            "targets that are far larger than the outputs: divide them by a constant.",
        )


class NothingToTrain(Detector):
    """STALLED: the optimizer has no weights, or none that holds a number."""

    def see(self, look: Observation) -> Verdict | None:
        paths, weights = look.report.paths, look.weights
        if not all(path in weights and not weights[path].sample for path in paths):
            return None
        if any(weight.sample for weight in weights.values()):
            return Verdict(
                "STALLED",
                "",
                "the optimizer has no weight to train: all were frozen when it was built",
                "Set layer.trainable = True for some of them, and compile the model again.",
            )
        if paths:
            return Verdict(
                "STALLED",
                paths[0],
                "there is nothing to train: all trainable weights of the model are empty",
                "Look for an axis of size 0, in the inputs or in the arguments of a layer.",
            )
        return Verdict(
            "STALLED",
            "",
            "there is nothing to train: the model has no trainable weights",
            "If it is to learn, add a layer that has some, such as keras.layers.Dense. For the "
            "loss alone call model.evaluate.",
        )


class NoSteps(Detector):
    """STALLED: batches go by, and the optimizer takes no step, not even one that is skipped.

    An optimizer that has stepped before may take only every few batches, as a generator's does.
    """

    def __init__(self):
        self._step = self._batches = 0  # the last step; batches that have gone by since

    def see(self, look: Observation) -> Verdict | None:
        step = look.report.step
        self._batches = look.batches + (self._batches if step == self._step else 0)
        took_one, self._step = step != self._step, step
        if took_one or not look.report.paths:
            return None
        if look.losses is not None and not look.batches:
            return no_steps(0)
        return no_steps(self._batches) if self._batches >= (_PATIENCE if step else 2) else None


def no_steps(batches: int) -> Verdict:
    """STALLED, for an optimizer that took no step in so many batches, or that was given none."""
    if not batches:
        return Verdict(
            "STALLED",
            "",
            "no batch came in this epoch",
            "Write drop_remainder=False if the dataset has fewer examples than a batch; the "
            "dataset of a generator that has run out stays empty.",
        )
    return Verdict(
        "STALLED",
        "",
        f"the optimizer took no step in the last {batches} batches",
        "Your train_step has to hand it the gradients: write self.optimizer.apply(gradients, "
        "self.trainable_variables), or on JAX self.optimizer.stateless_apply(...), and return the "
        "variables that it gives. If another optimizer trains the model, watch that one: "
        "GradientHealth(optimizer=...).",
    )


class UnscaledLoss(Detector):
    """STALLED: gradients are divided by a scale that nothing has multiplied the loss by."""

    def see(self, look: Observation) -> Verdict | None:
        report = look.report
        if not report.step or report.loss_is_scaled:
            return None
        return Verdict(
            "STALLED",
            "",
            f"nothing scales the loss, but gradients are divided by a loss scale of "
            f"{report.loss_scale:g}",
            "In your train_step, write loss = self.optimizer.scale_loss(loss) before taking "
            "gradients, on JAX self.optimizer.stateless_scale_loss(optimizer_variables, loss); or "
            'kmp.scaled(..., loss_scale="none").',
        )


class ClippedWhileScaled(Detector):
    """STALLED: a train step clips gradients that the loss scale still multiplies.

    Their scaled norm, or the largest of a variable, is then the same number at each look, though
    the gradients differ, and small for a norm that was multiplied by the scale. Where single
    numbers were clipped, most variables have the same largest one.
    """

    _LOOKS = 4
    _LEAST_SCALE, _LARGEST = 1024.0, 10.0
    _WAYS = (
        ("clipvalue", "largest number"),
        ("clipnorm", "norm"),
        ("global_clipnorm", "norm"),
    )
    _SAME, _DIFFERENT = 1e-3, 1e-2  # relative: half precision rounds what is clipped

    def __init__(self):
        self._step: int | None = None
        self._sizes: collections.deque[np.ndarray] = collections.deque(maxlen=self._LOOKS)

    def see(self, look: Observation) -> Verdict | None:
        report = look.report
        if report.measured_step != self._step:
            self._step = report.measured_step
            largest = report.matrix[:, MAX_ABS].astype("float64")
            value = self._shared(largest)
            norms = [report.matrix[:, L2_NORM].max(initial=0.0), report.grad_norm]
            self._sizes.append(np.array([value, *norms, *largest]) * report.loss_scale)
        if len(self._sizes) < self._LOOKS or report.loss_scale < self._LEAST_SCALE:
            return None
        least, most = np.min(self._sizes, axis=0), np.max(self._sizes, axis=0)
        if not np.isfinite(most).all():
            return None
        highest = np.minimum((1 + self._SAME) * least[:3], self._LARGEST)
        same = (least[:3] > 0) & (most[:3] <= highest)
        if (most[3:] <= (1 + self._DIFFERENT) * least[3:]).all():
            same[1:] = False  # a batch of all data may have such norms
        if not same.any():
            return None
        clipped = most[:3][same][0]
        way, of = self._WAYS[np.argmax(same)]
        return Verdict(
            "STALLED",
            "",
            f"the gradients' {of} times the loss scale was {clipped:.3g} at each of the last "
            f"{self._LOOKS} looks: they are clipped before they are divided by the scale, which "
            "leaves next to nothing of them",
            f"Do not clip them in your train_step: give the optimizer {way}={clipped:.3g}, which "
            "clips them after the division.",
        )

    def _shared(self, largest: np.ndarray) -> float:
        """The largest of all numbers if most of several variables have it, else 0."""
        most = largest.max(initial=0.0)
        number = np.count_nonzero((1 + self._SAME) * largest >= most)
        return most if number > max(1, len(largest) / 2) else 0.0


_NOTHING = 1e-6  # l2 norm of a kernel or an embedding


class VanishedWeights(Detector):
    """STALLED: half of the weight matrices have norms of next to nothing.

    Where a matrix begins at zero, as an adapter's does, its first update is larger.
    """

    def see(self, look: Observation) -> Verdict | None:
        weights, norms = look.weights, look.report.weight_norm
        matrices = {x: norm for x, norm in norms.items() if x in weights and weights[x].is_matrix}
        gone = [path for path, norm in matrices.items() if 0 < norm < _NOTHING]
        if not gone or 2 * len(gone) < len(matrices):
            return None
        return Verdict(
            "STALLED",
            gone[0],
            f"{len(gone)} of {len(matrices)} weights, biases aside, have norms below {_NOTHING:g}",
            "Weight decay or a regularizer has taken them to nothing: lower it. Optimizers "
            "multiply weight_decay with the learning rate.",
        )
