"""`GradientHealth`: the optimizer's measurements in logs, warnings and TensorBoard."""

import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from kmp._keras.optimizer import parts_of
from kmp.callbacks.alarms import Alarms
from kmp.callbacks.curves.heat_map import History, picture
from kmp.callbacks.curves.outlets import ALWAYS, MORE, OF_SPIKES, Outlets, log_numbers
from kmp.callbacks.protection import Hold
from kmp.callbacks.verdict.detectors import detectors, judge
from kmp.callbacks.verdict.observation import Observation, Run
from kmp.callbacks.verdict.stalled import no_steps
from kmp.callbacks.verdict.states import Limits, Verdict, checked_limits
from kmp.callbacks.watcher import Cadence, Watcher, checked_update_freq
from kmp.health.report import GradientReport, read_report
from kmp.health.telemetry import FIRST_STEPS, kept_sampling, lend_sampling
from kmp.scaling.optimizer import LossScaleOptimizer
from kmp.summaries import check_can_write


class GradientHealth(Watcher):
    """Watches the gradients of a model that is compiled with `kmp.scaled`.

    At each `update_freq`-th training step, and at the end of each epoch, it reads what the
    compiled step has measured, in one transfer, the losses of the steps in another, and the moving
    variances of BatchNormalization in a third. At an epoch's end it also checks all state for inf
    and NaN. In between nothing leaves the device; overflows and skipped steps are counted inside
    the step, so none is missed.

    It adds the first four of these keys to the logs of each epoch, and the others that `logs`
    names. History, the progress bar, CSVLogger and other callbacks see them, in any order in the
    list of callbacks:

    ```
    loss_scale       the scale of the next step
    skipped_steps    steps skipped since training began
    grad_norm        l2 norm of the last step's gradient over all variables, in true units
    verdict          the worst state of this epoch: a float that prints as its name; 0 HEALTHY,
                     1 CALIBRATING, 2 UNDERFLOW, 3 UNSTABLE, 4 STALLED, 5 COLLAPSED, 6 FORWARD-NAN
    headroom_bits    how often the scale could double before that gradient leaves float16
    degraded_share   share of its non-zero values that have fewer bits in float16, at that scale
    lost_share       share of them that would be zero in float16
    update_ratio     log10 of update norm over weight norm, median of the matrices; healthy near -3
    ```

    With `spikes=` there are two more: `skipped_spikes`, the steps among the skipped ones that were
    left out as spikes, and `spike_score`, their share of all steps so far.

    While `fit` runs, the model is protected as by `kmp.protect`: `loss` and metrics leave out what
    is not finite, and a skipped step leaves the state of all layers alone. When `fit` ends, what
    the callback has changed on the model and the optimizer is undone.

    Args:
        log_dir: directory for TensorBoard's event files; None writes none. Needs no TensorFlow.
            Epoch logs and the learning rate go to its subdirectories `train` and `validation`, as
            with keras.callbacks.TensorBoard (unless that callback writes there too); the rest goes
            to the directory itself.
        update_freq: training steps between two looks, an int >= 1, whatever `steps_per_execution`
            is; or `"batch"`, after each step, or `"epoch"`, only at the end of each epoch.
        logs: list of names from the second half of the table, or `"all"`.
        on_report: function that is called with a flat dict at each look, for other trackers. The
            keys are those of the table, `step`, `consecutive_skips`, `grad_max_abs`, and for each
            variable `variable_grad_norm/<path>`, `variable_overflow_steps/<path>` and
            `variable_update_ratio/<path>`, with `spikes` also `skipped_spikes` and `spike_score`;
            what was not measured is left out. The values are
            Python's own numbers, `verdict` too, which prints as its name.
        verbose: 1 prints the verdict at the end of an epoch if it has changed; 0 prints nothing.
            Warnings are given with both.
        limits: `kmp.callbacks.Limits`, the thresholds of the verdict and the warnings.
        optimizer: the `kmp.LossScaleOptimizer` to watch, for a model that steps several, as a GAN
            does. By default the one that the model is compiled with.
        prefix: str, put before the keys in the logs, to tell several watched optimizers apart.

    Of several processes that train one model together only the first writes to `log_dir` and calls
    `on_report`.

    Attributes:
        report: `kmp.GradientReport` of the last look; None before the first.
        verdict: `kmp.callbacks.Verdict`, the worst since the last epoch's end, with counts, a
            variable to blame, if one can be told, and one line of advice; after `fit`, of its last
            epoch. None before the first look.

    Raises:
        ModuleNotFoundError: with `log_dir`, unless `pip install 'kmp[tensorboard]'` was run.
        ValueError: if an argument is out of range, and in `fit` if the optimizer is not kmp's.

    Warns:
        kmp.PrecisionWarning: once for each kind, with counts and paths: a verdict other than
            HEALTHY and CALIBRATING, an overflow, a spike, overflows in more than
            `limits.max_overflow_rate` (1%) of an epoch's steps, a vanishing gradient, an exploding
            one; and float16 layers without loss scaling.

    Example:

    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(kmp.scaled("sgd", learning_rate=0.1), "mse")
    >>> watch = kmp.callbacks.GradientHealth()
    >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), callbacks=[watch], verbose=0)
    >>> history.history["skipped_steps"], history.history["verdict"], watch.report.step
    ([0], [HEALTHY], 1)
    """

    def __init__(
        self,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        update_freq: int | Literal["epoch", "batch"] = 100,
        logs: Sequence[str] | Literal["all"] = (),
        on_report: Callable[[dict[str, Any]], object] | None = None,
        verbose: int = 0,
        limits: Limits | None = None,
        optimizer: LossScaleOptimizer | None = None,
        prefix: str = "",
    ):
        super().__init__()
        if log_dir is not None:
            check_can_write()
        self.log_dir, self.prefix, self.update_freq = log_dir, prefix, update_freq
        self.limits = checked_limits(limits)
        self._every = checked_update_freq(update_freq, "GradientHealth")  # steps
        self.logs = checked_logs(logs)
        self.on_report = checked_on_report(on_report)
        self.verbose = checked_verbose(verbose)
        self._given = optimizer
        self._history: History | None = None  # of the latest `fit`
        if optimizer is not None:
            require_measurements(optimizer)
        self.report: GradientReport | None = None
        self.verdict: Verdict | None = None
        self._optimizer: Any = None  # that of the latest `fit`

    def _begin(self, optimizer: Any, step: int) -> None:
        """Forget what another optimizer has measured, or this one in another run."""
        self.report = self.verdict = None
        self._ratio = math.nan  # log10 of update over weight
        self._told = ""  # the state that was printed last
        self._optimizer, self._cadence = optimizer, Cadence(self._every, step)
        self._alarms, self._detectors = Alarms(self.limits), detectors()
        self._calibrated: GradientReport | None = None  # the first after the first 100 steps

    def set_model(self, model):
        super().set_model(model)
        if self._given is None:
            require_measurements(getattr(model, "optimizer", None), model)

    def _begin_fit(self, callbacks):
        optimizer = self._watches(self.trained)
        report = self._read(optimizer)
        step = report.step if report else 0
        went_back = self.report is not None and step < self.report.step  # a checkpoint was loaded
        if optimizer is not self._optimizer or went_back:
            self._begin(optimizer, step)
        self._cadence.epoch_start, self._epoch_steps = step, 1
        self._fit_start = self._epoch_start = report
        self._run = Run(self.trained, optimizer)
        self._alarms.of_unscaled_float16(self.trained, optimizer.loss_scale)
        # The steps measure for all who watch this optimizer: as often as the most frequent asks.
        watching = [self, *(x for x in callbacks if isinstance(x, GradientHealth))]
        self._often = min(x._every for x in watching if x._watches(self.trained) is optimizer)
        self._outlets = Outlets(
            self.trained, optimizer, self.log_dir, self.on_report, report, callbacks
        )
        self._history = self._outlets.history

    def _watches(self, model: Any) -> Any:
        return self._given or model.optimizer

    def _hold(self) -> Hold:
        """Protect this `fit`, whose steps measure details."""
        optimizer = self._watches(self.trained)
        details, put_back = optimizer.measures_details, kept_sampling(optimizer)
        optimizer.measures_details = True

        def undo() -> None:
            optimizer.measures_details = details
            put_back()

        return Hold(self, compiled_with=("details", id(optimizer)), undo=undo)

    def on_epoch_begin(self, epoch, logs=None):
        self._outlets.begin_epoch()
        self._batches = 0
        self._worst: Verdict | None = None
        self._run.sync()
        # If Keras does not know: as in the epoch before; in the first epoch, one step.
        steps = (self.params or {}).get("steps") or self._epoch_steps
        last = self._cadence.epoch_start + steps
        lend_sampling(self._optimizer, self._often, last)

    def on_train_batch_begin(self, batch, logs=None):
        self._batches = batch + 1  # at least; one execution may take several
        super().on_train_batch_begin(batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        logs = {} if logs is None else logs
        losses = {x: logs[x] for x in ("loss", "val_loss") if isinstance(logs.get(x), numbers.Real)}
        if not logs and self._batches == 1:
            self._batches = 0  # Keras begins a batch on TensorFlow, and then finds no data
        report = self._look(losses)
        self._batches = 0
        if report is not None:
            self._epoch_steps = report.step - self._cadence.epoch_start
            if since := self._since_calibration():
                steps = report.step - since.step
                skips = report.overflow_skips - since.overflow_skips
                self._alarms.of_skipped_steps(report.step, steps, skips)
            self._cadence.epoch_start, self._epoch_start = report.step, report
            found = log_numbers(report, self.verdict, self._ratio)
            names = [*self.logs, *(name for name in OF_SPIKES if name in found)]
            logs.update({f"{self.prefix}{name}": found[name] for name in names})
        if self.log_dir is not None:
            self._run.sync()  # the learning rate may depend on the step
        self._outlets.end_epoch(epoch, logs)
        if self.verbose and self.verdict and self.verdict.state != self._told:
            self._told = self.verdict.state
            print(f"\nEpoch {epoch + 1}: {self.verdict}")

    def heat_map(self) -> Any:
        """Draw the gradient's norm of each variable over the last 60 looks of the latest `fit`.

        With matplotlib installed it has axes and names.

        Returns:
            A `PIL.Image.Image`, such as `wandb.Image` and `mlflow.log_image` take.

        Raises:
            ModuleNotFoundError: without pillow, which `kmp[tensorboard]` installs.
            RuntimeError: before the first look.
        """
        if self._history is None or not self._history.looks:
            raise RuntimeError(
                "GradientHealth.heat_map() draws the looks of a `fit`, and there has been none. "
                "Call it after model.fit(..., callbacks=[health])."
            )
        return picture(self._history.paths, self._history.looks)

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        self._outlets.close()

    def _read(self, optimizer: Any) -> GradientReport | None:
        return read_report(optimizer, self.trained) if optimizer.built else None

    def _look(self, losses: Mapping[str, Any] | None = None) -> GradientReport | None:
        """Look at the run; `losses` are those of an epoch that ends."""
        ends = losses is not None
        report, batches = self._read(self._optimizer), self._batches if ends else 0
        if report is None and ends and batches != 1:  # nobody has ever given it a gradient
            self.verdict = no_steps(batches)
            self._alarms.of_verdict(0, self.verdict)
        if report is None or (self.report and self.report.step == report.step and not ends):
            return report
        look = self._observe(report, losses, batches)
        verdict = judge(self._detectors, look)
        # The verdict is on the whole epoch: one good look takes nothing back.
        if self._worst is None or verdict.code >= self._worst.code:
            self._worst = verdict
        self.report, self.verdict, self._ratio = report, self._worst, look.update_ratio
        if self._calibrated is None and report.step >= FIRST_STEPS:
            self._calibrated = report
        self._alarms.of_verdict(report.step, self.verdict)
        self._alarms.of_gradients(look)
        self._outlets.look(report, self.verdict, look.update_ratio)
        return report

    def _since_calibration(self) -> GradientReport | None:
        """Return the report from which an epoch's skipped steps are counted: that of the epoch's
        start, or of the first look after step 100. Before that, overflows find the loss scale."""
        start = self._epoch_start
        return start if start and start.step >= FIRST_STEPS else self._calibrated

    def _observe(
        self, report: GradientReport, losses: Mapping[str, Any] | None, batches: int
    ) -> Observation:
        optimizer, layers = self._optimizer, self._run.layers()
        return Observation(
            report,
            run=self._run,
            epoch_start=self._epoch_start,
            fit_start=self._fit_start,
            losses=losses,
            new_losses=self._run.new_losses(),
            batches=batches,
            layers=layers,
            weights=self._run.weights(layers),
            rule=optimizer.loss_scale,
            limits=self.limits,
            window=max(x.gradient_accumulation_steps or 1 for x in parts_of(optimizer)),
            drops_windows=optimizer.on_overflow == "drop_window",
        )


def checked_logs(logs: Any) -> tuple[str, ...]:
    """The names of the numbers that go into the logs: those that always do, and those asked for.

    Example:

    >>> checked_logs(["lost_share"])
    ('loss_scale', 'skipped_steps', 'grad_norm', 'verdict', 'lost_share')
    """
    known = ALWAYS + MORE
    names = known if logs == "all" else logs
    listed = isinstance(names, Sequence | set | frozenset) and not isinstance(names, str)
    if not listed or any(name not in known for name in names):
        raise ValueError(
            f'`logs` of GradientHealth must be "all" or a list of names among {MORE}. '
            f"Received: logs={logs!r}. Write for example logs=[{MORE[0]!r}]."
        )
    return tuple(name for name in known if name in ALWAYS or name in names)


def checked_verbose(verbose: Any) -> bool:
    """Whether to print; raise ValueError unless `verbose` is 0 or 1."""
    if verbose not in (0, 1):
        raise ValueError(
            f"`verbose` of GradientHealth must be 0 or 1. Received: verbose={verbose!r}. Write "
            "verbose=1 to have the verdict printed whenever it changes."
        )
    return bool(verbose)


def checked_on_report(on_report: Any) -> Any:
    """Return `on_report`; raise ValueError unless it is a function or None."""
    if on_report is not None and not callable(on_report):
        raise ValueError(
            "`on_report` of GradientHealth must be a function that takes a dict. Received: "
            f"on_report={on_report!r} (of type {type(on_report).__name__}). Write for example "
            "on_report=print."
        )
    return on_report


def require_measurements(optimizer: Any, model: Any = None) -> None:
    """Raise ValueError unless `optimizer`, of `model` if that is given, measures gradients."""
    if not isinstance(optimizer, LossScaleOptimizer):
        raise ValueError(
            "GradientHealth reads what kmp's optimizer measures. Received: "
            + ("a model compiled with " if model else "")
            + f"{type(optimizer).__name__}. {_measured_instead(optimizer, model)}"
        )
    if not optimizer.measure_gradients:
        raise ValueError(
            "GradientHealth needs the optimizer's measurements. Received: measure_gradients=False. "
            "Leave the argument out of kmp.LossScaleOptimizer(...), or the callback out of `fit`."
        )


def _measured_instead(optimizer: Any, model: Any) -> str:
    """Say how to have kmp's optimizer in place of this one."""
    own = [k for k, v in vars(model).items() if isinstance(v, LossScaleOptimizer)] if model else []
    if own:
        return f"For one of several write GradientHealth(optimizer=model.{own[0]})."
    inner = optimizer
    while getattr(inner, "inner_optimizer", None) is not None:  # under mixed_float16 Keras wraps
        inner = inner.inner_optimizer
        if isinstance(inner, LossScaleOptimizer):
            return (
                "It wraps kmp's optimizer, which scales the loss by itself: compile with its "
                "`inner_optimizer` alone."
            )
    name = type(inner).__name__ if inner else "keras.optimizers.Adam"
    return (
        f"Write model.compile(optimizer=kmp.scaled({name}, ...), ...); with "
        'loss_scale="none" where nothing needs scaling.'
    )
