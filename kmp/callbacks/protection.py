"""`protect`: a skipped step in Keras's own training loop leaves nothing behind.

Keras's trainers update the layers' statistics and the averages of loss and metrics before the
optimizer can skip the step. One overflow then makes the epoch's loss NaN, on which other callbacks
stop a healthy run, and stays in BatchNorm's moving statistics for ever.

While a model is protected a `_Guard` stands in the place of its `make_train_function` and
`train_step`, and a `LossTracker` in that of Keras's average of the loss. The functions that Keras
compiles from them are kept on Keras's own train function, so that they are found again by the next
`fit`, and forgotten with it when the model is compiled again.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

from kmp._backend import backend
from kmp._keras import awaits_weights, has_weights, training
from kmp._keras.optimizer import is_loss_scale_optimizer
from kmp._keras.training import Guard, guard_of
from kmp.callbacks.loss_tracker import LossTracker
from kmp.callbacks.skip_guard import protected_step

_USER = "kmp.protect"  # the owner of a hold that outlives `fit`
_REPLACED = ("train_step", "make_train_function")
UNCACHED = "uncached"  # in `compiled_with`: no later `fit` may find the train function


def protect(model: Any) -> "Protection":
    """Let a skipped step of `model` leave nothing behind in `fit` and `train_on_batch`.

    In a step that its optimizer skips, these stay as they were, on every backend and under
    `tf.distribute` too:

    ```
    the state that layers update themselves    moving statistics, counters, of any layer, frozen or
                                               not; the kernel of SpectralNormalization
    variables of the model itself that its     only if the step makes them inf or NaN: a
    `train_step` assigns                       `train_step` that accumulates gradients begins anew
    the epoch's averages                       of the loss and of all metrics, if the loss of the
                                               step is not finite or the step is a spike; of a
                                               metric that it would make inf or NaN
    the loss scale                             if the loss itself was not finite (on JAX; elsewhere
                                               the optimizer sees to it)
    ```

    So an epoch's loss and metrics are those of its batches with a finite loss, whether their steps
    were applied or skipped, as in `evaluate`; spikes are left out.

    With `spikes=` the moving statistics of BatchNormalization also stay as they were in a step that
    is applied, but would multiply a moving variance by more than the rule's factor: after the first
    100 steps, and within a budget of the rule's size.

    On JAX and TensorFlow a traced step also uses float32 for sums that it would otherwise take in
    half precision: in the gradients of biases, of an `Embedding` and of whatever else is looked up.
    CPUs round such a sum after each number, so that a sum of ones stalls.

    The seeds of dropout and augmentation go on: the next step draws other numbers. A batch whose
    mask made it overflow would otherwise do so for ever. A copy of the model is not protected.

    kmp's callbacks protect the model while their `fit` runs. This function does it without them,
    until it is removed. Calling it again changes nothing, nor does `compile`.

    Args:
        model: `keras.Model`, compiled with `kmp.scaled(...)` or another optimizer that scales the
            loss.

    Returns:
        A handle: `remove()` ends the protection, and so does leaving its `with` block.

    Raises:
        TypeError: if `model` is not a Keras model.
        ValueError: if it is not compiled with an optimizer that skips steps.

    Example:

    >>> model = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    >>> model.compile(kmp.scaled("sgd", learning_rate=0.1), "mse")
    >>> x = np.ones((96, 2))
    >>> x[40] = np.inf
    >>> with protect(model):
    ...     history = model.fit(x, np.ones((96, 1)), verbose=0)
    >>> bool(np.isfinite(history.history["loss"][0])), int(model.optimizer.skipped_steps)
    (True, 1)
    """
    training.check_compiled(model, "protect")
    if not is_loss_scale_optimizer(model.optimizer):
        raise ValueError(
            "`protect` is for an optimizer that skips steps. Received: a model compiled with "
            f"{type(model.optimizer).__name__}, which skips none. Write "
            f"model.compile(kmp.scaled({type(model.optimizer).__name__}, ...), ...)."
        )
    guard = guard_of(model) or _Guard(model)
    is_new = guard.hold(Hold(_USER))
    return Protection(model, is_new)


class Protection:
    """What `kmp.protect` returns. Only that function makes it.

    Args:
        model: the model.
        is_new: whether this call put the protection on.
    """

    def __init__(self, model: Any, is_new: bool):
        self._model, self._is_new = model, is_new

    def remove(self) -> None:
        """End the protection: the model trains as Keras does. Nothing happens the second time."""
        release(self._model, _USER)

    def __enter__(self) -> "Protection":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._is_new:  # what was on before the `with` stays on
            self.remove()


@dataclasses.dataclass(frozen=True)
class Hold:
    """What a callback asks of the model while its `fit` runs.

    Attributes:
        owner: who asks; a hold takes the place of an earlier one of the same owner.
        compiled_with: names what else the train function is compiled with, apart from the
            protection, because another `fit` may not need it; None for nothing.
        undo: called when the hold ends, for whatever reason.
        on_error: called before `undo` if the hold ends because a training step raised.
    """

    owner: Hashable
    compiled_with: Hashable = None
    undo: Callable[[], None] | None = None
    on_error: Callable[[], None] | None = None


def protect_fit(model: Any, hold: Hold) -> None:
    """Protect `model` until `release`; for callbacks, in `on_train_begin`.

    If a step of this `fit` raises, the hold ends at once; if something else does, with the next
    `fit`.
    """
    guard = guard_of(model) or _Guard(model)
    guard.hold(hold)
    guard.start()


def release(model: Any, owner: Hashable) -> None:
    """End the hold of `owner`, if there is one; the last one takes everything off the model."""
    if guard := guard_of(model):
        guard.release(owner)


def build_optimizer(model: Any) -> None:
    """Create the optimizer's state if all weights are there; Keras may leave that to a step."""
    if has_weights(model) and not (model.optimizer.built or awaits_weights(model)):
        model.optimizer.build(model.trainable_variables)


