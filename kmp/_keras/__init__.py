"""A model's layers, once each, and the compiled functions that it has cached."""

from typing import Any

import keras


def layers_of(model: keras.Layer) -> list[keras.Layer]:
    """`model` and all layers in it, each once: nested models, wrapped layers and RNN cells too.

    A layer stands before those inside it.
    """
    return model._flatten_layers()  # Keras has no public way into wrappers and subclassed layers


def path_of(layer: Any) -> str:
    """What names a layer: its path, or its name where Keras gives no path.

    It gives none to operations, nor to layers that it builds at once (pooling, activations).
    """
    return getattr(layer, "path", None) or layer.name


def has_weights(model: Any) -> bool:
    """Whether all weights of `model` are there.

    A model whose own train step calls its layers one by one is never built itself.
    """

    def is_complete(layer: Any) -> bool:  # or has no weights but those of the layers in it
        return layer.built or getattr(layer.build, "_is_default", False)

    return model.built or (bool(model.weights) and all(map(is_complete, layers_of(model))))


def is_preprocessing(layer: keras.Layer) -> bool:
    """Whether a layer is, or derives from, one of Keras's for raw inputs."""
    return any(".preprocessing." in each.__module__ for each in type(layer).__mro__)


def forget_functions(model: keras.Layer) -> None:
    """Drop the compiled functions of `model` and of the models in it.

    `fit`, `evaluate` and `predict` would go on with the dtypes that they were traced with.
    """
    for layer in layers_of(model):
        if isinstance(layer, keras.Model):
            functions: Any = layer
            functions.train_function = functions.test_function = functions.predict_function = None


def check_built(model: Any) -> None:
    """Raise TypeError unless `model` is a Keras model, ValueError unless it is built."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a keras.Model. Received: {model!r} (of type {type(model).__name__}). "
            "Write keras.Sequential([layer]) for one layer; its policy alone is set by "
            "layer.dtype_policy = kmp.Policy(...)."
        )
    if not model.built:
        raise ValueError(
            f"`model` must be built, so that its layers are there. Received: {model.name!r}, which "
            "is not. Call it on a batch, or model.build(input_shape), first."
        )
