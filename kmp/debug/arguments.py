"""What the tools need of a model and a batch before they begin."""

from typing import Any

import keras


def check_model(model: Any, tool: str, loss: bool) -> None:
    """Raise ValueError unless `model` is built and, where `loss` is asked for, compiled."""
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"`model` of {tool} must be a keras.Model. Received: {model!r} (of type "
            f"{type(model).__name__})."
        )
    if not model.built:
        raise ValueError(
            f"`model` of {tool} must be built, for the tools change nothing. Received: "
            f"{type(model).__name__} {model.name!r} without weights. Call model(x) once before."
        )
    if loss and not model.compiled:
        raise ValueError(
            f"`model` of {tool} must be compiled for its loss. Received: {model.name!r}, not "
            "compiled, and y. Call model.compile(...) first, or leave y out to look at the forward "
            "pass alone."
        )


def loss_scale_of(model: Any) -> float:
    """What the model's optimizer multiplies the loss with now; 1 without an optimizer."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return 1.0
    return float(keras.ops.convert_to_numpy(optimizer.scale_loss(keras.ops.ones(()))))
