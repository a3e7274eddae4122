"""A model's layers, once each, and the compiled functions that it has cached."""

import contextlib
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


def state_of(layer: keras.Layer) -> list[Any]:
    """The variables that a layer itself updates in training: moving statistics, counters.

    Neither weights, frozen or not, nor the seeds of random generators. Private:
    `_non_trainable_variables`; `non_trainable_weights` has the frozen weights too.
    """
    return layer._non_trainable_variables


def loss_tracker(model: Any) -> Any:
    """The metric in which the trainer averages the loss of an epoch. Private: `_loss_tracker`."""
    return model._loss_tracker


def set_loss_tracker(model: Any, tracker: Any) -> None:
    """Let the trainer average the loss of an epoch in another metric. Private: `_loss_tracker`."""
    vars(model)["_loss_tracker"] = tracker  # `setattr` would list it among the metrics twice


def steps_of(optimizer: Any) -> Any:
    """int[], the steps that a Keras optimizer has applied, micro-steps of accumulation included.

    Private: `_iterations`; under accumulation `iterations` is computed from it, and is no variable.
    """
    return optimizer._iterations


def strategy_scope(model: Any) -> contextlib.AbstractContextManager[Any]:
    """The scope in which the variables of a model are made, where TensorFlow distributes it."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy.scope() if strategy else contextlib.nullcontext()


def check_compiled(model: Any, owner: str) -> None:
    """Check that `owner` was given a compiled model.

    Raises:
        TypeError: if `model` is no Keras model.
        ValueError: if it is not compiled.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` of {owner} must be a keras.Model. Received: {model!r} (of type "
            f"{type(model).__name__}). Write keras.Sequential([layer]) for one layer."
        )
    if not model.compiled:
        raise ValueError(
            f"`model` of {owner} must be compiled. Received: {model.name!r}, which is not. Write "
            'model.compile(kmp.scaled("adam"), ...) first.'
        )


def own_weights(layer: keras.Layer) -> list[Any]:
    """The trainable variables of a layer itself, frozen or not.

    Private: `_trainable_variables`; `trainable_variables` includes those of the layers inside, and
    is empty for a frozen layer.
    """
    return layer._trainable_variables
