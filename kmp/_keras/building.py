"""What happens when Keras builds a layer."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend.common.variables import AutocastScope


def after_build(layer: Any, action: Callable[[], None]) -> None:
    """Call `action` once, when `layer.build` has run and before the layer is called.

    Nothing happens if the layer's class has no `build` of its own, since it creates no layers then,
    or if the layer waits for an action already. Private: `_is_default`, Keras's mark of a `build`
    that a class has not overridden.
    """
    build = layer.build
    if getattr(build, "_is_default", False) or getattr(build, "_has_action", False):
        return

    @functools.wraps(build)
    def build_and_act(*args, **kwargs):
        build(*args, **kwargs)
        layer.build = build
        action()

    build_and_act._has_action = True  # type: ignore[attr-defined]
    layer.build = build_and_act


class _Uncast(AutocastScope):
    """A scope that casts no variable; those of the models below are float32."""

    def __init__(self) -> None:
        super().__init__("float32")

    def maybe_cast(self, value: Any) -> Any:
        return value


def calls_in_a_scope(model: Any) -> contextlib.AbstractContextManager[None]:
    """Within, `model.call` runs in a scope on JAX, as it does where the model itself is called.

    In a scope, layers whose `autocast` is false, such as an `Embedding`, do not cast variables. The
    train step of Keras on JAX opens no scope, and only there would such a variable be rounded to
    half precision, and its gradient too. Private: `AutocastScope`.
    """
    if keras.backend.backend() != "jax" or not _can_be_called_in_a_scope(model):
        return contextlib.nullcontext()
    return _with_call(model, _in_a_scope)


def _can_be_called_in_a_scope(model: Any) -> bool:
    """Whether all weights are float32, for those in half precision would not be cast there."""
    dtypes = {v.dtype for v in model.variables if keras.backend.is_float_dtype(v.dtype)}
    return dtypes <= {"float32"}


def _in_a_scope(call: Callable[..., Any]) -> Callable[..., Any]:
    def call_in_a_scope(*args, **kwargs):
        with _Uncast():
            return call(*args, **kwargs)

    return call_in_a_scope


@contextlib.contextmanager
def _with_call(
    layer: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Within, a layer has another `call`, made of its own."""
    call, before = layer.call, vars(layer).get("call")
    layer.call = functools.wraps(call)(around(call))
    try:
        yield
    finally:
        del layer.call
        if before is not None:  # of `recompute_calls`
            layer.call = before


def casting_inputs(layer: Any) -> contextlib.AbstractContextManager[None]:
    """Within, `layer.call` casts its inputs to the compute dtype, as calling the layer does.

    Keras builds a loaded model only by its `call`, on float32 inputs. A residual sum in half
    precision fails then, and the model is left without weights.
    """

    def cast_first(call: Callable[..., Any]) -> Callable[..., Any]:
        def cast_and_call(*args, **kwargs):
            args, kwargs = keras.tree.map_structure(_cast_by(layer), (args, kwargs))
            return call(*args, **kwargs)

        return cast_and_call

    return _with_call(layer, cast_first)


def _cast_by(layer: Any) -> Callable[[Any], Any]:
    policy, dtype = layer.dtype_policy, layer.input_dtype
    return lambda x: policy.convert_input(x, layer.autocast, dtype)
