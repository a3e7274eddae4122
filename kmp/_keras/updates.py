"""Keras's optimizers, given views in the place of variables in half precision.

Where all weights and slots are float32, an optimizer takes its own path: `_backend_update_step`,
called by `update` in `_backend/base.py`.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from numbers import Number
from typing import Any

from keras import Variable as KerasVariable
from keras import ops
from keras.optimizers import Optimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from kmp._keras.optimizer import Tensor, Variable


def add_slot(
    optimizer: Any,
    variable: Variable,
    name: str,
    initializer: Any,
    dtype: str,
    shape: tuple[int, ...] | None = None,
) -> Variable:
    """Add a slot for a variable, as `add_variable_from_reference` does, of a dtype of its own.

    If it has a shape of its own too, it must have as many axes, for `keras.distribution`.

    Private: `_layout`, how `keras.distribution` splits the variable.
    """
    return optimizer.add_variable(
        shape=shape or variable.shape,
        initializer=initializer,
        dtype=dtype,
        layout=getattr(variable, "_layout", None),
        name=f"{variable.path.replace('/', '_')}_{name}",
    )


def excluded_from_weight_decay(optimizer: Any) -> dict[str, Any]:
    """What `exclude_from_weight_decay` was told, as its arguments.

    Private: `_exclude_from_weight_decay`, `_exclude_from_weight_decay_pattern`, `_var_key`.
    """
    keys: set[Any] = getattr(optimizer, "_exclude_from_weight_decay", set())
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    variables = optimizer._trainable_variables
    return {
        "var_list": [v for v in variables if optimizer._var_key(v) in keys],
        "var_names": [pattern.pattern] if pattern else None,
    }


def build_by(optimizer: Any, build: Callable[..., None]) -> None:
    """Let a function build an optimizer, the next time that its `build` is called."""

    def once(variables: Sequence[Variable]) -> None:
        del optimizer.build
        build(variables)

    optimizer.build = once


def build_parts_by(
    several: Any, build: Callable[[Any, Sequence[Variable]], None], variables: Sequence[Variable]
) -> None:
    """Build a `keras.optimizers.MultiOptimizer`; let a function build each part for its variables.

    Private: `_optimizer_map`, which may be a function that makes the parts as it is called; and
    `_var_key`.
    """
    choose = several._optimizer_map
    chosen = {several._var_key(v): choose(v) for v in variables}
    parts = {id(x): x for x in chosen.values() if isinstance(x, BaseOptimizer)}
    for part in parts.values():
        build_by(part, functools.partial(build, part))
    several._optimizer_map = lambda v: chosen[several._var_key(v)]
    try:
        several.build(variables)
    finally:
        several._optimizer_map = choose


def build_on_views(
    optimizer: Any,
    variables: Sequence[Variable],
    views: Sequence[Any],
    make_slot: Callable[..., Any],
) -> None:
    """Build an optimizer for variables that it knows by their views as well.

    Private: `_trainable_variables`, `_trainable_variables_indices`; `_untrack_variable`, since
    Keras lists views among the optimizer's variables; and `_exclude_from_weight_decay`, which holds
    the keys of variables.

    Args:
        optimizer: a Keras optimizer.
        variables: what it updates.
        views: what it reads and assigns in their place.
        make_slot: takes the place of `optimizer.add_variable_from_reference`.
    """
    keys = [optimizer._var_key(v) for v in variables]
    excluded: set[Any] = getattr(optimizer, "_exclude_from_weight_decay", set())
    pairs = zip(keys, views, strict=True)
    excluded |= {optimizer._var_key(view) for key, view in pairs if key in excluded}
    optimizer.add_variable_from_reference = make_slot
    try:
        optimizer.build(list(views))
    finally:
        del optimizer.add_variable_from_reference
    for view in [x for x in optimizer.variables if hasattr(x, "variable")]:
        optimizer._untrack_variable(view)
    vars(optimizer)["_trainable_variables"] = list(variables)
    optimizer._trainable_variables_indices.update({key: i for i, key in enumerate(keys)})


_OF_AVERAGES = (
    "_update_model_variables_moving_average",
    "_overwrite_model_variables_with_average_value",
)


def update_by(optimizer: Any, views: Sequence[Any], update: Callable[..., None]) -> None:
    """Let a function do what an optimizer's `update_step` and weight decay do.

    Private: `_apply_weight_decay`; `_backend_update_step`, which on PyTorch updates all variables
    in place; the two methods of `_OF_AVERAGES`.

    Args:
        optimizer: a built Keras optimizer.
        views: of its variables.
        update: takes gradient, variable and learning rate; see `decay_weights` and `update_one`.
    """
    optimizer.update_step = update
    optimizer._apply_weight_decay = _leave_as_they_are
    if is_parallel(optimizer):
        updates_all = _owner(type(optimizer), "_backend_update_step")
        # Nadam's own, which comes next, moves its product of momenta first.
        optimizer._backend_update_step = super(updates_all, optimizer)._backend_update_step
    if optimizer.use_ema:
        for name in _OF_AVERAGES:
            of_views = functools.partial(_on_views, getattr(BaseOptimizer, name), optimizer, views)
            setattr(optimizer, name, of_views)


def is_parallel(optimizer: Any) -> bool:
    """Whether it is one of Keras's that update all variables in place on PyTorch.

    Those compute each number by itself. Classes derived from them are not among them.
    """
    return hasattr(optimizer, "_parallel_update_step")


def update_together_by(optimizer: Any, update: Callable[..., None]) -> None:
    """Let a function update all variables, which takes lists of gradients and of variables.

    Args:
        optimizer: one that `is_parallel`, after `update_by`.
        update: takes gradients, variables and the learning rate.
    """
    begin = optimizer._backend_update_step

    def update_all(gradients: Any, variables: Any, learning_rate: Any) -> None:
        begin([], [], learning_rate)  # Nadam's product of momenta
        update(gradients, variables, learning_rate)

    optimizer._backend_update_step = update_all


def decays(optimizer: Any, variable: Any) -> bool:
    """`_use_weight_decay`: whether weight decay concerns a variable, now or once there is any."""
    return bool(optimizer._use_weight_decay(variable))


def settings_of(optimizer: Any) -> tuple[tuple[str, Any], ...]:
    """The numbers and names that an optimizer has as attributes, some of which its update reads.

    A user may assign another weight decay or momentum at any time.
    """
    plain = str | Number | None
    return tuple((name, x) for name, x in vars(optimizer).items() if isinstance(x, plain))


def _owner(cls: type, name: str) -> Any:
    """The class that a method of `cls` comes from."""
    return next(each for each in cls.__mro__ if name in vars(each))


def _leave_as_they_are(variables: Sequence[Variable]) -> None:
    """Decay no weights: `update` does, one by one."""


def _on_views(
    method: Callable[..., None], optimizer: Any, views: Sequence[Any], variables: Any
) -> None:
    method(optimizer, views)


def finish_on_views(optimizer: Any, views: Sequence[Any]) -> None:
    """Let constraints, and on JAX averages that overwrite the weights, read and assign views too.

    Keras's `apply` gives constraints the variables that it was called with, after the update. Its
    class for JAX writes the averages into `_trainable_variables`, which is private.

    Args:
        optimizer: a built Keras optimizer.
        views: the view of each of its variables; the variable itself if it has no view.
    """
    pairs = [(v.variable, v) for v in views if hasattr(v, "variable")]
    constrained = [pair for pair in pairs if getattr(pair[0], "constraint", None) is not None]
    overwrites = optimizer.use_ema and optimizer.ema_overwrite_frequency
    if constrained or overwrites:
        optimizer.apply = functools.partial(
            _apply, optimizer, _OnViews(optimizer, views, constrained)
        )


def _apply(optimizer: Any, on_views: Any, grads: Any, trainable_variables: Any = None) -> None:
    with on_views():
        type(optimizer).apply(optimizer, grads, trainable_variables or list(on_views.variables))


class _OnViews:
    """Puts views in the place of variables while `apply` runs, perhaps in several threads."""

    def __init__(self, optimizer: Any, views: Sequence[Any], constrained: Sequence[Any]):
        self.variables = list(optimizer._trainable_variables)
        self._optimizer, self._views = optimizer, list(views)
        self._constraints = [
            (
                variable,
                variable.constraint,
                functools.partial(_constrain, view, variable.constraint),
            )
            for variable, view in constrained
        ]
        self._lock, self._within = threading.Lock(), 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._within += 1
            self._set(self._views, 2)
        try:
            yield
        finally:
            with self._lock:
                self._within -= 1
                if not self._within:
                    self._set(self.variables, 1)

    def _set(self, trainable: list[Any], constraint: int) -> None:
        vars(self._optimizer)["_trainable_variables"] = trainable
        for each in self._constraints:
            each[0].constraint = each[constraint]


def _constrain(view: Any, constraint: Callable[..., Any], variable: Any) -> Tensor:
    """Constrain a view; its variable is then assigned what it has."""
    view.assign(constraint(view))
    return ops.convert_to_tensor(variable)


def own_numbers(optimizer: Any) -> list[Variable]:
    """The variables that an optimizer keeps for no weight: iteration, learning rate and so on.

    Private: Nadam has its product of momenta as an attribute, and not among its variables.
    """
    attributes = [v for v in vars(optimizer).values() if isinstance(v, KerasVariable)]
    found = {id(v): v for v in (*optimizer.variables, *attributes)}.values()
    return [v for v in found if not v.shape]


@contextlib.contextmanager
def at_learning_rate(optimizer: Any, learning_rate: Tensor) -> Iterator[None]:
    """Within, an optimizer takes this for its learning rate, whatever its schedule would say.

    Private: `_get_current_learning_rate`. A schedule may look at the iteration, which a function
    that is being traced does not know.
    """
    vars(optimizer)["_get_current_learning_rate"] = lambda: learning_rate
    try:
        yield
    finally:
        del vars(optimizer)["_get_current_learning_rate"]


def row_of(optimizer: Any, variable: Any) -> int:
    """`_get_variable_index`: the place of a variable, or of a replica's copy of it."""
    return optimizer._get_variable_index(variable)


def decay_weights(optimizer: Any, variable: Any) -> None:
    """`_apply_weight_decay` of one variable.

    Keras's classes for TensorFlow and PyTorch read `variable.value` and change it in place. The
    base class, whose method they override, assigns. Muon's own method asks for the path, which
    TensorFlow's variables do not have.
    """
    own = type(optimizer)._apply_weight_decay
    if own is Optimizer._apply_weight_decay:
        own = BaseOptimizer._apply_weight_decay
    elif not hasattr(variable, "path"):
        variable = optimizer._trainable_variables[row_of(optimizer, variable)]
    own(optimizer, [variable])


def update_one(optimizer: Any, gradient: Tensor, variable: Any, learning_rate: Tensor) -> None:
    """The `update_step` of an optimizer's class."""
    type(optimizer).update_step(optimizer, gradient, variable, learning_rate)
