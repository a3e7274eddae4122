"""The policies and the quantization of a layer and of all layers inside it, as saved files hold it.

The tree follows the order in which a layer's code creates the layers inside it. So it needs no
names, which differ from process to process.
"""

import functools
from typing import Any

from keras import DTypePolicy, FloatDTypePolicy
from keras.layers import InputLayer

from kmp._keras import give_policies, parts_of
from kmp._keras.building import after_build
from kmp.int8.quantized import quantization_of, quantize_like
from kmp.models.retype import dtype_changes, give_initializers, retype
from kmp.precision.policy import Policy, get_policy


def saved_tree(layer: Any) -> dict[str, Any]:
    """The policy and the quantization of a layer, and the trees of the layers directly inside."""
    found = {
        "policy": _name(layer.dtype_policy),
        "quantization": quantization_of(layer),
        "layers": [saved_tree(each) for each in _inside(layer)],
    }
    return {key: value for key, value in found.items() if value}


def restore(layer: Any, saved: dict[str, Any]) -> None:
    """Give a layer and those inside it their saved policies, and prepare for int8 those that were.

    Layers that a `build` creates get theirs when that `build` has run, before the layer is called.

    Raises:
        ValueError: if a built layer holds another number of layers than the saved one.
    """
    _restore_policies(layer, saved)
    _restore_quantization(layer, saved, "settings")


def _restore_policies(layer: Any, saved: dict[str, Any]) -> None:
    if "policy" in saved:
        policy = get_policy(saved["policy"])
        retype(dtype_changes(layer, policy, policy.param_dtype), {})
        give_policies([(layer, policy)])
        give_initializers(layer, policy)
    inner, expected = _inside(layer), saved.get("layers", [])
    if layer.built and len(inner) != len(expected):
        raise other_layers(layer, len(expected), len(inner))
    for each, its in zip(inner, expected, strict=False):
        _restore_policies(each, its)
    if not layer.built:
        after_build(layer, functools.partial(restore, layer, saved))


def restore_int8(layer: Any, saved: dict[str, Any]) -> None:
    """Turn each built layer into int8 if the saved layer was in int8.

    This reads the kernels, which have no values yet if the layer is built while another is called.
    """
    _restore_quantization(layer, saved, "config")


def _restore_quantization(layer: Any, saved: dict[str, Any], key: str) -> None:
    for each, its in zip(_inside(layer), saved.get("layers", []), strict=False):
        _restore_quantization(each, its, key)
    if layer.built and key in saved.get("quantization", {}):
        quantize_like(layer, saved["quantization"])


def other_layers(layer: Any, expected: int, number: int) -> ValueError:
    """The error for a class that no longer creates the layers that were saved."""
    return ValueError(
        f"The file holds the policies of {expected} layers in {layer.name!r}; the class "
        f"{type(layer).__name__!r} now creates {number}. Load the file with the code that it was "
        "saved with, or load only the weights and convert again with kmp.to_mixed_precision."
    )


def _inside(layer: Any) -> list[Any]:
    """The layers directly inside, without the input that a Sequential model adds when built."""
    return [each for each in parts_of(layer) if not isinstance(each, InputLayer)]


def _name(policy: DTypePolicy) -> str | None:
    """The name that `get_policy` reads; None if the layer's own config restores the policy."""
    plain = isinstance(policy, (Policy, FloatDTypePolicy)) or type(policy) is DTypePolicy
    return str(get_policy(policy)) if plain else None
