"""`LearningRateFinder`: one short sweep that says how large the learning rate may be."""

import math
import os
from typing import Any

import keras
from keras.optimizers import Optimizer

from kmp._backend import backend
from kmp._backend.random_states import RandomStates
from kmp._common import number, warn, whole_number
from kmp._keras.optimizer import is_several
from kmp.callbacks.loss_tracker import RECENT
from kmp.callbacks.lr_range import draw, has_diverged, smooth, steepest
from kmp.callbacks.lr_sweep import SweptModel
from kmp.callbacks.progress import read_progress, warn_of_unseen_loss
from kmp.callbacks.protection import UNCACHED, Hold, build_optimizer, protect_fit, release
from kmp.summaries import SummaryWriter, check_can_write

# After this many losses in a row that are not finite, or steps in a row that were skipped although
# the loss scale cannot fall any further, the sweep ends: nothing will come of it.
_DEAD = 10


class LearningRateFinder(keras.callbacks.Callback):
    """Sweeps the learning rate in one short run, suggests one, and puts the model back.

    This is the range test: the learning rate grows from `min_lr` to `max_lr` by the same factor in
    each step, and the loss of each step is recorded with it. The suggestion is the learning rate at
    which the loss, averaged with its neighbours on both sides, falls fastest. The sweep ends early
    once the loss has diverged: its average over the past is 4 times the best one so far, or the
    loss is not finite.

    ```
    finder = kmp.callbacks.LearningRateFinder()
    rate = finder.find(model, x, y, batch_size=64)        # the model is as it was
    model.optimizer.learning_rate = rate                  # or the top of a schedule
    ```

    It is also a callback of `fit`, which then needs enough `epochs` for `steps`. When `fit` ends,
    all of this goes back to what it was before: weights, the layers' statistics and seeds, the
    optimizer with its loss scale and its counters, metrics and the random states. If an exception
    leaves `fit`, call `restore()`; `find` does so by itself. The sweep replaces a learning-rate
    schedule as well, and works under any `steps_per_execution`. A skipped step does not give a
    point: the sweep waits for the next step that is applied.

    Args:
        min_lr: float > 0, where the sweep begins.
        max_lr: float > `min_lr`, where it ends unless the loss diverges before.
        steps: int >= 10, points of the sweep: training steps that are not skipped. Of
            `steps_per_execution` above 128 the last 128 of each execution are points.
        log_dir: directory for TensorBoard's event files (the points as scalars, the curve as an
            image, the suggestion as a text), or None for none. Of several processes that train
            one model together only the first writes.

    Attributes:
        suggestion: float, the suggested learning rate; None before the sweep, and if the loss fell
            by no more than its noise.
        learning_rates: list of float, those that were tried.
        losses: list of float, the loss of the step that each was tried in.
        stopped_because: str, why the sweep ended before `max_lr`; None if it did not.

    Raises:
        ValueError: if an argument is out of its range, and in `fit` without a Keras optimizer, or
            with a `keras.optimizers.MultiOptimizer`, which has several learning rates.

    Warns:
        kmp.PrecisionWarning: if `fit` ended before the sweep did, if there is nothing to suggest,
            and if the model's own `train_step` or `metrics` keeps the loss from it.

    Example:

    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(kmp.scaled("sgd", learning_rate=0.1), "mse")
    >>> x = np.random.default_rng(0).normal(size=(64, 4))
    >>> finder = kmp.callbacks.LearningRateFinder()
    >>> rate = finder.find(model, x, x[:, :1], batch_size=16)
    >>> 1e-3 < rate < 1 and rate in finder.learning_rates
    True
    >>> int(model.optimizer.steps)
    0

    Source: the test is from Smith 2015, *Cyclical Learning Rates for Training Neural Networks*.
    Growing by a factor, ending at 4 times the best and choosing the steepest point are fastai's.
    Averaging on both sides, and suggesting nothing where the fall is below the noise, are kmp's: of
    2,000 curves of 100 points each that held nothing but noise, 0.7% (normal, standard deviation
    20% of the loss) to 1.2% (Student's t(4) in the exponent, 30%) led to a suggestion.
    """

    def __init__(
        self,
        min_lr: float = 1e-6,
        max_lr: float = 10.0,
        steps: int = 100,
        *,
        log_dir: str | os.PathLike[str] | None = None,
    ):
        super().__init__()
        owner = "LearningRateFinder"
        self.min_lr, self.max_lr = number("min_lr", min_lr, owner), number("max_lr", max_lr, owner)
        if not 0 < self.min_lr < self.max_lr < math.inf:
            raise ValueError(
                "`min_lr` of LearningRateFinder must be positive and below a finite `max_lr`. "
                f"Received: min_lr={min_lr}, max_lr={max_lr}. The defaults are 1e-6 and 10."
            )
        self.steps = whole_number("steps", steps, owner)
        if self.steps < 10:
            raise ValueError(
                "`steps` of LearningRateFinder must be at least 10, or there is no curve. "
                f"Received: steps={steps}. Write steps=100, the default."
            )
        if log_dir is not None:
            check_can_write()
        self.log_dir = log_dir
        self._swept: SweptModel | None = None
        self._begin()

    def _begin(self) -> None:
        self.suggestion: float | None = None
        self.learning_rates: list[float] = []
        self.losses: list[float] = []
        self.stopped_because: str | None = None
        self._over = False

    def find(self, model: Any, x: Any = None, y: Any = None, **fit_arguments: Any) -> float | None:
        """Run the sweep on a compiled model, put it back whatever happens, return the suggestion.

        Args:
            model: `keras.Model`, compiled.
            x, y: the training data, as `fit` takes them.
            **fit_arguments: other arguments of `fit`, such as `batch_size`. By default there are as
                many epochs as the sweep needs, and `verbose=0`.

        Returns:
            The suggested learning rate, or None.
        """
        defaults = {"epochs": 100 * self.steps, "verbose": 0}
        callbacks = [*(fit_arguments.pop("callbacks", None) or ()), self]
        random_states = RandomStates()  # fit shuffles before it asks its callbacks
        try:
            model.fit(x, y, callbacks=callbacks, **{**defaults, **fit_arguments})
        finally:
            self.restore()
            random_states.restore()
        return self.suggestion

    def restore(self) -> None:
        """Put the model back to where it was before the sweep; nothing if that has been done."""
        if self._swept is not None:
            swept, self._swept = self._swept, None
            release(self._trained, self)
            swept.restore()

    def set_model(self, model):
        super().set_model(model)
        self._trained: Any = model  # `self.model` would bring all of JAX's state out of the loop
        if not isinstance(getattr(model, "optimizer", None), Optimizer):
            raise ValueError(
                "LearningRateFinder needs a model that is compiled with an optimizer of Keras. "
                f"Received: optimizer={getattr(model, 'optimizer', None)!r}. Write "
                'model.compile(kmp.scaled("adam"), ...).'
            )
        if is_several(model.optimizer):
            raise ValueError(
                "LearningRateFinder sweeps one learning rate, and a MultiOptimizer has one for "
                f"each part. Received: optimizer={model.optimizer!r}. Compile with one optimizer "
                "for the whole model while you look for its rate: "
                'model.compile(kmp.scaled("adam"), ...).'
            )
        self.restore()  # what an exception has left of the last sweep

    def on_train_begin(self, logs=None):
        self._begin()
        model = self._trained
        build_optimizer(model)
        self._swept = SweptModel(model, self.min_lr, self.max_lr, self.steps)
        # A train function of its own: others keep the learning rate that they were compiled with.
        protect_fit(model, Hold(self, compiled_with=UNCACHED, on_error=self.restore))
        progress = read_progress(model)
        self._applied = self._swept.sweep.first_step
        self._counted, self._seen = progress.counted_steps, progress.seen_steps

    def on_train_batch_begin(self, batch, logs=None):
        self._look()

    def on_epoch_end(self, epoch, logs=None):
        self._look()

    def on_train_end(self, logs=None):
        seen = read_progress(self._trained).seen_steps > self._seen
        self.restore()
        done = len(self.losses)
        place = steepest(self.learning_rates, self.losses)
        if not seen:
            warn_of_unseen_loss(self)
        elif not self._over:
            warn(
                f"fit ended after {done} of {self.steps} points of the sweep. Write `epochs` that "
                "are enough for it, or call finder.find(model, x, y), which does."
            )
        if seen and place is None:
            warn(
                f"LearningRateFinder suggests nothing: in {done} points the loss did not fall by "
                "more than its noise. Sweep another range, or more `steps`."
            )
        if place is not None:
            self.suggestion = self.learning_rates[place]
        if self.log_dir is not None and done and backend.writes_logs(self._model):
            self._write(self.log_dir)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the losses over the learning rates into a PNG file.

        Args:
            path: where the file goes.

        Raises:
            ModuleNotFoundError: without pillow, which `kmp[tensorboard]` installs.
            ValueError: before there are two points.
        """
        if len(self.losses) < 2:
            raise ValueError(
                f"There is nothing to plot. Received: a finder with {len(self.losses)} points. "
                "Call finder.find(model, x, y) first."
            )
        picture, _ = draw(self.learning_rates, self.losses, self.suggestion)
        with open(path, "wb") as file:
            file.write(picture)

    def _look(self) -> None:
        swept = self._swept
        if swept is None or self._over:
            return
        progress = read_progress(self._trained)
        applied, counted = progress.applied_steps, progress.counted_steps
        # Where the model's own train step tells no loss, or not one a step, there are no points.
        if applied - self._applied == counted - self._counted:
            end = min(applied, swept.sweep.first_step + self.steps)
            for step in range(max(self._applied, applied - RECENT), end):
                loss = float(progress.recent[(counted - applied + step) % RECENT])
                self._add_point(swept.sweep.at(step), loss)
        self._applied, self._counted = applied, counted
        dead = max(progress.nonfinite_losses, progress.hopeless_skips)
        if dead >= _DEAD:
            self._stop(f"{dead} losses or steps in a row were not finite")
        if applied - swept.sweep.first_step >= self.steps:
            self._over = True
        if self._over:
            self._trained.stop_training = True

    def _add_point(self, learning_rate: float, loss: float) -> None:
        if self._over:
            return
        if not math.isfinite(loss):
            self._stop("the loss was not finite")
            return
        self.learning_rates.append(learning_rate)
        self.losses.append(loss)
        if has_diverged(self.losses) and len(self.losses) < self.steps:
            self._stop("the loss diverged")

    def _stop(self, reason: str) -> None:
        if not self._over:
            last = f" after {self.learning_rates[-1]:.2g}" if self.learning_rates else ""
            self.stopped_because, self._over = f"{reason}{last}", True

    def _write(self, log_dir: str | os.PathLike[str]) -> None:
        with SummaryWriter(log_dir) as writer:
            points = zip(self.learning_rates, self.losses, smooth(self.losses), strict=True)
            for step, (rate, loss, smoothed) in enumerate(points):
                tags = {"learning_rate": rate, "loss": loss, "smoothed_loss": smoothed}
                writer.scalars({f"learning_rate_finder/{k}": v for k, v in tags.items()}, step)
            if len(self.losses) > 1:
                picture, size = draw(self.learning_rates, self.losses, self.suggestion)
                writer.image("learning_rate_finder/curve", picture, *size, 0)
            found = "none" if self.suggestion is None else f"**{self.suggestion:.3g}**"
            writer.text("learning_rate_finder/suggestion", found, 0)
