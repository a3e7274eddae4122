"""What `kmp.LossScaleOptimizer` may be built from, and what its methods take."""

from collections.abc import Sequence
from typing import Any, NoReturn

import keras
from keras import ops
from keras.optimizers import Optimizer

from kmp._backend import backend
from kmp._backend.types import Gradient, Tensor, Variable
from kmp._common import is_number, warn
from kmp.health.telemetry import Telemetry
from kmp.precision.trees import is_float
from kmp.scaling import rules
from kmp.scaling.rules import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale


def gone(name: str, instead: str) -> property:
    """An attribute that scripts for Keras 2 read, and that says what to write now."""

    def read(optimizer: Any) -> NoReturn:
        raise AttributeError(f"Keras 3 has no `{name}`. {instead}")

    return property(read)


def choose_rule(loss_scale: Any, initial_scale: Any, growth_interval: Any) -> LossScale:
    """Return the strategy that kmp's argument or Keras's two describe."""
    given = {"initial_scale": initial_scale, "growth_interval": growth_interval}
    given = {name: value for name, value in given.items() if value is not None}
    if loss_scale is not None:
        if given:
            raise ValueError(
                "Pass either `loss_scale` or Keras's `initial_scale` and `dynamic_growth_steps`. "
                f"Received: loss_scale={loss_scale!r} and {given}. Write "
                "loss_scale=kmp.DynamicLossScale(initial_scale=..., growth_interval=...)."
            )
        return rules.get(loss_scale)
    if is_number(initial_scale):  # Keras's argument has no bounds, so ours make room for it
        given["min_scale"] = min(DynamicLossScale.min_scale, initial_scale)
        given["max_scale"] = max(DynamicLossScale.max_scale, initial_scale)
    return DynamicLossScale(**given)


_STORED = {"f": "float32", "i": "int32", "u": "int32"}  # by the kinds of NumPy's dtypes


def checked_state(rule: LossScale) -> Any:
    """Return the first state of a strategy with NumPy arrays in its fields, of float32 or int32.

    Raises:
        ValueError: if the state is not a NamedTuple with `scale`, or a field holds neither floats
            nor integers.
    """
    state = rule.init()
    if "scale" not in getattr(state, "_fields", ()):
        raise ValueError(
            f"`init` of {type(rule).__name__} must return a NamedTuple with a field `scale`. "
            f"Received: {state!r}. Write class State(typing.NamedTuple), with scale and what else "
            "the strategy needs, and return State(scale=...)."
        )
    arrays = {name: keras.ops.convert_to_numpy(x) for name, x in state._asdict().items()}
    for name, array in arrays.items():
        if array.dtype.kind not in _STORED:
            raise ValueError(
                f"The field {name!r} of the state of {type(rule).__name__} must hold floats or "
                f"integers. Received: {array.dtype}. Write a 0 or 1 for a truth value."
            )
        arrays[name] = array.astype(_STORED[array.dtype.kind])
    if arrays["scale"].shape:
        raise ValueError(
            f"`scale` of the state of {type(rule).__name__} must be one number. Received: an array "
            f"of shape {arrays['scale'].shape}."
        )
    return type(state)(**arrays)


def checked_inner(optimizer: Any) -> Any:
    """Return the inner optimizer as an instance, or say why it cannot be one."""
    if isinstance(optimizer, type):
        raise ValueError(
            f"`inner_optimizer` must be an optimizer instance. Received the class "
            f"{optimizer.__name__}. Write kmp.scaled({optimizer.__name__}, ...) or pass "
            f"{optimizer.__name__}(...)."
        )
    optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            "`optimizer` must be a Keras optimizer: a class, an instance, a name or a config. "
            f"Received: {optimizer!r}. Write for example kmp.scaled(keras.optimizers.Adam)."
        )
    if type(optimizer).scale_loss is not Optimizer.scale_loss:
        raise ValueError(
            "`inner_optimizer` must not scale the loss itself: two scales would divide the "
            f"learning rate. Received: {type(optimizer).__name__}, which overrides `scale_loss`. "
            "Pass its `inner_optimizer` if it wraps one, or an optimizer without that method."
        )
    return optimizer


_OF_ONE = (NoOpLossScale(), StaticLossScale(1.0))


def scales(rule: Any) -> bool:
    """Whether a strategy multiplies the loss by anything but 1."""
    return rule not in _OF_ONE


def check_float16(rule: LossScale, variables: Sequence[Variable]) -> None:
    """Raise ValueError for float16 on a TPU, and warn of float16 without a scale.

    A TPU's compiler would give up later, and less clearly. Without a scale small gradients vanish
    silently.
    """
    where = _float16_in(variables)
    if where and backend.platform() == "tpu":
        raise ValueError(
            "A TPU computes in bfloat16 or float32: its compiler has no float16 matrix product. "
            f"Received: float16 in {where}. Write "
            'keras.config.set_dtype_policy("mixed_bfloat16") before building the model.'
        )
    if where and not scales(rule):
        warn(
            f"float16 without loss scaling ({where}): gradients below 6e-8 become zero. Write "
            'loss_scale="dynamic", or train in bfloat16, which needs no loss scaling.'
        )


