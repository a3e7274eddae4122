"""Detectors of steps that are far too large: of a run that diverges, and of one huge batch.

The loss and the gradients of a huge batch are finite, so its step is applied. It may throw the
weights far away, and optimizers such as Adam, which divide by the size of past gradients, remember
it for thousands of steps, in which the weights hardly move.
"""

import collections
import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kmp.callbacks.verdict.nonfinite import corrupted
from kmp.callbacks.verdict.observation import Corrupted, Detector, Observation, Weight
from kmp.callbacks.verdict.states import Verdict
from kmp.health.report import GradientReport
from kmp.health.telemetry import FIRST_STEPS

_GROWN_GRADIENT = 100  # how many times as large a gradient has to be to count as exploding
_LOOKS = 10  # whose updates are compared

# Of a huge batch: times the largest loss of the batches before. That is 10 times the gradient where
# the loss is a square, which `kmp.SkipSpikes` takes for a spike too.
_HUGE = 100.0
_BEFORE = 5  # losses that have to be known before a huge one
_SINCE = 20  # after it: a momentum of 0.9 has then forgotten it
_LATELY = 50  # losses that are compared
_HIGHER = 1.5  # times the median before
_DEVIATIONS = 3.0  # standard deviations by which more losses must be higher than by chance
_REMEMBERED = 30.0  # times the gradients since: Adam's steps are smaller by that factor
_FORGOTTEN = 1000  # steps, in which Adam's second moment falls to a third
# Share of the huge loss: batches above it are of the same kind. If all are, none of them is huge.
_AS_HUGE = 0.1
_LIMIT_KNOWN = 16  # steps after which `kmp.SkipSpikes` can tell a spike


class _Ratios:
    """The medians of log10(update / weight) of the last looks after the first 100 steps."""

    def __init__(self):
        self.last: collections.deque[float] = collections.deque(maxlen=_LOOKS)

    def see(self, look: Observation) -> None:
        """Take in a look. The first ones do not count: weights may begin at zero."""
        if math.isfinite(look.update_ratio) and look.report.step > FIRST_STEPS:
            self.last.append(look.update_ratio)


def or_clip(look: Observation) -> str:
    """What else to do about large gradients; nothing if all are clipped already."""
    return "" if look.run.clips() else ", or clip with global_clipnorm=1.0"


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

    A loss in large units has large gradients. They are sound if they have not grown, and if the
    optimizer turns them into updates of the usual size.
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
            f"Lower the learning rate{or_clip(look)}.",
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
_LARGER = 1.2  # times the first norms, where steps are that large: in sound runs steps shrink
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


class _Batch(NamedTuple):
    """A batch with a huge loss."""

    step: int
    loss: float
    times: float  # the largest loss before


class HugeBatch(Detector):
    """UNSTABLE: one batch had a huge loss, and its step has done harm.

    Either the losses since the batch are higher than those before it, by their ranks and by their
    medians, which a few more rare batches do not change. Or the optimizer's slots still hold the
    batch's gradient: Lion goes on in its direction, and Adam divides by its size. If all losses are
    about as high from then on, the data have changed, or training diverges.

    One bad row comes up once per epoch. If an epoch has several such batches, as when rare labels
    have large weights, it is sound that the slots remember them. Higher losses are sound too once
    an epoch has no such batch: the model has learned those labels, at the others' expense.
    """

    def __init__(self):
        self._begin_fit(None)

    def _begin_fit(self, start: GradientReport | None) -> None:
        self._fit_start = start
        self._in_epoch = 0  # huge batches since the last epoch's end
        self._forget(())

    def _forget(self, before: Iterable[float]) -> None:
        """Begin anew after these losses."""
        self._before: collections.deque[float] = collections.deque(before, maxlen=_LATELY)
        self._since: collections.deque[float] = collections.deque(maxlen=_LATELY)
        self._batch: _Batch | None = None
        self._are_usual = False  # whether an epoch has had several
        self._norms: dict[str, float] = {}  # the largest of the gradients at looks since, by path

    def see(self, look: Observation) -> Verdict | None:
        if look.fit_start is not self._fit_start:
            self._begin_fit(look.fit_start)
        for i, loss in enumerate(look.new_losses, start=1):
            self._take(loss, look.report.step - len(look.new_losses) + i)
        self._end_look(look.is_epoch_end)
        if self._batch is None or len(self._since) < _SINCE:
            return None
        for path, norm in look.report.column("l2_norm").items():
            self._norms[path] = max(norm, self._norms.get(path, 0.0))
        harm = self._risen() or self._remembered(look)
        if harm is None:
            if look.report.step - self._batch.step > _FORGOTTEN:
                self._forget(self._since.copy())
            return None
        batch, (reason, remedy) = self._batch, harm
        without, counting = _without(look, batch), _counting(look)
        return Verdict(
            "UNSTABLE",
            "",
            f"the loss of step {batch.step} was {batch.loss:.3g}, {batch.times:.2g} times the "
            f"largest of those before it, and {reason}",
            "kmp.debug.explain_spike(model, x, y, (other_x, other_y)) tells what is unusual about "
            f"that batch. If it is bad, {remedy}begin again{without}.{counting}",
        )

    def _end_look(self, is_epoch_end: bool) -> None:
        """Count the epoch's huge batches. If they were the data's own, they may be learned now."""
        if self._are_usual and is_epoch_end and not self._in_epoch:
            self._forget(self._since.copy())
        self._are_usual = self._are_usual or self._in_epoch > 1
        if is_epoch_end:
            self._in_epoch = 0

    def _risen(self) -> tuple[str, str] | None:
        """If the losses have risen, return what is seen, and what the user may do instead."""
        before, since = statistics.median(self._before), statistics.median(self._since)
        if since <= _HIGHER * before or deviations(self._before, self._since) < _DEVIATIONS:
            return None
        latest = f"the median of the latest {len(self._since)}"
        return f"{latest} is {since:.3g}, {before:.3g} before", ""

    def _remembered(self, look: Observation) -> tuple[str, str] | None:
        """The same if the optimizer's slots hold far larger gradients than came since."""
        if self._are_usual or not look.is_epoch_end:
            return None
        slots = look.run.remembered_gradients()
        times = [slots[x] / norm for x, norm in self._norms.items() if norm and x in slots]
        if not times or not statistics.median(times) > _REMEMBERED:
            return None
        return (
            f"the optimizer's slots still hold gradients {statistics.median(times):.2g} times as "
            "large as those since",
            "compile the model with a new optimizer, or ",
        )

    def _take(self, loss: float, step: int) -> None:
        """Take in the loss of a step, whose number is a guess where steps were skipped."""
        if not 0 < loss < math.inf:
            return  # not finite: other detectors report it. Not positive: ratios mean nothing
        if self._batch:
            if loss < _AS_HUGE * self._batch.loss:
                self._since.append(loss)
            else:
                self._in_epoch += 1
        elif len(self._before) >= _BEFORE and loss > _HUGE * max(self._before):
            self._batch = _Batch(step, loss, loss / max(self._before))
            self._in_epoch += 1
        else:
            self._before.append(loss)


