"""What a saved model brings back although the code that builds it does not know of it."""

import functools
from typing import Any

import keras

from kmp._keras import forget_functions, give_policy, layers_of, parts_of
from kmp.models.quantized import quantization_of, quantize_like
from kmp.precision.policy import Policy, get_policy

_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


def remember_policies(model: keras.Model) -> None:
    """Let `model` save the policies of its layers, if its own config would lose some.

    And their quantization. Keras rebuilds Functional and Sequential models from their layers'
    configs, which have both. Layers that are created by a class's own code are created anew by it,
    under the global policy.
    """
    created = any(_creates_layers(layer) for layer in layers_of(model))
    if created and not isinstance(model, RemembersPolicies):
        kind: Any = type(model)
        model.__class__ = _remembering(kind)


def _name(policy: keras.DTypePolicy) -> str | None:
    """What `get_policy` makes the policy of; None for what the model's class has to restore."""
    plain = (
        isinstance(policy, (Policy, keras.FloatDTypePolicy)) or type(policy) is keras.DTypePolicy
    )
    return str(get_policy(policy)) if plain else None


def _creates_layers(layer: keras.Layer) -> bool:
    """Whether a class's own code makes layers, whose policies or quantization its config loses."""
    if isinstance(layer, _ATTENTION):  # which gives its own policy to its projections
        return any(map(quantization_of, parts_of(layer)))
    kerass_own = type(layer).__module__.partition(".")[0] == "keras"
    return not kerass_own and bool(parts_of(layer))


@functools.cache
def _remembering(cls: Any) -> Any:
    made = type(cls.__name__, (RemembersPolicies, cls), {"__module__": cls.__module__})
    made.__doc__, made.__qualname__ = cls.__doc__, cls.__qualname__
    # One name for all of them: whichever comes to load a file does it in the same way.
    return keras.saving.register_keras_serializable(package="kmp", name="MixedPrecision")(made)


@keras.saving.register_keras_serializable(package="kmp", name="MixedPrecision")
class RemembersPolicies:
    """Mixed into the class of a converted model: its config holds the model's and the policies."""

    _policies_to_restore: list[str | None] | None = None
    _quantization_to_restore: dict[str, Any]

    def get_config(self) -> dict[str, Any]:
        """The config of the model as its class writes it, and each layer's policy in order."""
        remembering: Any = type(self)
        layers: list[Any] = layers_of(self)
        try:
            self.__class__ = remembering.__mro__[2]
            model = keras.saving.serialize_keras_object(self)
        finally:
            self.__class__ = remembering
        model = {k: v for k, v in model.items() if k not in ("build_config", "compile_config")}
        quantization = {str(i): quantization_of(layer) for i, layer in enumerate(layers)}
        return {
            "model": model,
            "policies": [_name(layer.dtype_policy) for layer in layers],
            "quantization": {i: each for i, each in quantization.items() if each},
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Make the model as its class does; the policies follow once all its layers are there."""
        model = keras.saving.deserialize_keras_object(config["model"], custom_objects)
        kind: Any = type(model)
        model.__class__ = _remembering(kind)
        model._policies_to_restore = config["policies"]
        model._quantization_to_restore = config.get("quantization", {})
        if model.built:
            model._restore_policies()
        return model

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Build the model as its class does, then give its layers their policies."""
        super().build_from_config(config)  # type: ignore[misc]
        self._restore_policies()

    def _restore_policies(self) -> None:
        layers, policies = layers_of(self), self._policies_to_restore
        if policies is None:
            return
        if len(layers) != len(policies):
            raise ValueError(
                f"The file holds the policies of {len(policies)} layers; the class "
                f"{type(self).__name__!r} now creates {len(layers)}. Load the file with the code "
                "that it was saved with, or load the weights alone and convert again with "
                "kmp.to_mixed_precision."
            )
        for layer, policy in zip(layers, policies, strict=True):
            if policy is not None:
                give_policy(layer, get_policy(policy))
        for i, quantization in self._quantization_to_restore.items():
            quantize_like(layers[int(i)], quantization)
        self._policies_to_restore = None
        forget_functions(self)
