"""Which layers change precision together, and which half precision is meant."""

import dataclasses

import keras
from keras import Model, Sequential
from keras.layers import InputLayer

from kmp._keras import layers_of, parts_of, path_of
from kmp.precision.temporary import is_switchable
from kmp.precision.trees import HALF_DTYPES


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """Layers that change precision together.

    A unit is a layer with the layers inside it (an LSTM and its cell, a custom block and what it
    calls), because its own code may be unable to mix dtypes. Models are looked into; the code of a
    subclassed model is a unit.
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
            members = tuple(x for x in layers_of(layer) if is_switchable(x))
            if members and not isinstance(layer, InputLayer):
                units[id(layer)] = Unit(path_of(layer), members)
            return
        if not _only_calls_layers(layer) and is_switchable(layer):
            units[id(layer)] = Unit(path_of(layer), (layer,))
        for child in parts_of(layer):
            visit(child)

    visit(model)
    return list(units.values())


def policy_for(model: Model, policy: str | None) -> str:
    """Return the name of a policy that computes in half precision.

    Args:
        model: the model.
        policy: a name. None means the half precision that most layers of the model compute in, and
            `"mixed_float16"` if none does.

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
