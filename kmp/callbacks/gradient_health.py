"""`GradientHealth`: the optimizer's measurements in logs, warnings and TensorBoard."""

import collections
import math
import os
import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from kmp._common import whole_number
from kmp._keras import layers_of
from kmp.callbacks.cadence import Cadence, read_report, require_measuring_optimizer
from kmp.callbacks.dashboard import Dashboard
from kmp.callbacks.protection import Claim, protect_fit, release
from kmp.callbacks.verdict import Limits, Verdict, judge, significant
from kmp.health.measure import FIRST_STEPS
from kmp.health.report import GradientReport
from kmp.scaling.rules import NoOpLossScale

_WINDOW = 200  # steps that a verdict looks back on


class GradientHealth(keras.callbacks.Callback):
    """Watches the gradients of a model that is compiled with `kmp.scaled`.

    At each `update_freq`-th training step, and at the end of each epoch, it reads what the
    compiled step has measured, in one transfer. In between nothing leaves the device, and nothing
    is missed: overflows and skipped steps are counted inside the step.

    The logs of each epoch, and so History, the progress bar and CSVLogger, gain

    ```
    loss_scale       the scale of the next step
    skipped_steps    steps skipped since training began
    grad_norm        l2 norm of the last step's gradient over all variables, in true units
    headroom_bits    how often the scale could double before that gradient leaves float16
    degraded_share   share of its non-zero values that have fewer bits in float16, at that scale
    lost_share       share of them that would be zero in float16
    update_ratio     log10 of update norm over weight norm, median of the variables; healthy near -3
    verdict          0 HEALTHY, 1 CALIBRATING, 2 UNDERFLOW, 3 UNSTABLE, 4 STALLED, 5 COLLAPSED,
                     6 FORWARD-NAN
    ```

    Put it before callbacks that read these keys.

    A skipped step leaves nothing behind in Keras's loop either: `loss` becomes the mean over the
    steps whose loss was finite (NaN if there was none), and moving statistics of any layer, Keras's
    BatchNormalization included, stay bit-equal (under `tf.distribute` they do not).

    Args:
        log_dir: directory for TensorBoard's event files, or None for none. Needs no TensorFlow.
        update_freq: int >= 1, training steps between two looks, whatever `steps_per_execution` is.
        min_grad_norm: float, the l2 norm below which a variable's gradient is reported as
            vanishing; in true units.
        max_grad_norm: float, the l2 norm above which a gradient is exploding, and the run UNSTABLE;
            in true units. Source: ours, as `min_grad_norm`.
        max_overflow_rate: float, share of skipped steps after the first 100, of the last 200, above
            which a run is UNSTABLE; at least five times what the rule itself costs (1 /
            `growth_interval`) and 5 steps. Source: ours.
        max_update_ratio: float, update norm over weight norm, median of variables and of ten looks,
            above which a run is UNSTABLE. Source: 0.001 is healthy (CS231n); two decades are ours.
        max_lost_share: float, share of a float16 variable's non-zero gradient that float16 rounds
            to zero, above which it is UNDERFLOW. Source: AdaLoss (Zhao et al. 2019), 1e-3.
        max_degraded_share: float, share that lies below float16's normal numbers, mean of the
            float16 variables, above which it is UNDERFLOW. Source: ours.
        spare_bits: float, doublings that the scale must have left for UNDERFLOW: otherwise a higher
            one would overflow (65504, Micikevicius et al. 2018). Source: ours.

    Attributes:
        report: `kmp.GradientReport` of the last look; None before the first.
        verdict: `kmp.callbacks.Verdict` over the steps up to then, with a variable to blame, if
            one can be told, and one line of advice; None before the first look.

    Raises:
        ValueError: if an argument is out of range, and in `fit` if the optimizer is not kmp's.

    Warns:
        UserWarning: once for each kind, with counts and paths: a verdict but HEALTHY and
            CALIBRATING, an overflow, a vanishing gradient, an exploding one; and float16 layers
            without loss scaling.

    Example:

    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(kmp.scaled("sgd", learning_rate=0.1), "mse")
    >>> watch = kmp.callbacks.GradientHealth()
    >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), callbacks=[watch], verbose=0)
    >>> history.history["skipped_steps"], watch.report.step
    ([0], 1)
    >>> watch.verdict.state
    'HEALTHY'
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        update_freq: int = 100,
        *,
        min_grad_norm: float = 1e-7,
        max_grad_norm: float = 1e4,
        max_overflow_rate: float = 0.01,
        max_update_ratio: float = 0.1,
        max_lost_share: float = 1e-3,
        max_degraded_share: float = 0.05,
        spare_bits: float = 4.0,
    ):
        super().__init__()
        if not 0 <= min_grad_norm < max_grad_norm:
            raise ValueError(
                "`min_grad_norm` must not be negative and must lie below `max_grad_norm`. "
                f"Received: min_grad_norm={min_grad_norm}, max_grad_norm={max_grad_norm}. The "
                "defaults are 1e-7 and 1e4."
            )
        self.log_dir = log_dir
        self.min_grad_norm = min_grad_norm
        self.limits = Limits(
            max_grad_norm,
            max_overflow_rate,
            max_update_ratio,
            max_lost_share,
            max_degraded_share,
            spare_bits,
        )
        self.update_freq = whole_number("update_freq", update_freq, "GradientHealth")
        self._dashboard: Dashboard | None = None
        self._begin()

    def _begin(self, optimizer: Any = None, step: int = 0) -> None:
        """Forget what another optimizer has measured."""
        self.report: GradientReport | None = None
        self.verdict: Verdict | None = None
        self._ratio = math.nan
        self._optimizer = optimizer
        self._cadence = Cadence(self.update_freq, step)
        self._warned: set[str] = set()
        self._past: collections.deque[GradientReport] = collections.deque()
        self._update_ratios: collections.deque[float] = collections.deque(maxlen=10)

    def set_model(self, model):
        super().set_model(model)
        require_measuring_optimizer(self, model)
        self._trained: Any = model  # `self.model` would bring all of JAX's state out of the loop

    def on_train_begin(self, logs=None):
        self._switch_on()
        report = read_report(self._trained)
        step = report.step if report else 0
        if self._trained.optimizer is not self._optimizer:
            self._begin(self._trained.optimizer, step)
        self._cadence.epoch_start, self._epoch_steps = step, 1
        self._past.clear()
        if report and report.step:
            self._past.append(report)  # what happened before is not this run's
        self._warn_of_unscaled_float16()
        if self.log_dir is not None:
            self._dashboard = Dashboard(self.log_dir, report)

    def on_epoch_begin(self, epoch, logs=None):
        model = self.model  # on JAX this brings the optimizer's variables up to date
        if model.optimizer.built:
            # Where nobody knows how many: as many as in the epoch before, in the first the first.
            steps = (self.params or {}).get("steps") or self._epoch_steps
            last = self._cadence.epoch_start + steps
            model.optimizer.sample_gradients(self.update_freq, and_at=last)

    def on_train_batch_begin(self, batch, logs=None):
        if self._cadence.is_due(batch):
            self._look()

    def on_epoch_end(self, epoch, logs=None):
        report = self._look()
        if report is None:
            return
        self._epoch_steps = report.step - self._cadence.epoch_start
        self._cadence.epoch_start = report.step
        if logs is not None:
            logs["loss_scale"] = report.loss_scale
            logs["skipped_steps"] = report.skipped_steps
            logs["grad_norm"] = report.grad_norm
            logs["headroom_bits"] = report.headroom_bits
            logs["degraded_share"] = _mean(report.degraded_share)
            logs["lost_share"] = _mean(report.lost_share)
            logs["update_ratio"] = self._ratio
            logs["verdict"] = self.verdict.code if self.verdict else 0

    def _switch_on(self) -> None:
        """Protect this `fit`, and let its steps measure details as often as this looks."""
        optimizer = self._trained.optimizer
        details, often = optimizer.measures_details, None
        if optimizer.built:
            often = ops.convert_to_numpy(optimizer.sampling)[:2]
        optimizer.measures_details = True

        def undo() -> None:
            optimizer.measures_details = details
            if often is not None:
                noted = ops.convert_to_numpy(optimizer.sampling)[2:]
                optimizer.sampling.assign(np.concatenate([often, noted]))

        protect_fit(self._trained, Claim(self, variant="details", undo=undo))

    def on_train_end(self, logs=None):
        release(self._trained, self)
        if self._dashboard is not None:
            self._dashboard.close()
            self._dashboard = None

    def _look(self) -> GradientReport | None:
        report = read_report(self._trained)
        if report is None or (self.report and self.report.step == report.step):
            return report
        self.report = report
        layers = self._layers()
        ratio = self._ratio = self._update_ratio(report)
        if math.isfinite(ratio) and report.step > FIRST_STEPS:  # weights may begin at zero
            self._update_ratios.append(ratio)
        self.verdict = judge(
            report,
            self._past[-1] if self._past else None,
            self._reference(report),
            self._trained.optimizer.loss_scale,
            self.limits,
            float16={p: x.path for p, x in layers.items() if x.compute_dtype == "float16"},
            update_ratios=list(self._update_ratios),
        )
        self._past.append(report)
        self._warn(report, {path: layer.path for path, layer in layers.items()})
        if self._dashboard is not None:
            self._dashboard.write(report, self.verdict, ratio)
        return report

    def _reference(self, report: GradientReport) -> GradientReport | None:
        """The report since which overflows are no longer how the scale is found."""
        while len(self._past) > 1 and self._past[1].step <= report.step - _WINDOW:
            self._past.popleft()
        settled = [past for past in self._past if past.step >= FIRST_STEPS]
        return settled[0] if settled else None

    def _layers(self) -> dict[str, keras.Layer]:
        """`{path of a trainable variable: its layer}`."""
        return {
            variable.path: layer
            for layer in layers_of(self._trained)
            for variable in layer._trainable_variables
        }

    def _update_ratio(self, report: GradientReport) -> float:
        """The median over the matrices; over all variables if there are none. NaN if unknown."""
        ratios = report.update_ratio
        matrices = {v.path for v in self._trained.trainable_variables if len(v.shape) > 1}
        chosen = [x for path, x in ratios.items() if path in matrices] or list(ratios.values())
        return float(np.median(chosen)) if chosen else math.nan

    def _warn(self, report: GradientReport, layers: dict[str, str]) -> None:
        norms, zeros = report.column("l2_norm"), report.column("zero_share")
        # A variable without a gradient has a row of zeros: not even its zeros are counted.
        known = set(significant(report, layers))
        measured = {p: norm for p, norm in norms.items() if (norm or zeros[p]) and p in known}
        overflowed = {
            path: f"{count} of {report.step} steps" for path, count in report.overflowed.items()
        }
        low, high = self.min_grad_norm, self.limits.max_grad_norm
        vanishing = {path: f"norm {x:.2g}" for path, x in measured.items() if x < low}
        exploding = {path: f"norm {x:.2g}" for path, x in measured.items() if x > high}
        self._warn_once(
            "gradient overflow",
            overflowed,
            f"those steps were skipped and nothing was lost; the loss scale is now "
            f"{report.loss_scale:g}. A few at the beginning are how the scale is found.",
        )
        self._warn_once(
            f"gradient norm below {low:g}",
            vanishing,
            "the variable hardly learns. Is its layer connected to the loss, or saturated?",
        )
        self._warn_once(
            f"gradient norm above {high:g}",
            exploding,
            "lower the learning rate, or clip with global_clipnorm=1.0.",
        )

        verdict = self.verdict
        if verdict and verdict.state not in ("HEALTHY", "CALIBRATING", *self._warned):
            self._warned.add(verdict.state)
            warnings.warn(f"Step {report.step}: {verdict}", stacklevel=2)

    def _warn_once(self, kind: str, found: dict[str, str], advice: str) -> None:
        if not found or kind in self._warned:
            return
        self._warned.add(kind)
        named = ", ".join(f"{path} ({what})" for path, what in list(found.items())[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        step = self.report.step if self.report else 0
        warnings.warn(f"Step {step}: {kind} in {named}{more}: {advice}", stacklevel=2)

    def _warn_of_unscaled_float16(self) -> None:
        model: Any = self._trained
        if not isinstance(model.optimizer.loss_scale, NoOpLossScale):
            return
        layers = [x for x in layers_of(model)[1:] if x.path]  # Input has none
        half = [x.path for x in layers if x.compute_dtype == "float16"]
        self._warn_once(
            "float16 without loss scaling",
            dict.fromkeys(half, "compute dtype float16"),
            'gradients below 6e-8 become zero. Write kmp.scaled(..., loss_scale="dynamic").',
        )


def _mean(shares: dict[str, float]) -> float:
    return float(np.mean(list(shares.values()))) if shares else math.nan
