"""Which layers change precision together, and how they do it for a while."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from keras import Model, Sequential
from keras.layers import InputLayer

from kmp._keras import give_policy, layers_of, parts_of, path_of
from kmp.precision.policy import get_policy, on_weights
from kmp.precision.trees import HALF_DTYPES


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """Layers that change precision together.

    A layer with the layers inside it (an LSTM and its cell, a custom block and what it calls): its
    own code may not mix dtypes. Models are looked into; the code of a subclassed model is a unit.
    """

    path: str
    layers: tuple[keras.Layer, ...]

    @property
    def head(self) -> keras.Layer:
        """The layer that holds the others."""
        return self.layers[0]


def units_of(model: Model) -> list[Unit]:
    """The units of a built model, each once, those of its own code first."""
    units: dict[int, Unit] = {}

    def visit(layer):
        if id(layer) in units:
            return
        if not isinstance(layer, Model):
            members = tuple(x for x in layers_of(layer) if _is_switchable(x))
            if members and not isinstance(layer, InputLayer):
                units[id(layer)] = Unit(path_of(layer), members)
            return
        if not _only_calls_layers(layer) and _is_switchable(layer):
            units[id(layer)] = Unit(path_of(layer), (layer,))
        for child in parts_of(layer):
            visit(child)

    visit(model)
    return list(units.values())


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

    def choose(layer):
        if layer.path:
            return policies[layer.path]
        return full if id(layer) in direct else policies.default_policy

    return _swapped(model, choose)


@contextlib.contextmanager
def _swapped(model: keras.Layer, choose: Callable[[keras.Layer], Any]) -> Iterator[None]:
    """Weights keep their dtype; Keras casts them to the layer's compute dtype.

    The setter of `dtype_policy` is not used: it would write into a map that the layers share.
    """
    layers = [layer for layer in layers_of(model) if _is_switchable(layer)]
    before = [layer.dtype_policy for layer in layers]
    chosen = [_for_layer(layer, choose(layer)) for layer in layers]
    try:
        for layer, policy in zip(layers, chosen, strict=True):
            give_policy(layer, policy)
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            give_policy(layer, old)


def _for_layer(layer: keras.Layer, policy: keras.DTypePolicy) -> keras.DTypePolicy:
    """A policy on the weights that a layer has; one that rounds no ids goes on rounding none."""
    if not getattr(layer.dtype_policy, "casts_inputs", True):
        policy = get_policy(policy).with_inputs_uncast()
    return on_weights(policy, layer.variable_dtype)


def policy_for(model: Model, policy: str | None) -> str:
    """Return the name of a policy that computes in half precision.

    Args:
        model: whose own policy is meant by None: the half precision that most of its layers
            compute in; `"mixed_float16"` if none does.
        policy: a name, or None.

    Raises:
        ValueError: `policy` does not compute in half precision.
    """
    if policy is None:
        dtypes = [x.compute_dtype for x in layers_of(model) if x.compute_dtype in HALF_DTYPES]
        return f"mixed_{max(dtypes, key=dtypes.count, default='float16')}"
    try:
        compute_dtype = keras.dtype_policies.get(policy).compute_dtype
    except (ValueError, TypeError, AttributeError):
        compute_dtype = None
    if compute_dtype not in HALF_DTYPES:
        raise ValueError(
            "`policy` must name a dtype policy that computes in float16 or bfloat16. Received: "
            f"policy={policy!r}. Write 'mixed_float16' or 'mixed_bfloat16'."
        )
    return keras.dtype_policies.get(policy).name


def _only_calls_layers(model: Model) -> bool:
    """Tell whether the model has no arithmetic of its own that a dtype policy would change."""
    ours = type(model).call in (Model.call, Sequential.call)
    return ours or type(model).call.__module__.startswith("keras.")


def _is_switchable(layer: keras.Layer) -> bool:
    """Quantized layers and those of integers or strings keep their policy."""
    quantized = layer.quantization_mode is not None
    return not quantized and keras.backend.is_float_dtype(layer.compute_dtype)
