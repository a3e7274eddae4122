"""`DivergenceGuard`: notices a loss that diverges, and goes back to before it did."""

import math
import statistics
from typing import Any

from kmp._common import checked_choice, number, warn, whole_number
from kmp.callbacks.progress import Progress, read_progress, warn_of_unseen_loss
from kmp.callbacks.snapshot import (
    Snapshot,
    constants_that_are_not_finite,
    restore_snapshot,
    take_snapshot,
)
from kmp.callbacks.spike_detector import SpikeDetector, SpikeState
from kmp.callbacks.watcher import Cadence, Watcher

_ACTIONS = ("warn", "stop", "rollback")
# After this many losses in a row that are not finite the reading is NaN, although the optimizer
# skips the steps: the weights are finite, but so far off that no other losses will come of them.
_DEAD_LOSSES = 10  # not finite, in a row
_DEAD_STEPS = 30  # skipped in a row, the last of them at a loss scale that cannot fall any further


class DivergenceGuard(Watcher):
    """Notices when the loss diverges, and warns, stops training, or rolls the model back.

    A skipped step does no harm. This callback is for steps that were applied and should not have
    been: a bad batch with finite gradients, or a learning rate that is too high. Such a step can
    leave weights so large that every later step is skipped. That counts as divergence too: after 10
    losses in a row that are not finite, or 30 skipped steps in a row if the loss scale cannot fall
    any further.

    Every `update_freq` training steps it reads the losses of the steps since its last look, in one
    transfer. Their mean is one reading of `detector`. At a spike it does what `action` says:

    ```
    "warn"      a warning, once for each spike
    "stop"      a warning, and training stops
    "rollback"  the weights, all other state of the layers and the optimizer's state go back to a
                snapshot; the learning rate is multiplied by lr_factor, and the loss scale becomes
                that of the snapshot times the rule's backoff_factor; after max_rollbacks as "warn"
    ```

    After a rollback `fit` goes on with the next batch, so the bad batches do not come back. A
    snapshot is a copy on the host. It is taken when the last reading was not an outlier, and used
    only if the next reading, produced by its weights, was not an outlier either. A rollback does
    not undo what has been counted (steps, skipped steps). A learning-rate schedule goes back with
    the optimizer's step, and cannot be lowered. The last `patience * update_freq` steps of `fit`
    are not judged. Under `tf.distribute` a reading mixes the losses of the replicas.

    While `fit` runs the model is protected, as `kmp.protect` does. With kmp's optimizer the logs
    gain `skipped_steps`.

    Args:
        action: `"warn"`, `"stop"` or `"rollback"`.
        update_freq: int >= 1, training steps between two looks, whatever `steps_per_execution` is.
            Of more than 128 the last 128 are read.
        detector: `kmp.callbacks.SpikeDetector`, what counts as a spike.
        snapshot_freq: int >= 1, training steps between two snapshots; a rollback may lose as many
            steps. A snapshot copies all weights and the optimizer's state to the host, which keeps
            two of them.
        lr_factor: float in (0, 1], what a rollback multiplies the learning rate by.
        max_rollbacks: int >= 1, rollbacks in one `fit`.

    Attributes:
        rollbacks: int, rollbacks in this `fit` so far.

    Raises:
        ValueError: if an argument is out of its range.

    Warns:
        kmp.PrecisionWarning: at each spike, with step, loss, median and what was done; and after
            the first epoch if the model's own `train_step` or `metrics` keeps the loss from it.

    Example:

    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(kmp.scaled("sgd", learning_rate=0.1), "mse")
    >>> guard = kmp.callbacks.DivergenceGuard("rollback", snapshot_freq=200)
    >>> history = model.fit(np.ones((64, 2)), np.ones((64, 1)), callbacks=[guard], verbose=0)
    >>> guard.rollbacks
    0

    Source: going back to a snapshot of before the spike and past the batches is what was done by
    hand for PaLM (Chowdhery et al. 2022, section 5.1).

    False alarms, measured by `benchmarks/experiments/false_alarms.py` with the default detector on
    10,000 simulated decaying curves of 1,000 readings for each kind of noise; those with an alarm:

    ```
    normal, standard deviation 1-20% of the loss                        0
    lognormal, 5-50%                                                    2   (0.02%)
    heavy tails: Student's t(4) in the exponent, 5-30%                  4   (0.04%)
    correlated: neighbours by 0.5-0.9, lognormal, 5-30%               120   (1.2%)
    lognormal, 100%: a loss that jumps by factors of e               1134   (11.3%)
    ```

    A reading averages `update_freq` steps, which at 10 divides the noise of shuffled batches by 3.
    """

    def __init__(
        self,
        action: str = "warn",
        update_freq: int = 10,
        *,
        detector: SpikeDetector | None = None,
        snapshot_freq: int = 100,
        lr_factor: float = 0.5,
        max_rollbacks: int = 3,
    ):
        super().__init__()
        owner = "DivergenceGuard"
        self.action = checked_choice("action", action, _ACTIONS)
        self.detector = SpikeDetector() if detector is None else detector
        if not isinstance(self.detector, SpikeDetector):
            raise ValueError(
                "`detector` must be a kmp.callbacks.SpikeDetector. Received: "
                f"detector={detector!r} (of type {type(detector).__name__}). Write for example "
                "detector=kmp.callbacks.SpikeDetector(patience=5)."
            )
        self.snapshot_freq = whole_number("snapshot_freq", snapshot_freq, owner)
        self.lr_factor = number("lr_factor", lr_factor, owner)
        if not 0 < self.lr_factor <= 1:
            raise ValueError(
                "`lr_factor` of DivergenceGuard must lie in (0, 1]. Received: "
                f"lr_factor={lr_factor}. Write lr_factor=0.5, the default."
            )
        self.max_rollbacks = whole_number("max_rollbacks", max_rollbacks, owner)
        self.update_freq = whole_number("update_freq", update_freq, owner)
        self._begin()

    def _begin(self, progress: Progress | None = None) -> None:
        self.rollbacks = 0
        self._cadence = Cadence(self.update_freq, progress.seen_steps if progress else 0)
        self._state = SpikeState()
        # What training and the detector knew; the second awaits a reading that proves it good.
        self._proven: tuple[Snapshot, SpikeState] | None = None
        self._candidate: tuple[Snapshot, SpikeState] | None = None
        self._counted_steps = progress.counted_steps if progress else 0

    def _begin_fit(self, callbacks):
        self._begin(read_progress(self.trained))
        if self.action == "rollback":
            self._meant = constants_that_are_not_finite(self.trained)

    def on_epoch_end(self, epoch, logs=None):
        progress = read_progress(self.trained)
        seen_none = progress.seen_steps == self._cadence.epoch_start
        self._cadence.epoch_start = progress.seen_steps
        if seen_none and epoch == 0:
            warn_of_unseen_loss(self)
        if logs is not None and progress.skipped_steps is not None:
            logs["skipped_steps"] = progress.skipped_steps

    def _look(self) -> None:
        progress = read_progress(self.trained)
        reading = progress.mean_loss_since(self._counted_steps)
        self._counted_steps = progress.counted_steps
        if reading is None:  # every step since the last look was skipped
            dead = progress.nonfinite_losses >= _DEAD_LOSSES
            if not (dead or progress.hopeless_skips >= _DEAD_STEPS):
                return
            reading = math.nan
        self._state = self.detector.next(self._state, reading)
        calm = not self._state.outliers and math.isfinite(reading)
        if self.detector.is_spike(self._state):
            self._act(progress.step, reading)
        elif self.action == "rollback":
            self._keep_snapshot(progress.step, calm)

    def _keep_snapshot(self, step: int, calm: bool) -> None:
        if calm and self._candidate is not None:
            self._proven = self._candidate
        self._candidate = None
        last = self._proven[0].step if self._proven else -math.inf
        if calm and step - last >= self.snapshot_freq:
            snapshot = take_snapshot(self.trained, step, self._meant)
            self._candidate = None if snapshot is None else (snapshot, self._state)

    def _act(self, step: int, reading: float) -> None:
        history = self._state.history
        done = {"warn": "Nothing was done.", "stop": "Training stops."}.get(self.action)
        if self.action == "stop":
            self.trained.stop_training = True
        elif self.action == "rollback":
            done = self._roll_back()
        usual = statistics.median(history) if history else math.nan
        warn(
            f"Step {step}: the loss diverged: {reading:.3g}, where the median of the last "
            f"{len(history)} readings is {usual:.3g}. {done}"
        )

    def _roll_back(self) -> str:
        if self.rollbacks == self.max_rollbacks:
            return f"Nothing was done: max_rollbacks={self.max_rollbacks} are used up."
        if self._proven is None:
            return "Nothing was done: it diverged before there was a snapshot to go back to."
        self.rollbacks += 1
        snapshot, self._state = self._proven  # the losses expected there are those from before it
        self._candidate = None
        model: Any = self.model  # on JAX this takes the state out of the loop
        changes = restore_snapshot(model, snapshot, self.lr_factor)
        return (
            f"Rollback {self.rollbacks} of {self.max_rollbacks} to step {snapshot.step}: "
            f"{', '.join(changes)}."
        )
