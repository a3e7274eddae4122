"""What kmp uses of Keras's optimizers, typed, with the private names in one place.

Keras ships no type information, so a subclass of its optimizer would answer every attribute with
Any, a typo included. Type checkers read a description of `BaseLossScaleOptimizer` instead.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import keras
from keras import ops
from keras.distribution import ModelParallel
from keras.optimizers import LossScaleOptimizer, Optimizer, RMSprop
from keras.optimizers.schedules import LearningRateSchedule
from keras.src.utils.naming import to_snake_case

Variable: TypeAlias = Any  # keras.Variable
Tensor: TypeAlias = Any  # of any backend
Gradient: TypeAlias = Any  # Tensor, tf.IndexedSlices or None

if TYPE_CHECKING:

    class BaseLossScaleOptimizer:
        """The part of `keras.optimizers.LossScaleOptimizer` that kmp uses or inherits."""

        name: str
        built: bool
        inner_optimizer: Any  # keras.optimizers.Optimizer
        initial_scale: float
        dynamic_growth_steps: int | None
        step_counter: Variable
        dynamic_scale: Variable
        learning_rate: Any  # a float, a Variable or a schedule
        loss_scale_factor: float | None

        def __init__(
            self,
            inner_optimizer: Any,
            initial_scale: float = ...,
            name: str | None = ...,
            **kwargs: Any,
        ) -> None: ...
        @property
        def iterations(self) -> Variable: ...
        @property
        def steps(self) -> Variable: ...
        @property
        def own_variables(self) -> list[Variable]: ...
        @property
        def variables(self) -> list[Variable]: ...
        def build(self, var_list: Sequence[Variable]) -> None: ...
        def add_variable(self, *args: Any, **kwargs: Any) -> Variable: ...
        def apply(
            self, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None
        ) -> None: ...
        def apply_gradients(self, grads_and_vars: Any) -> Variable: ...
        def scale_loss(self, loss: Tensor) -> Tensor: ...
        def stateless_apply(
            self,
            optimizer_variables: Sequence[Tensor],
            grads: Sequence[Gradient],
            trainable_variables: Sequence[Tensor],
        ) -> tuple[list[Tensor], list[Tensor]]: ...
        def finalize_variable_values(self, var_list: list[Variable]) -> None: ...
        def exclude_from_weight_decay(
            self, var_list: Any = None, var_names: Any = None
        ) -> None: ...
        def set_weights(self, weights: Sequence[Any]) -> None: ...
        def save_own_variables(self, store: Any) -> None: ...
        def load_own_variables(self, store: Any) -> None: ...
        def get_config(self) -> dict[str, Any]: ...
        @classmethod
        def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any: ...

else:

    class BaseLossScaleOptimizer(LossScaleOptimizer):
        """Keras's class, without the branch of its `stateless_apply`, and built whole."""

        @property
        def steps(self):
            """Steps so far, skipped ones included; `iterations` counts the applied ones.

            Private: `_iterations`.
            """
            return self._iterations

        @property
        def own_variables(self):
            """The variables of the wrapper alone. Private: `_variables`."""
            return list(self._variables)

        def build(self, var_list):
            """Build the optimizer and the one inside it.

            Before Keras 3.12 the former was not built: it knew none of the variables, and Keras's
            `Optimizer.stateless_apply` refused to run. Private: `_trainable_variables`.
            """
            super().build(var_list)
            if var_list and not self._trainable_variables:
                super(LossScaleOptimizer, self).build(var_list)

        def stateless_apply(self, optimizer_variables, grads, trainable_variables):
            """`apply` as a pure function, for JAX.

            Args:
                optimizer_variables: values of `optimizer.variables`.
                grads: gradients of the scaled loss.
                trainable_variables: values of the variables that the optimizer was built with.

            Returns:
                `(trainable_variables, optimizer_variables)` after the step.
            """
            above = super(LossScaleOptimizer, self)
            return above.stateless_apply(optimizer_variables, grads, trainable_variables)


# What Keras's LossScaleOptimizer has in its old files and does nothing with.
_WITHOUT_EFFECT = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}


