"""Let a saved model keep the policies of layers that a class's own code creates.

Keras rebuilds a Functional or Sequential model from the configs of its layers, which hold their
policies. The layers that a block creates in `__init__` or `build` are in no config: the block's
code creates them again, under the global policy. So the config of a converted block holds the
policies of all layers inside it. A block that is made from its config gives them to these layers as
soon as they exist, before it is called.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from kmp._keras import is_kerass_own, layers_of, parts_of
from kmp._keras.building import casting_inputs
from kmp.int8.quantized import quantization_of
from kmp.models.older_files import in_float32, is_flat_list, restore_flat_list
from kmp.models.policy_tree import restore, restore_int8, saved_tree

_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


def remember_policies(model: keras.Model) -> None:
    """Let `model` save the policies and the quantization of its layers, if its config loses some.

    Each layer whose code creates layers saves those of all layers inside it. The model saves all of
    them once more, because Keras saves no policy of a Functional model.
    """
    creators = [layer for layer in layers_of(model) if _creates_layers(layer)]
    for layer in [model, *creators] if creators else []:
        if not isinstance(layer, RemembersPolicies):
            _let_remember(layer)


def _creates_layers(layer: keras.Layer) -> bool:
    """Whether a class's own code makes layers, whose policies or quantization its config loses."""
    if is_kerass_own(layer) and isinstance(layer, _ATTENTION):  # its projections get its own policy
        return any(map(quantization_of, parts_of(layer)))
    return not is_kerass_own(layer) and bool(parts_of(layer))


@functools.cache
def _remembering(cls: Any) -> Any:
    made = type(cls.__name__, (RemembersPolicies, cls), {"__module__": cls.__module__})
    made.__doc__, made.__qualname__ = cls.__doc__, cls.__qualname__
    # All of them have one name in files, and that name stands for the mixin when a file is loaded.
    for each in (made, RemembersPolicies):
        keras.saving.register_keras_serializable(package="kmp", name="MixedPrecision")(each)
    return made


def _original(cls: Any) -> Any:
    """The class that `_remembering` has made `cls` of."""
    return cls.__mro__[2]


def _let_remember(layer: Any) -> None:
    kind: Any = type(layer)
    layer.__class__ = _remembering(kind)


@keras.saving.register_keras_serializable(package="kmp", name="MixedPrecision")
class RemembersPolicies:
    """Mixed into the class of a converted block or model whose own code creates its layers.

    Its config holds the layer's config, and the policies of the layer and of all layers inside it.
    """

    _restore: Callable[[], None] | None = None  # what is left to do when the layer is built

    def get_config(self) -> dict[str, Any]:
        """The config of the layer as its class writes it, with the policies."""
        remembering: Any = type(self)
        try:
            self.__class__ = _original(remembering)
            layer = keras.saving.serialize_keras_object(self)
        finally:
            self.__class__ = remembering
        layer = {k: v for k, v in layer.items() if k not in ("build_config", "compile_config")}
        return {"layer": layer, "policies": saved_tree(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Make the layer as its class does, and restore the policies of the layers it has then."""
        if is_flat_list(config):
            return _from_flat_list(config, custom_objects)
        if set(config) != {"layer", "policies"}:  # clone_model passes the original class's config
            return _original(cls).from_config(config)
        layer = _made(cls, config["layer"], custom_objects)
        _let_remember(layer)
        layer._restore = functools.partial(_restore_tree, layer, config["policies"])
        layer._restore()
        if layer.built:
            layer._restore = None
        return layer

    def __reduce__(self) -> Any:
        """As its class pickles it, under the name of that class: a pickle has to find it again."""
        reduced: Any = super().__reduce__()
        return (getattr(_original(type(self)), reduced[0].__name__), *reduced[1:])

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Build the layer as its class does, then restore what the layers of `build` had."""
        with casting_inputs(self):
            super().build_from_config(config)  # type: ignore[misc]
        self.built = True  # Keras sets it too, but only after this method
        if self._restore is not None:
            self._restore()
            self._restore = None


def _restore_tree(layer: Any, saved: dict[str, Any]) -> None:
    restore(layer, saved)
    restore_int8(layer, saved)


def _made(cls: Any, config: dict[str, Any], custom_objects: Any = None) -> Any:
    """The layer that a config describes, by the class that it names or that `cls` is made of."""
    if cls is not RemembersPolicies:  # a clone: its class is known, and need not be registered
        return _original(cls).from_config(config["config"])
    try:
        return keras.saving.deserialize_keras_object(config, custom_objects)
    except TypeError as error:
        # Keras would wrap a TypeError in a message of its own, about this mixin.
        raise ValueError(str(error)) from error


def _from_flat_list(config: dict[str, Any], custom_objects: Any) -> Any:
    model = _made(RemembersPolicies, in_float32(config["model"]), custom_objects)
    if not model.built:
        _let_remember(model)
        model._restore = functools.partial(_restore_flat_list, model, config)
    else:
        _restore_flat_list(model, config)
    return model


def _restore_flat_list(model: Any, config: dict[str, Any]) -> None:
    restore_flat_list(model, config)
    remember_policies(model)
