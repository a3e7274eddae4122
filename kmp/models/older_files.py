"""The format in which kmp 0.1.0 first saved the policies of a converted model.

It was one list, with a policy for each layer of the model, and only the model saved it.
"""

from typing import Any

import keras

from kmp._keras import give_policies, layers_of
from kmp.int8.quantized import quantize_like
from kmp.models.policy_tree import other_layers
from kmp.precision.policy import get_policy


def is_flat_list(config: dict[str, Any]) -> bool:
    """Whether a saved config is in this format."""
    return "model" in config and isinstance(config.get("policies"), list)


def in_float32(config: Any) -> Any:
    """The config with float32 in place of each policy that keeps float32 parameters.

    The list can be read only once all layers are there. If they are all in float32 until then, no
    block is called in half precision with float32 layers inside it.
    """
    if isinstance(config, list):
        return [in_float32(each) for each in config]
    if not isinstance(config, dict):
        return config
    return {k: _float32(v) if k == "dtype" else in_float32(v) for k, v in config.items()}


def _float32(policy: Any) -> Any:
    plain = isinstance(policy, dict) and policy.get("class_name") in ("DTypePolicy", "Policy")
    if plain and get_policy(policy["config"]["name"]).param_dtype == "float32":
        return keras.saving.serialize_keras_object(keras.DTypePolicy("float32"))
    return policy


def restore_flat_list(model: Any, config: dict[str, Any]) -> None:
    """Give the layers of a built model their saved policies and quantization.

    Raises:
        ValueError: if the model has another number of layers than the saved one.
    """
    layers, policies = layers_of(model), config["policies"]
    if len(layers) != len(policies):
        raise other_layers(model, len(policies) - 1, len(layers) - 1)
    pairs = zip(layers, policies, strict=True)
    give_policies((layer, get_policy(policy)) for layer, policy in pairs if policy is not None)
    for i, quantization in config.get("quantization", {}).items():
        quantize_like(layers[int(i)], quantization)