def refuse_settings(arguments: dict[str, Any]) -> None:
    """Refuse settings of the inner optimizer that were given to the one around it.

    Keras does so since 3.12, and ignored them before.

    Raises:
        ValueError: if one of them is not at its default.
    """
    if not arguments.get("dynamic", True):
        raise ValueError(
            "A LossScaleOptimizer has no `dynamic`. Received: dynamic=False. Leave it out, and "
            "write loss_scale=1024.0, or whatever the fixed scale should be, where Keras would "
            "have you set `loss_scale_factor`."
        )
    for name, value in arguments.items():
        if name in _WITHOUT_EFFECT and value != _WITHOUT_EFFECT[name]:
            raise ValueError(
                f"A LossScaleOptimizer has no `{name}` of its own. Received: {name}={value!r}. "
                f"Set `{name}` on the `inner_optimizer`"
                + (", or write loss_scale." if name == "loss_scale_factor" else ".")
            )


def inner_optimizer_of(optimizer: Any) -> Any:
    """The optimizer inside one that scales the loss, or `optimizer` itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def is_several(optimizer: Any) -> bool:
    """Whether it is a `keras.optimizers.MultiOptimizer`, which older versions of Keras lack."""
    return hasattr(inner_optimizer_of(optimizer), "optimizers")


def chooses_by_function(optimizer: Any) -> bool:
    """`_optimizer_map`: whether a function says which part of a MultiOptimizer takes a variable.

    It may return the same optimizers each time, or new ones. An `OptimizerMap` is like a dict.
    """
    inner = inner_optimizer_of(optimizer)
    return is_several(inner) and not hasattr(inner._optimizer_map, "values")


def parts_of(optimizer: Any) -> list[Any]:
    """Those that update: the inner one, or those in a `keras.optimizers.MultiOptimizer`."""
    inner = inner_optimizer_of(optimizer)
    return getattr(inner, "optimizers", None) or [inner]


def variables_by_part(
    optimizer: Any, variables: Sequence[Variable]
) -> list[tuple[Any, list[Variable]]]:
    """Each optimizer that updates some of these variables, and which.

    Before a `keras.optimizers.MultiOptimizer` is built, `_optimizer_map` says which optimizer takes
    which variable. It may make one for each variable: those with the same settings count as one.
    """
    inner = inner_optimizer_of(optimizer)
    if not is_several(inner):
        return [(inner, list(variables))]
    parts = [x for x in inner.optimizers if x.built]
    pairs = [(x, v) for x in parts for v in trainable_variables_of(x)]
    ids = {id(v) for v in variables}
    pairs = pairs or [(inner._optimizer_map(v), v) for v in variables]
    found: dict[tuple[type, str], tuple[Any, list[Variable]]] = {}
    for part, v in pairs:
        if id(v) in ids:
            key = type(part), str(part.get_config() | {"name": ""})
            found.setdefault(key, (part, []))[1].append(v)
    return list(found.values())


def optimizers_of(model: Any) -> dict[str, Optimizer]:
    """The optimizers of a model by the names of their attributes.

    That of `compile` is `"optimizer"`. It is left out where `compile` took its default, RMSprop,
    and the model has others, as of a GAN: then its train step uses the others.
    """
    compiled = getattr(model, "optimizer", None)
    attributes = {name: x for name, x in vars(model).items() if x is not compiled}
    own = {k: x for k, x in attributes.items() if isinstance(x, Optimizer)}
    if compiled is None or (own and _made_by_default(compiled)):
        return own
    return {"optimizer": compiled, **own}


def _made_by_default(optimizer: Any) -> bool:
    """Whether an optimizer is as `compile` makes it by default, or Keras has wrapped that one."""
    optimizer = inner_optimizer_of(optimizer)
    if not isinstance(optimizer, RMSprop):  # on PyTorch a subclass of it
        return False
    alike = RMSprop(name=optimizer.name)
    return optimizer.get_config() == alike.get_config()


def plain_name_of(optimizer: Any) -> str | None:
    """`to_snake_case`: the name that Keras gives the first optimizer of a class of its own.

    Args:
        optimizer: a class, or a name of one.

    Returns:
        The name; None of a class that is not Keras's, whose constructor may take none.
    """
    for each in vars(keras.optimizers).values():
        if not isinstance(each, type):
            continue
        if each is optimizer or each.__name__.lower() == str(optimizer).lower():
            return to_snake_case(each.__name__)
    return None


def is_loss_scale_optimizer(optimizer: Any) -> bool:
    """Whether an optimizer is a LossScaleOptimizer, Keras's or kmp's."""
    return isinstance(optimizer, LossScaleOptimizer)


def trainable_variables_of(optimizer: Any) -> list[Variable]:
    """`_trainable_variables`: the variables that a built optimizer updates."""
    return optimizer._trainable_variables


def steps_of(optimizer: Any) -> Variable:
    """`_iterations`: int[], calls of `apply`, from which `iterations` may be computed."""
    return optimizer._iterations


def portable_config(optimizer: Any) -> dict[str, Any]:
    """The serialized config of an optimizer, in names that every backend knows.

    On PyTorch Keras replaces its optimizers by classes of `keras.src.backend.torch`, which no other
    backend can run, and serializes those.
    """
    config = keras.saving.serialize_keras_object(optimizer)
    module = config["module"]  # None of a class that the running program itself defines
    if module and module.startswith("keras.src.backend."):
        config = {**config, "module": "keras.optimizers", "registered_name": None}
    return config


def replace_learning_rate(optimizer: Any, rate: Any) -> Any:
    """`_learning_rate`: set the variable or schedule of the rate, and return the one before.

    Keras's setter replaces a schedule only by another schedule, and would forget the variable of a
    plain number; `setattr` would list that variable twice.
    """
    before = vars(optimizer)["_learning_rate"]
    vars(optimizer)["_learning_rate"] = rate
    return before


def rows_of(optimizer: Any, variables: Sequence[Variable]) -> list[int]:
    """`_var_key`, `_trainable_variables_indices`: the places of variables; -1 of an unknown one.

    Keras's key knows a `tf.Variable` of MirroredStrategy by its container.
    """
    places = optimizer._trainable_variables_indices
    return [places.get(optimizer._var_key(v), -1) for v in variables]


def rate_of_last_step(optimizer: Any) -> Tensor:
    """`_learning_rate`, which may be a schedule; `learning_rate` is that of the next step.

    Keras gives a schedule the number of calls of `apply`, micro-batches of an accumulation too.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, LearningRateSchedule):
        rate = rate(ops.maximum(ops.convert_to_tensor(steps_of(optimizer)) - 1, 0))
    return ops.convert_to_tensor(rate)


