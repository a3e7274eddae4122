"""`TerminateOnNaN`: stops a dead run, and lets a skipped step be."""

from kmp._backend import backend
from kmp._common import warn, whole_number
from kmp._keras import layers_of
from kmp.callbacks.progress import Progress, read_progress, warn_of_unseen_loss
from kmp.callbacks.protection import release
from kmp.callbacks.verdict.observation import nonfinite_state
from kmp.callbacks.watcher import Cadence, Watcher
from kmp.scaling.optimizer import LossScaleOptimizer


class TerminateOnNaN(Watcher):
    """Stops a dead run, but not one that has merely skipped a step.

    At each `update_freq`-th training step of an epoch and at its end it looks, and stops if

    ```
    any trainable weight is inf or NaN                      no later step can repair it
    moving statistics, slots or averaged weights are        checked at the end of an epoch
    patience steps in a row were skipped                    with kmp's optimizer, once its loss
                                                            scale cannot fall any further
    patience losses in a row were inf or NaN                with any optimizer
    ```

    Keras's callback of this name watches the running average of the loss, which one skipped step
    makes NaN for the rest of the epoch.

    Args:
        patience: int >= 1, skipped steps, or losses that are not finite, in a row. Steps that find
            the loss scale are not judged: from 2**15 to the floor of 2**-48 there are 63.
        update_freq: int >= 1, training steps between two checks, whatever `steps_per_execution` is.
            Skipped steps and losses are counted in every step, also between checks.
        raise_error: bool, as in Keras 3.13: whether to raise instead of stopping. `on_train_end` of
            no callback is called then, so that BackupAndRestore keeps its backup.

    Attributes:
        stopped_because: str, why training was stopped; None if it was not.

    Raises:
        ValueError: if an argument is out of its range.
        RuntimeError: in `fit`, with `raise_error=True`, when it would stop a run.

    Warns:
        kmp.PrecisionWarning: when it stops a run, with step, counts and the paths of the weights;
            and after the first epoch if a custom `train_step` or `metrics` hides the loss from this
            callback.

    Example:

    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(kmp.scaled("sgd", learning_rate=0.1), "mse")
    >>> x = np.ones((96, 2))
    >>> x[40] = np.inf
    >>> stop = kmp.callbacks.TerminateOnNaN()
    >>> history = model.fit(x, np.ones((96, 1)), epochs=2, callbacks=[stop], verbose=0)
    >>> history.history["skipped_steps"], stop.stopped_because
    ([1, 2], None)

    Source: keras.callbacks.TerminateOnNaN; the number of skipped steps in a row as a sign of a dead
    run is that of optax's `apply_if_finite`, which then applies them.
    """

    def __init__(self, patience: int = 30, update_freq: int = 100, *, raise_error: bool = False):
        super().__init__()
        if raise_error not in (False, True):
            raise ValueError(
                "`raise_error` of TerminateOnNaN must be True or False. Received: "
                f"raise_error={raise_error!r}. Write raise_error=True to raise an error."
            )
        self.raise_error = bool(raise_error)
        self.patience = whole_number("patience", patience, "TerminateOnNaN")
        self.update_freq = whole_number("update_freq", update_freq, "TerminateOnNaN")
        self.stopped_because: str | None = None

    def _begin_fit(self, callbacks):
        self.stopped_because = None
        self._seen_steps = read_progress(self.trained).seen_steps

    def on_epoch_begin(self, epoch, logs=None):
        # Anew, not by the tracker's count: a train step of the model's own may not move that.
        self._cadence = Cadence(self.update_freq)

    def on_epoch_end(self, epoch, logs=None):
        progress = self._look()
        self._stop_if(progress, self._reason_at_epoch_end())
        if epoch == 0 and progress.seen_steps == self._seen_steps:
            warn_of_unseen_loss(self)
        if logs is not None and progress.skipped_steps is not None:
            logs["skipped_steps"] = progress.skipped_steps

    def _look(self) -> Progress:
        progress = read_progress(self.trained, self.trained.trainable_variables)
        self._stop_if(progress, self._reason(progress))
        return progress

    def _stop_if(self, progress: Progress, reason: str | None) -> None:
        if reason and self.stopped_because is None:
            self.stopped_because = f"Step {progress.step}: {reason}"
            if self.raise_error:
                backend.settle(self.trained)  # nobody calls `on_train_end`, which would
                release(self.trained, self)
                raise RuntimeError(f"{self.stopped_because} Training ends.")
            self.trained.stop_training = True
            warn(f"{self.stopped_because} Training stops.")

    def _reason_at_epoch_end(self) -> str | None:
        lost = nonfinite_state(self.trained, layers_of(self.trained), self.trained.optimizer)
        if not lost:
            return None
        more = f" {len(lost) - 1} more variables are affected." if lost[1:] else ""
        return f"{lost[0].path} holds inf or NaN.{more} Go back to a checkpoint."

    def _reason(self, progress: Progress) -> str | None:
        variables = self.trained.trainable_variables
        dead = [variables[i].path for i in progress.nonfinite]
        if dead:
            more = f" and {len(dead) - 5} more" if len(dead) > 5 else ""
            is_kmps = isinstance(self.trained.optimizer, LossScaleOptimizer)
            advice = (
                "look at the learning rate, the optimizer's epsilon and constraints, since the "
                "gradients were finite."
                if is_kmps
                else "compile with kmp.scaled(...), which skips such a step."
            )
            return (
                f"{len(dead)} weights are not finite: {', '.join(dead[:5])}{more}. Go back to a "
                f"checkpoint, and {advice}"
            )
        losses = progress.nonfinite_losses
        if max(progress.hopeless_skips, losses) < self.patience:
            return None
        advice = (
            "so that no loss scale can help: look at the data and the layers."
            if losses >= self.patience
            else "and the loss scale cannot fall any further: "
            "kmp.debug.locate_nonfinite(model, x, y) names the layer."
        )
        return (
            f"{progress.consecutive_skips} steps in a row were skipped and {losses} losses in a "
            f"row were not finite (patience={self.patience}), {advice} The weights are finite."
        )