def deviations(before: collections.deque[float], since: collections.deque[float]) -> float:
    """By how many standard deviations of chance the ranks of `since` are above those of `before`.

    Source: the statistic of Mann and Whitney 1947, by its mean and its variance.
    """
    n, m = len(before), len(since)
    above = sum((y > x) + 0.5 * (y == x) for x in before for y in since)
    return (above - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)


def _without(look: Observation, batch: _Batch) -> str:
    """How to begin again so that the batch is left out."""
    if batch.step <= _LIMIT_KNOWN or look.report.skipped_spikes is not None:
        return " without it"
    return (
        ', or from a checkpoint from before, with kmp.scaled(..., spikes="skip"), which leaves '
        "such a step out"
    )


def _counting(look: Observation) -> str:
    """How to begin again if the batch is to count, as one of rare samples with a large weight."""
    how = "" if look.run.clips() else " with global_clipnorm=1.0"
    if look.in_float16 and look.report.overflow_skips:
        how += ' in "mixed_bfloat16", where its gradients do not overflow'
    return f" If its samples are rare and weigh much, begin again{how}." if how else ""


_FALL = 30.0  # times; noise in the gradients makes Adam's updates 10 times smaller
_FELT = 1e-6  # share of the weights below which their own rounding shrinks an update
_COMPARED = 3  # epochs
_MEMORY = 20  # steps: a momentum that changes its sign stands nearly still in one
_ENOUGH = 30  # numbers that have moved by a unit in their last place


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

    Each epoch is represented by its last step that updated the weights. Later steps are not
    compared with one that was too small. Where epochs have few steps, it takes several.
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
        ratios = {
            x: r
            for x, r in report.update_ratio.items()
            if x in watched and _is_measured(weights[x], report.unmoved_share[x])
        }
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
        if now.step - self._sound[-1].step < _MEMORY:
            return None
        reason = (
            f"updates are {fall:.0f} times smaller than after step {step}, which neither the "
            "gradients nor the learning rate explain"
        )
        slowest = min(ratios, key=lambda x: ratios[x])
        return corrupted([Corrupted(slowest, reason, of_layer=False)])


def _is_measured(weight: Weight, unmoved_share: float) -> bool:
    """Whether enough numbers have moved to tell how long the step was."""
    return not weight.moves_rarely or (1 - unmoved_share) * weight.sample >= _ENOUGH


class SpikeBudget(Detector):
    """UNSTABLE: so many steps were left out as spikes that large gradients are applied again."""

    def see(self, look: Observation) -> Verdict | None:
        if not look.spikes or look.report.spike_limit is not None:
            return None
        return Verdict(
            "UNSTABLE",
            look.spikes[0].variable,
            f"{look.num_spikes} of the last {look.steps} steps were left out as spikes. Their "
            "budget is spent: gradients of that size are applied now",
            "They are not rare. If the data have changed, go on: the limit has followed them. If "
            f"many batches are bad, look at them{or_clip(look)}.",
        )


def told_spikes(look: Observation) -> tuple[str, str]:
    """What a sound run says of the steps of this epoch that were left out, and what to do."""
    if not look.spikes:
        return "", ""
    steps = ", ".join(str(event.step) for event in look.spikes[:3])
    most = max(look.spikes, key=lambda event: event.norm / event.limit)
    return (
        f", {look.num_spikes} of them as spikes (step {steps}"
        + (", ..." if look.num_spikes > 3 else "")
        + f"; gradients up to {most.norm / most.limit:.2g} times the limit, most in "
        f"{most.variable})",
        "Look at the batches of the spikes: they are bad, or rare and important.",
    )