def warn_of_unscaled_loss() -> None:
    """Warn that gradients arrive although nothing has scaled their loss."""
    warn(
        "Gradients are applied, but nothing has scaled their loss: they will be divided by a loss "
        "scale that they were not multiplied by, and the weights hardly move. In your "
        "train_step, write loss = self.optimizer.scale_loss(loss) before taking gradients; on "
        "JAX, self.optimizer.stateless_scale_loss(optimizer_variables, loss). If "
        "another LossScaleOptimizer wraps this one, compile with this one alone. If "
        'nothing needs scaling, as in bfloat16, write kmp.scaled(..., loss_scale="none").'
    )


def _float16_in(variables: Sequence[Variable]) -> str | None:
    """Name what computes or is stored in float16, if anything that can be seen from here does."""
    for variable in variables:
        if variable.dtype == "float16":
            return variable.path
    policy = keras.config.dtype_policy()
    return f"the policy {policy.name!r}" if policy.compute_dtype == "float16" else None


def check_stateless(optimizer: Any, values: Sequence[Tensor]) -> None:
    """Raise ValueError unless there is one value for each of the optimizer's variables."""
    if not optimizer.built or len(values) != len(optimizer.variables):
        raise ValueError(
            "`optimizer_variables` must hold one value for each of optimizer.variables. Received: "
            f"{len(values)} values for {len(optimizer.variables)} variables "
            f"(built={optimizer.built}). Write optimizer.build(model.trainable_variables) and "
            "[v.value for v in optimizer.variables] before the loop."
        )


def telemetry_of(optimizer: Any, method: str) -> Telemetry:
    """Return the measurements of an optimizer, or raise ValueError if it has none."""
    if optimizer.telemetry is None:
        raise ValueError(
            f"`{method}` needs an optimizer that is built and measures. Received: "
            f"built={optimizer.built}, measure_gradients={optimizer.measure_gradients}. Call "
            "optimizer.build(model.trainable_variables) first, and leave measure_gradients=False "
            "out."
        )
    return optimizer.telemetry


def refuse_complex(variables: Sequence[Variable]) -> None:
    """Raise ValueError for complex variables, whose gradients Keras's optimizers get wrong.

    Adam, for one, squares them, where the square of the absolute value is meant.
    """
    for variable in variables:
        if "complex" in str(variable.dtype):
            raise ValueError(
                f"The variables of an optimizer must be real. Received: {_name(variable)!r} of "
                f"dtype {variable.dtype}. Write two float variables, for the real part and the "
                "imaginary part, and join them by keras.ops.view_as_complex in `call`."
            )


def refuse_unknown(variables: Sequence[Variable], rows: Sequence[int]) -> None:
    """Raise ValueError for a variable that the optimizer was not built with: its row is -1."""
    for variable, row in zip(variables, rows, strict=True):
        if row < 0:
            raise ValueError(
                "`apply` takes the variables that the optimizer was built with. Received: "
                f"{_name(variable)!r}, which is not one of them. If it was frozen then, compile "
                "the model again with a new optimizer. Otherwise give each model its own "
                "optimizer, and build it once all layers exist."
            )


def checked_gradients(grads: Sequence[Any], variables: Sequence[Variable]) -> list[Gradient]:
    """Return `grads` as tensors of floats, `tf.IndexedSlices` or None, one for each variable.

    Lists, NumPy arrays and integers become tensors of their variable's dtype, because loss scaling
    divides only floats.

    Raises:
        ValueError: if there is not one entry for each variable, if all are None, or if one has
            another shape than its variable.
    """
    if len(grads) != len(variables):
        raise ValueError(
            "`grads` must hold one gradient (or None) for each variable. Received: "
            f"{len(grads)} gradients for {len(variables)} variables."
        )
    if all(g is None for g in grads):
        raise ValueError(
            "No gradients provided for any variable. Is the loss computed from the model's "
            "outputs, and does `compile` have a `loss`?"
        )
    return [_checked(g, v) for g, v in zip(grads, variables, strict=True)]


def _checked(gradient: Any, variable: Variable) -> Gradient:
    has_dtype = hasattr(gradient, "dtype")
    if has_dtype and is_float(gradient) and gradient.shape == tuple(variable.shape):
        return gradient  # nearly always, and told in the least time
    if gradient is None or not backend.are_dense([gradient])[0]:
        return gradient
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if not has_dtype:
        gradient = ops.convert_to_tensor(gradient, dtype)
    elif not is_float(gradient):
        gradient = ops.cast(gradient, dtype)
    if not getattr(gradient.shape, "is_fully_defined", lambda: True)():
        return gradient  # TensorFlow knows its shape only when the step runs
    if tuple(gradient.shape) != tuple(variable.shape):
        raise ValueError(
            "A gradient must have the shape of its variable. Received: a gradient of shape "
            f"{tuple(gradient.shape)} for {_name(variable)!r} of shape {tuple(variable.shape)}. "
            "Are `grads` and `trainable_variables` in the same order?"
        )
    return gradient


def _name(variable: Variable) -> str:
    return getattr(variable, "path", variable.name)  # TensorFlow's own have no path
