"""Policies that the layers of a model have for a while; their weights keep their dtypes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from kmp._keras import give_policies, layers_of
from kmp.precision.policy import get_policy, on_weights


def under(
    model: keras.Layer, policy: str, low: Iterable[keras.Layer] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Within, the layers `low` (None: all) compute under `policy` and the others in float32."""
    chosen = None if low is None else {id(layer) for layer in low}
    half, full = keras.dtype_policies.get(policy), keras.dtype_policies.get("float32")
    return _swapped(model, lambda x: half if chosen is None or id(x) in chosen else full)


def under_map(
    model: keras.Layer,
    policies: keras.dtype_policies.DTypePolicyMap,
    without_path: Iterable[keras.Layer] = (),
) -> contextlib.AbstractContextManager[None]:
    """Within, each layer computes as the map says of its path, and `without_path` in float32.

    What Keras builds at once (pooling, activations) has no path: a map gives it the default.
    """
    direct = {id(layer) for layer in without_path}
    full = keras.dtype_policies.get("float32")

    def choose(layer: keras.Layer) -> Any:
        if layer.path:
            return policies[layer.path]
        return full if id(layer) in direct else policies.default_policy

    return _swapped(model, choose)


@contextlib.contextmanager
def _swapped(model: keras.Layer, choose: Callable[[keras.Layer], Any]) -> Iterator[None]:
    """Weights keep their dtype; Keras casts them to the layer's compute dtype.

    The setter of `dtype_policy` is not used: it would write into a map that the layers share.
    """
    layers = [layer for layer in layers_of(model) if is_switchable(layer)]
    before = [(layer, layer.dtype_policy) for layer in layers]
    chosen = [(layer, _for_layer(layer, choose(layer))) for layer in layers]
    try:
        give_policies(chosen)
        yield
    finally:
        give_policies(before)


def _for_layer(layer: keras.Layer, policy: keras.DTypePolicy) -> keras.DTypePolicy:
    """The policy on the layer's own weights; if the layer's inputs were uncast, they stay so."""
    if not getattr(layer.dtype_policy, "casts_inputs", True):
        policy = get_policy(policy).with_inputs_uncast()
    return on_weights(policy, layer.variable_dtype)


def is_switchable(layer: keras.Layer) -> bool:
    """Tell whether a layer takes a policy: not if it is quantized, or of integers or strings."""
    quantized = layer.quantization_mode is not None
    return not quantized and keras.backend.is_float_dtype(layer.compute_dtype)
