"""The dtype of a model's weights where a policy keeps them in half precision."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from kmp._backend import backend
from kmp._backend.types import Tensor, Variable
from kmp._keras import own_state, own_weights
from kmp.precision.trees import HALF_DTYPES

_FLOATS = {"float32", *HALF_DTYPES}
_NORMALIZATION = re.compile("Norm(?!al(?!i[sz]))")  # LayerNorm, RMSNormalization; not NormalHead


def float32_weights(layer: keras.Layer) -> str:
    """Why a layer keeps float32 weights under any policy; empty if it does not.

    Statistics would stall in half precision, and when a layer is loaded from a file, its state is
    built in the dtype of its weights.
    """
    if any(map(_is_adapter, own_weights(layer))):
        return "float32 weights: LoRA's adapters; what is frozen is half"
    names = [each.__name__ for each in type(layer).__mro__]
    if own_weights(layer) and any(map(_NORMALIZATION.search, names)):
        return "float32 weights: normalization"
    has_state = any(keras.backend.is_float_dtype(v.dtype) for v in own_state(layer))
    return "float32 weights: it holds state" if has_state else ""


def dtype_changes(layer: keras.Layer, policy: Any, param_dtype: str) -> list[tuple[Variable, str]]:
    """The weights of a layer, frozen or not, that change dtype with its policy; and their new one.

    A weight whose dtype is not that of the layer's present policy stays as it is: the layer has
    chosen that dtype. Where a layer has LoRA's adapters, they follow its policy, and what is frozen
    is in `param_dtype`.

    Args:
        layer: built, under the policy that it has before.
        policy: the one that it will have.
        param_dtype: of the weights of the model it is in.
    """
    has_adapters = any(map(_is_adapter, own_weights(layer)))
    before = layer.variable_dtype
    changes = []
    for weight in own_weights(layer):
        is_base = has_adapters and not weight.trainable
        dtype = param_dtype if is_base else policy.variable_dtype
        chosen = weight.dtype != before and not has_adapters
        if weight.dtype in _FLOATS and not chosen and weight.dtype != dtype:
            changes.append((weight, dtype))
    return changes


def retype(
    changes: Sequence[tuple[Variable, str]], exact: Mapping[int, Tensor]
) -> Callable[[], None]:
    """Give weights other dtypes; call the result to put back what they were.

    Args:
        changes: from `dtype_changes`.
        exact: by the id of a weight, a float32 value to take in place of its own.
    """
    undo = [
        backend.retype(weight, keras.ops.cast(exact.get(id(weight), weight), dtype))
        for weight, dtype in changes
    ]

    def revert() -> None:
        for each in undo:
            each()

    return revert


@keras.saving.register_keras_serializable(package="kmp", name="Orthogonal")
class OrthogonalInFloat32(keras.initializers.Orthogonal):
    """Keras's initializer, drawn in float32: no backend has its decomposition in half precision.

    So a layer in half precision can be built again, by a clone or from a file.
    """

    def __call__(self, shape, dtype=None):
        return keras.ops.cast(super().__call__(shape, "float32"), dtype or keras.config.floatx())


def give_initializers(layer: keras.Layer, policy: Any) -> None:
    """Give a layer initializers that can draw weights in the dtype of its policy."""
    kind = OrthogonalInFloat32 if policy.variable_dtype in HALF_DTYPES else _ORTHOGONAL[0]
    for name, value in list(vars(layer).items()):
        if type(value) in _ORTHOGONAL and type(value) is not kind:
            setattr(layer, name, kind.from_config(value.get_config()))


_ORTHOGONAL = (keras.initializers.Orthogonal, OrthogonalInFloat32)


def _is_adapter(weight: Variable) -> bool:
    return weight.name.startswith("lora_")
