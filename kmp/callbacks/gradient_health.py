"""`GradientHealth`: the optimizer's measurements in logs, warnings and TensorBoard."""

import math
import os
import warnings
from typing import Any

import keras

from kmp.callbacks._sampler import Cadence, read_report, require_measuring_optimizer
from kmp.callbacks._train_step import guard_train_step
from kmp.health import GradientReport
from kmp.scaling import NoOpLossScale
from kmp.summaries import SummaryWriter

_DASHBOARD = {
    "Mixed precision": {
        "loss scale, log2": ["mixed_precision/loss_scale_log2$"],
        "skipped steps": ["mixed_precision/skipped_steps$"],
        "headroom, bits": ["mixed_precision/headroom_bits$"],
    },
    "Gradient health": {
        "global norm": ["grad/global_norm$"],
        "norm of each variable": ["grad_norm/.*"],
        "overflows of each variable": ["grad_overflow_steps/.*"],
    },
}


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
        max_grad_norm: float, the l2 norm above which it is reported as exploding.

    Attributes:
        report: `kmp.GradientReport` of the last look; None before the first.

    Raises:
        ValueError: if an argument is out of range, and in `fit` if the optimizer is not kmp's.

    Warns:
        UserWarning: with the path of the variable, once for each variable and kind: an overflow,
            a vanishing gradient, an exploding one; and float16 layers without loss scaling.

    Example:

    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(kmp.scaled("sgd", learning_rate=0.1), "mse")
    >>> watch = kmp.callbacks.GradientHealth()
    >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), callbacks=[watch], verbose=0)
    >>> history.history["skipped_steps"], watch.report.step
    ([0], 1)
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        update_freq: int = 100,
        *,
        min_grad_norm: float = 1e-7,
        max_grad_norm: float = 1e4,
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
        self.max_grad_norm = max_grad_norm
        self.report: GradientReport | None = None
        self._cadence = Cadence(update_freq)
        self._writer: SummaryWriter | None = None
        self._warned: set[tuple[str, str]] = set()

    def set_model(self, model):
        super().set_model(model)
        require_measuring_optimizer(self, model)
        guard_train_step(model)

    def on_train_begin(self, logs=None):
        optimizer = self._model.optimizer
        if self._model.built and not optimizer.built:
            optimizer.build(self._model.trainable_variables)
        self._warn_of_unscaled_float16()
        if self.log_dir is not None:
            self._writer = SummaryWriter(self.log_dir)
            self._writer.custom_scalars_layout(_DASHBOARD)
        report = read_report(self._model)
        self._cadence.begin_epoch(report.step if report else 0)

    def on_train_batch_begin(self, batch, logs=None):
        if self._cadence.is_due(batch):
            self._look()

    def on_epoch_end(self, epoch, logs=None):
        report = self._look()
        if report is None:
            return
        self._cadence.begin_epoch(report.step)
        if logs is not None:
            logs["loss_scale"] = report.loss_scale
            logs["skipped_steps"] = report.skipped_steps
            logs["grad_norm"] = report.grad_norm
            logs["headroom_bits"] = report.headroom_bits

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _look(self) -> GradientReport | None:
        report = read_report(self._model)
        if report is None or (self.report and self.report.step == report.step):
            return report
        self.report = report
        self._warn(report)
        if self._writer is not None:
            self._write(self._writer, report)
        return report

    def _write(self, writer: SummaryWriter, report: GradientReport) -> None:
        scalars: dict[str, float] = {
            "mixed_precision/loss_scale": report.loss_scale,
            "mixed_precision/loss_scale_log2": math.log2(report.loss_scale),
            "mixed_precision/skipped_steps": report.skipped_steps,
            "mixed_precision/consecutive_skips": report.consecutive_skips,
            "mixed_precision/headroom_bits": report.headroom_bits,
            "grad/global_norm": report.grad_norm,
            "grad/max_abs": report.max_abs,
        }
        for column, tag in (
            ("l2_norm", "grad_norm"),
            ("max_abs", "grad_max_abs"),
            ("zero_share", "grad_zero_share"),
            ("overflow_steps", "grad_overflow_steps"),
        ):
            scalars |= {f"{tag}/{path}": x for path, x in report.column(column).items()}
        writer.scalars(scalars, report.step)
        writer.text("mixed_precision/report", f"```\n{report}\n```", report.step)
        writer.flush()

    def _warn(self, report: GradientReport) -> None:
        norms, zeros = report.column("l2_norm"), report.column("zero_share")
        # A variable without a gradient has a row of zeros: not even its zeros are counted.
        measured = {path: norm for path, norm in norms.items() if norm or zeros[path]}
        overflowed = {
            path: f"{count} of {report.step} steps" for path, count in report.overflowed.items()
        }
        low, high = self.min_grad_norm, self.max_grad_norm
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

    def _warn_once(self, kind: str, found: dict[str, str], advice: str) -> None:
        new = {path: what for path, what in found.items() if (kind, path) not in self._warned}
        if not new:
            return
        self._warned.update((kind, path) for path in new)
        named = ", ".join(f"{path} ({what})" for path, what in list(new.items())[:5])
        more = f" and {len(new) - 5} more" if len(new) > 5 else ""
        step = self.report.step if self.report else 0
        warnings.warn(f"Step {step}: {kind} in {named}{more}: {advice}", stacklevel=2)

    def _warn_of_unscaled_float16(self) -> None:
        model: Any = self._model
        if not isinstance(model.optimizer.loss_scale, NoOpLossScale):
            return
        layers = [x for x in model._flatten_layers(include_self=False) if x.path]  # Input has none
        half = [x.path for x in layers if x.compute_dtype == "float16"]
        self._warn_once(
            "float16 without loss scaling",
            dict.fromkeys(half, "compute dtype float16"),
            'gradients below 6e-8 become zero. Write kmp.scaled(..., loss_scale="dynamic").',
        )
