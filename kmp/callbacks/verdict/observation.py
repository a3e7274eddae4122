"""One look at a training run, and what every detector of a verdict does with it."""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import Model, ops
from keras.layers import BatchNormalization, InputLayer

from kmp._backend import backend
from kmp._backend.types import Tensor
from kmp._keras import layers_of, own_weights, path_of
from kmp._keras.optimizer import inner_optimizer_of, parts_of
from kmp._keras.training import buffers_of, state_of
from kmp.callbacks.loss_tracker import RECENT, read_losses
from kmp.callbacks.verdict.states import Limits, Verdict
from kmp.health.details import SAMPLE_SIZE
from kmp.health.report import GradientReport, OverflowEvent, SpikeEvent
from kmp.scaling.inner import highest_rate, weight_decay
from kmp.scaling.restored import slots_by_path
from kmp.scaling.rules import DynamicLossScale, dynamic

_COMPARED = 8  # matrices whose growth is known: one small program, whatever the model's size
_EPSILON_OF_TORCH = 1e-5  # of its batch normalizations, by default

# Four times the unit roundoff. A gradient that is zero by mathematics, as that of a bias right
# before a batch normalization or of the keys of an attention, is a sum of rounding errors of the
# dtype that the layer computes in.
_NOISE = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
_NOISE_OF_FLOAT32 = 1e-4


class Weight(NamedTuple):
    """What a detector needs to know of a trainable variable.

    Attributes:
        layer: path of its layer.
        compute_dtype: what the layer computes in.
        dtype: what the variable is stored in.
        is_matrix: whether it has more than one axis.
        moves_rarely: whether an update leaves most of its numbers as they are, and moves the
            others by a whole unit in the last place: bfloat16 that is rounded at random, or half
            precision beside a float32 master.
        network: path of the nested model that it belongs to, if a gradient of zeros can mean that
            the loss does not depend on that nested model; see `networks_of`.
        sample: how many of its numbers are looked at in each step.
    """

    layer: str
    compute_dtype: str = "float32"
    dtype: str = "float32"
    is_matrix: bool = True
    moves_rarely: bool = False
    network: str = ""
    sample: int = SAMPLE_SIZE


class Run:
    """The model and the optimizer of a watched `fit`, for what no report holds.

    Args:
        model: `keras.Model` that trains.
        optimizer: the `kmp.LossScaleOptimizer` that is watched.

    Attributes:
        first_loss: the loss of the first batch of this `fit`; None before the first look, NaN if
            the first look could not read it any more.
        first_norms: the norms of some of the weight matrices as this `fit` begins, by their paths.
    """

    def __init__(self, model: Any, optimizer: Any):
        self.model, self.optimizer = model, optimizer
        self.first_loss: float | None = None
        self.first_norms = matrix_norms(model)
        self._counted = read_losses(model)[0]
        self._networks = networks_of(model)

    def new_losses(self) -> list[float]:
        """Read the losses since the last call, or the latest 128 of them, in one transfer."""
        counted, recent = read_losses(self.model)
        new, self._counted = counted - self._counted, counted
        known = min(new, len(recent))
        losses = recent[np.arange(counted - known, counted) % RECENT].tolist()
        if self.first_loss is None:
            self.first_loss = losses[0] if 0 < new == known else math.nan
        return losses

    def layers(self) -> list[keras.Layer]:
        """All layers of the model."""
        return layers_of(self.model)

    def weights(self, layers: Sequence[keras.Layer]) -> dict[str, Weight]:
        """The trainable variables of `layers` by their paths."""
        rarely, found = self.optimizer.moves_rarely, {}
        for layer in layers:
            network = self._networks.get(id(layer), "")
            for v in own_weights(layer):
                found[v.path] = Weight(
                    layer.path,
                    layer.compute_dtype,
                    v.dtype,
                    is_matrix=len(v.shape) > 1,
                    moves_rarely=rarely(v),
                    network=network,
                    sample=min(math.prod(v.shape), SAMPLE_SIZE),
                )
        return found

    def sync(self) -> None:
        """Bring the state out of JAX's training loop into the variables."""
        getattr(self.model, "jax_state_sync", lambda: None)()

    def learning_rate(self, paths: Sequence[str]) -> float:
        """The highest learning rate of the variables with these paths, in the last step."""
        self.sync()
        return highest_rate(self.optimizer, paths)

    def clips(self) -> bool:
        """Whether all optimizers clip the norm of their gradients together, to 1 at most."""
        return all((x.global_clipnorm or math.inf) <= 1 for x in parts_of(self.optimizer))

    def weight_decay(self) -> float:
        """The largest share of a weight that weight decay takes in a step."""
        self.sync()
        return weight_decay(self.optimizer)

    def nonfinite_state(self, layers: Sequence[keras.Layer]) -> list["Corrupted"]:
        """The state of the layers and of the optimizer that is not finite."""
        return nonfinite_state(self.model, layers, self.optimizer)

    def moving_variances(self, layers: Sequence[keras.Layer]) -> list["MovingVariance"]:
        """The largest moving variance of each batch normalization."""
        return moving_variances(self.model, layers)

    def remembered_gradients(self) -> dict[str, float]:
        """Return how large the gradients are that the optimizer's slots hold, by weight path.

        It is the l2 norm of the momentum slot or, if that is larger, the square root of the sum
        over the velocity slot, which holds squares; the names are Keras's. SGD's momentum includes
        the learning rate. Some weights may be missing, or all.
        """
        return remembered_gradients(self.model, self.optimizer)