class _Functions:
    """What Keras has compiled for a protected model, kept on the train function of the bare one.

    Attributes:
        tracker: the LossTracker whose variables they use.
        train: train steps and the train functions made of them, by what the holds compile
            it with.
        test: the test function, or None.
        plain_test: the test function of the bare model, beside which `test` was made.
    """

    def __init__(self, model: Any):
        with training.strategy_scope(model):
            over_processes = functools.partial(backend.over_processes, model)
            self.tracker = LossTracker(training.loss_tracker(model), over_processes)
        self.train: dict[frozenset, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        self.test: Any = None
        self.plain_test: Any = None

    @classmethod
    def of(cls, model: Any) -> "_Functions":
        """Those that belong to the model's present train function, which is Keras's."""
        function = model.train_function
        if not hasattr(function, "protected"):
            function.protected = cls(model)
        return function.protected


class _Guard(Guard):
    """What stands in the place of a model's own attributes while there is a hold."""

    def __init__(self, model: Any):
        self._model = model
        self._holds: dict[Hashable, Hold] = {}
        self._functions: _Functions | None = None  # while they are in place
        self._own = {k: v for k, v in vars(model).items() if k in _REPLACED}
        self._make = model.make_train_function
        vars(model)["make_train_function"] = self.make_train_function

    def hold(self, hold: Hold) -> bool:
        """Add a hold; tell whether its owner had none."""
        is_new = hold.owner not in self._holds
        self._holds[hold.owner] = hold
        return is_new

    def release(self, owner: Hashable, raised: bool = False) -> None:
        """End a hold; with the last one, put the model's own attributes back."""
        hold = self._holds.pop(owner, None)
        if not self._holds:
            self._step_back()
            self._put_back("make_train_function")
        if hold and raised and hold.on_error:
            hold.on_error()
        if hold and hold.undo:
            hold.undo()

    def abandon(self, raised: bool = True) -> None:
        """End the holds of a `fit` that an exception has left."""
        for owner in [x for x in reversed(self._holds) if x != _USER]:  # the oldest hold ends last
            self.release(owner, raised)

    def make_train_function(self, force: bool = False) -> None:
        """What `fit`, which may find older holds left over, and `train_on_batch` call first."""
        if not training.called_by_train_on_batch():  # a loop may drive its callbacks by hand
            self.abandon(raised=False)
        make = self.start if self._holds else self._make
        make(force)

    def start(self, force: bool = False) -> None:
        """Let the model train by the function that the holds ask for."""
        model = self._model
        if is_loss_scale_optimizer(model.optimizer):
            build_optimizer(model)  # the first step may be skipped already
        functions = self._functions
        current = functions and training.loss_tracker(model) is functions.tracker
        if force or not current or model.train_function is None:  # or compiled anew, or forgotten
            self._step_back()
            self._make(force)
            self._step_in(_Functions.of(model))
        self._choose()

    def _step_in(self, functions: _Functions) -> None:
        model = self._model
        self._functions, self._plain = functions, model.train_function
        model.make_test_function()  # if there is none; its place shows whether it was forgotten
        if functions.plain_test is not model.test_function:
            functions.test, functions.plain_test = None, model.test_function
        model.test_function = functions.test
        self._mean = training.loss_tracker(model)
        training.set_loss_tracker(model, functions.tracker)
        training.note_placements(model)
        # JAX finds what it has traced by the function, so each gets one of its own.
        self._train_step = model.train_step

    def _choose(self) -> None:
        """Put in place the train function compiled for the present holds, or make it."""
        model, functions = self._model, self._functions
        assert functions is not None
        compiled_with = frozenset(x.compiled_with for x in self._holds.values()) - {None}
        if compiled_with in functions.train:
            step, model.train_function = functions.train[compiled_with]
            vars(model)["train_step"] = step  # PyTorch's function calls it by this name
        else:
            step = protected_step(model, self._train_step, functions.tracker)
            vars(model)["train_step"], model.train_function = step, None
            self._make()
            model.train_function = _ended_by_errors(model, model.train_function)
            if UNCACHED not in compiled_with:
                functions.train[compiled_with] = step, model.train_function
        self._chosen = model.train_function

    def _step_back(self) -> None:
        """Put Keras's things back, but for those that were replaced or dropped in between."""
        model, functions = self._model, self._functions
        if functions is None:
            return
        self._functions = None
        self._put_back("train_step")
        if training.loss_tracker(model) is functions.tracker:
            training.set_loss_tracker(model, self._mean)
            functions.test, model.test_function = model.test_function, functions.plain_test
        if model.train_function is self._chosen:
            model.train_function = self._plain

    def _put_back(self, name: str) -> None:
        vars(self._model).pop(name, None)
        vars(self._model).update({name: self._own[name]} if name in self._own else {})


def _ended_by_errors(model: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def train_function(*args: Any) -> Any:
        try:
            return function(*args)
        except backend.END_OF_DATA:
            raise
        except BaseException:
            _end_holds(model)
            raise

    return train_function


def _end_holds(model: Any) -> None:
    # JAX may have lost the state of a step that raised. Then Keras raises here, and the next `fit`
    # ends the holds. It also ends them where an assignment would wait for processes that have not
    # raised.
    if backend.assigns_together(model):
        return
    with contextlib.suppress(Exception):
        backend.settle(model)
        if guard := guard_of(model):
            guard.abandon()
