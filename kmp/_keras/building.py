"""What happens when Keras builds a layer."""

import functools
from collections.abc import Callable
from typing import Any


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