@dataclasses.dataclass(frozen=True, eq=False)
class Observation:
    """One look at a training run.

    Attributes:
        report: what the steps have measured.
        run: the model and the optimizer, for what the report does not hold.
        epoch_start: the report at the end of the epoch before; None at the beginning of training.
        fit_start: the report at the beginning of this `fit`; None if the optimizer was new.
        losses: at the end of an epoch its losses, in training and, if there is one, in validation;
            None within an epoch.
        new_losses: of the steps since the look before that were not skipped, or the latest 128.
        batches: at the end of an epoch, how many batches it had, or fewer; 0 within one.
        layers: all layers of the model.
        weights: the trainable variables by their paths.
        rule: the loss-scaling strategy.
        limits: where the verdict turns.
        window: micro-batches that gradient accumulation makes one update of, or the most of them if
            several optimizers differ.
        drops_windows: whether one overflow discards a whole window of gradient accumulation.
    """

    report: GradientReport
    run: Run
    epoch_start: GradientReport | None = None
    fit_start: GradientReport | None = None
    losses: Mapping[str, float] | None = None
    new_losses: Sequence[float] = ()
    batches: int = 0
    layers: Sequence[keras.Layer] = ()
    weights: Mapping[str, Weight] = dataclasses.field(default_factory=dict)
    rule: Any = None
    limits: Limits = dataclasses.field(default_factory=Limits)
    window: int = 1
    drops_windows: bool = False

    @property
    def is_epoch_end(self) -> bool:
        """Whether an epoch has ended.

        Only then is all state read: it is too large to be read at every look.
        """
        return self.losses is not None

    @functools.cached_property
    def dynamic(self) -> DynamicLossScale | None:
        """The loss-scaling strategy if it is kmp's dynamic one."""
        return dynamic(self.rule)

    @property
    def scale_is_fixed(self) -> bool:
        """Whether the loss scale never moves."""
        return getattr(self.rule, "is_fixed", False)

    @functools.cached_property
    def steps(self) -> int:
        """Steps since the last epoch's end."""
        return self.report.step - (self.epoch_start.step if self.epoch_start else 0)

    @functools.cached_property
    def skips(self) -> int:
        """Steps skipped since the last epoch's end."""
        before = self.epoch_start.skipped_steps if self.epoch_start else 0
        return self.report.skipped_steps - before

    @functools.cached_property
    def events(self) -> list[OverflowEvent]:
        """The overflows since the last epoch's end, the latest first; at most 16 are known."""
        since = self.epoch_start.step if self.epoch_start else 0
        return [event for event in self.report.events if event.step > since]

    @functools.cached_property
    def spikes(self) -> list[SpikeEvent]:
        """The steps since the last epoch's end that were left out as spikes; at most 16."""
        since = self.epoch_start.step if self.epoch_start else 0
        return [event for event in self.report.spikes if event.step > since]

    @functools.cached_property
    def num_spikes(self) -> int:
        """How many steps since the last epoch's end were left out as spikes."""
        before = (self.epoch_start.skipped_spikes if self.epoch_start else 0) or 0
        return (self.report.skipped_spikes or 0) - before

    @functools.cached_property
    def num_held(self) -> int:
        """In how many steps since the last epoch's end batch statistics were held."""
        before = (self.epoch_start.held_statistics if self.epoch_start else 0) or 0
        return (self.report.held_statistics or 0) - before

    @functools.cached_property
    def in_float16(self) -> bool:
        """Whether a layer's policy computes in float16, or may. True if no layer is known."""
        if not (self.layers or self.weights):
            return True
        inside = [x for x in self.layers[1:] if not isinstance(x, InputLayer)]
        if any(getattr(x.dtype_policy, "adapts", False) for x in self.layers):
            return True
        return "float16" in {x.compute_dtype for x in (*inside, *self.weights.values())}

    @functools.cached_property
    def update_ratio(self) -> float:
        """The median log10(update norm / weight norm) of the matrices; NaN if none has moved.

        Over all variables if there are no matrices.
        """
        ratios = self.report.update_ratio
        matrices = [p for p in self.report.paths if p in self.weights and self.weights[p].is_matrix]
        chosen = [ratios[p] for p in matrices or self.report.paths if p in ratios]
        return float(np.median(chosen)) if chosen else math.nan

    @functools.cached_property
    def growth(self) -> dict[str, float]:
        """How many times as large weight matrices are as when `fit` began; of some, or none."""
        before, now = self.run.first_norms, self.report.weight_norm
        return {path: now[path] / norm for path, norm in before.items() if norm and path in now}

    @functools.cached_property
    def significant(self) -> list[str]:
        """The paths of the variables whose gradient is more than rounding errors."""
        return significant(self.report, self.weights)

    @functools.cached_property
    def nonfinite_state(self) -> list["Corrupted"]:
        """State other than weights that is not finite; empty within an epoch."""
        return self.run.nonfinite_state(self.layers) if self.is_epoch_end else []

    @functools.cached_property
    def moving_variances(self) -> list["MovingVariance"]:
        """The largest moving variance of each batch normalization."""
        return self.run.moving_variances(self.layers)


