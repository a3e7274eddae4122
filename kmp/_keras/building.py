"""What happens when Keras builds a layer."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras


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


@contextlib.contextmanager
def casting_inputs(layer: Any) -> Iterator[None]:
    """Within, `layer.call` casts its inputs to the compute dtype, as calling the layer does.

    Keras builds a loaded model only by its `call`, on float32 inputs. A residual sum in half
    precision fails then, and the model is left without weights.
    """
    call, before = layer.call, vars(layer).get("call")

    @functools.wraps(call)
    def cast_and_call(*args, **kwargs):
        args, kwargs = keras.tree.map_structure(_cast_by(layer), (args, kwargs))
        return call(*args, **kwargs)

    layer.call = cast_and_call
    try:
        yield
    finally:
        del layer.call
        if before is not None:  # of `recompute_calls`
            layer.call = before


def _cast_by(layer: Any) -> Callable[[Any], Any]:
    policy, dtype = layer.dtype_policy, layer.input_dtype
    return lambda x: policy.convert_input(x, layer.autocast, dtype)
