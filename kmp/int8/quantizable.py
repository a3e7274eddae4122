"""Find the layers that can be prepared for quantization, and the reasons why others cannot."""

import functools
from collections.abc import Callable
from typing import Any

from kmp._keras import call_in_training, own_weights, parts_of, path_of, symbolic_outputs
from kmp.int8.fake_quantization import FakeQuantized
from kmp.int8.quantized import PREPARED


def plan_for(model: Any, filter_fn: Callable | None) -> list[tuple[Any, str]]:
    """Each layer that has weights itself, with the reason why it is left alone, if it is."""
    plan: dict[int, tuple[Any, str]] = {}

    def visit(layer, outside=""):
        if id(layer) in plan:
            return
        path = path_of(layer)
        if not outside and filter_fn is not None and not filter_fn(layer, path):
            outside = "excluded by filter_fn"
        if own_weights(layer) or isinstance(layer, FakeQuantized):
            plan[id(layer)] = (layer, outside or _unfit(layer))
        for each in parts_of(layer):
            visit(each, outside)

    visit(model)
    return list(plan.values())


def _unfit(layer: Any) -> str:
    """Why a layer cannot be prepared; empty if it can."""
    if isinstance(layer, FakeQuantized):
        return "prepared already"
    if layer.quantization_mode is not None:
        return f"quantized to {layer.quantization_mode} already"
    if type(layer) not in PREPARED:
        return f"no {', '.join(each.__name__ for each in PREPARED)}"
    if "..." in getattr(layer, "equation", ""):
        return "Keras's int8 takes no ... in an equation"
    if layer.lora_enabled:
        return "LoRA"
    if layer.kernel.dtype != "float32":
        dtype = layer.kernel.dtype
        return f"weights in {dtype}: first write kmp.to_mixed_precision(model, 'float32')"
    return ""


def not_told_to_train(model: Any, layers: list[Any]) -> list[Any]:
    """Those of the prepared `layers` that `fit` would call without `training=True`.

    A subclassed model calls its layers so if its `call` does not pass `training` on. A model that
    cannot be called symbolically is not checked.
    """
    told: dict[int, bool] = {}
    original = FakeQuantized.rounded_inputs

    def rounded_inputs(layer, inputs, training):
        told[id(layer)] = told.get(id(layer), False) or bool(training)
        return original(layer, inputs, training)

    FakeQuantized.rounded_inputs = rounded_inputs  # type: ignore[method-assign]
    try:
        symbolic_outputs(model, functools.partial(call_in_training, model))
    finally:
        FakeQuantized.rounded_inputs = original  # type: ignore[method-assign]
    return [layer for layer in layers if not told.get(id(layer), True)]