def significant(report: GradientReport, weights: Mapping[str, Weight]) -> list[str]:
    """The paths of the variables whose gradient is more than rounding errors.

    Variables whose gradient norm is small compared with the largest in the same layer are left out.
    """
    norms = report.column("l2_norm")
    largest: dict[str, float] = {}
    for path, weight in weights.items():
        largest[weight.layer] = max(largest.get(weight.layer, 0.0), norms.get(path, 0.0))
    return [
        path
        for path, weight in weights.items()
        if path in norms
        and weight.sample
        and norms[path]
        >= _NOISE.get(weight.compute_dtype, _NOISE_OF_FLOAT32) * largest[weight.layer]
    ]


def networks_of(model: Any) -> dict[int, str]:
    """The path of the innermost model inside `model` for each of its layers, by the layers' ids.

    Empty on backends where a weight that the loss does not depend on has no gradient at all. In
    JAX's pure functions such a weight has a gradient of zeros. The weights of a target network, or
    of a teacher behind `ops.stop_gradient`, have one in every step of a sound run.
    """
    nested = [x for x in layers_of(model)[1:] if isinstance(x, Model)]
    if backend.SEES_LOSS:
        return {}
    return {id(layer): path_of(each) for each in nested for layer in layers_of(each)}


# State other than weights


class Corrupted(NamedTuple):
    """A ruined variable other than a weight, and what is wrong with it."""

    path: str
    reason: str
    of_layer: bool  # whether it belongs to a layer, not to the optimizer


class MovingVariance(NamedTuple):
    """The moving variance of a batch normalization."""

    path: str
    largest: float
    epsilon: float  # that the layer adds to it


def nonfinite_state(model: Any, layers: Sequence[keras.Layer], optimizer: Any) -> list[Corrupted]:
    """Slots, averaged weights and moving statistics that are not finite.

    In layers other than BatchNormalization inf may be intended, as in a mask: there only NaN
    counts.
    """
    pairs = [(v, layer) for layer in layers for v in state_of(layer) if _has_floats(v)]
    slots = [v for v in inner_optimizer_of(optimizer).variables if _has_floats(v)]
    values = backend.read(model, [v for v, _ in pairs], each=True)
    values += backend.read(model, slots)  # which replicas have in common
    pairs += [(v, None) for v in slots]
    if not values:
        return []
    sound = ops.convert_to_numpy(backend.are_finite(values)).copy()
    for i in np.flatnonzero(~sound):
        v, layer = pairs[i]
        is_statistic = isinstance(layer, BatchNormalization) or _is_torchs(v)
        may_hold_inf = layer and not is_statistic
        sound[i] = may_hold_inf and not bool(ops.any(ops.isnan(values[i])))
    sound = ops.convert_to_numpy(backend.over_processes(model, sound, ops.all))
    lost = [pairs[i] for i in np.flatnonzero(~sound)]
    return [
        Corrupted(v.path, f"{v.path.split('/')[-1]} holds inf or NaN", of_layer=layer is not None)
        for v, layer in lost
    ]