def accumulators_of(optimizer: Any) -> list[Variable]:
    """The accumulators of gradients; float8's scales have none."""
    return [x for x in accumulators_by_row(optimizer) if x is not None]


def accumulators_by_row(optimizer: Any) -> list[Variable | None]:
    """`_accumulated_gradients`: one or None for each variable."""
    return optimizer._accumulated_gradients


def averages_of(optimizer: Any) -> list[Variable]:
    """`_model_variables_moving_average`: of the weights, with `use_ema`."""
    averages = optimizer._model_variables_moving_average if optimizer.use_ema else []
    return [x for x in averages if x is not None]


def own_the_averages(optimizer: Any) -> None:
    """Give the moving averages buffers of their own again.

    After Keras has written them into the weights, both share one on JAX, which the next `fit`
    cannot donate twice.
    """
    for average in averages_of(optimizer):
        average.assign(ops.copy(average.value))


def layouts_of(variables: Sequence[Variable]) -> list[Any]:
    """How `keras.distribution` lays variables on devices, in the backend's terms.

    Empty if it splits none of them, and on PyTorch, where the variables say so themselves.
    """
    distribution = keras.distribution.distribution()
    if not isinstance(distribution, ModelParallel):
        return []
    layouts = [distribution.get_variable_layout(v) for v in variables]
    layouts = [getattr(layout, "backend_layout", layout) for layout in layouts]
    is_whole = [getattr(layout, "is_fully_replicated", True) for layout in layouts]
    return [] if all(is_whole) else layouts