def remembered_gradients(model: Any, optimizer: Any) -> dict[str, float]:
    """See `Run.remembered_gradients`."""
    slots = [
        (path, slot)
        for path, each in slots_by_path(optimizer).items()
        for slot in each
        if slot.name.endswith(("_momentum", "_velocity")) and _has_floats(slot)
    ]
    if not slots:
        return {}
    values = backend.read(model, [slot for _, slot in slots])
    norms, roots = ops.convert_to_numpy(_norms_and_roots(values)).tolist()
    found: dict[str, float] = {}
    for (path, slot), norm, root in zip(slots, norms, roots, strict=True):
        size = norm if slot.name.endswith("_momentum") else root
        found[path] = max(found.get(path, 0.0), size)
    return found


@backend.compiled
def _norms_and_roots(values: Sequence[Tensor]) -> Tensor:
    """float32[2, n]: each tensor's l2 norm, and the root of the sum of its absolute values."""
    sizes = [ops.abs(ops.cast(x, "float32")) for x in values]
    norms = [ops.sqrt(ops.sum(ops.square(x))) for x in sizes]
    return ops.stack([ops.stack(norms), ops.stack([ops.sqrt(ops.sum(x)) for x in sizes])])


def matrix_norms(model: Any) -> dict[str, float]:
    """The l2 norms of at most 8 of the weight matrices of a model, from its first to its last."""
    matrices = [v for v in model.trainable_variables if len(v.shape) > 1 and _has_floats(v)]
    places = np.linspace(0, len(matrices) - 1, min(len(matrices), _COMPARED)).astype(int)
    chosen = [matrices[i] for i in places]
    if not chosen:
        return {}
    norms = ops.convert_to_numpy(_norms(backend.read(model, chosen))).tolist()
    return {v.path: norm for v, norm in zip(chosen, norms, strict=True)}


@backend.compiled
def _norms(values: Sequence[Tensor]) -> Tensor:
    return ops.stack([ops.sqrt(ops.sum(ops.square(ops.cast(x, "float32")))) for x in values])


def moving_variances(model: Any, layers: Sequence[keras.Layer]) -> list[MovingVariance]:
    """The largest moving variance of each batch normalization, PyTorch's own included."""
    norms = (x for x in layers if isinstance(x, BatchNormalization))
    pairs = [(layer.moving_variance, layer.epsilon) for layer in norms if layer.built]
    buffers = (x for layer in layers for x in buffers_of(layer))
    pairs += [(x, _EPSILON_OF_TORCH) for x in buffers if _is_torchs(x)]
    if not pairs:
        return []
    values = backend.read(model, [v for v, _ in pairs], each=True)
    maxima = backend.over_processes(model, _maxima(values), ops.max)
    largest = ops.convert_to_numpy(maxima).tolist()
    found = zip(pairs, largest, strict=True)
    return [MovingVariance(v.path, now, epsilon) for (v, epsilon), now in found]


@backend.compiled
def _maxima(values: Sequence[Tensor]) -> Tensor:
    return ops.stack([ops.cast(ops.max(x), "float32") for x in values])


def _has_floats(variable: Any) -> bool:
    return keras.backend.is_float_dtype(variable.dtype) and 0 not in variable.shape


def _is_torchs(variable: Any) -> bool:
    """Whether it is the moving variance of one of PyTorch's own batch normalizations."""
    return variable.path.endswith("/running_var")


class Detector(abc.ABC):
    """One cause of a verdict: what it remembers, when it speaks, and its words.

    A detector lives as long as the callback watches the same run, over several calls of `fit`. A
    detector that must start over with each `fit` remembers `look.fit_start`, and checks whether a
    look has a different one, as `FrozenWeights` does.
    """

    @abc.abstractmethod
    def see(self, look: Observation) -> Verdict | None:
        """Take in a look; return a verdict if the cause is there.

        Every detector sees every look, also if one before it in the list has spoken.
        """


def named(paths: list[str]) -> str:
    """The first paths, for a sentence."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
