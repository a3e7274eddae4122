"""The dangers that `kmp.audit` looks for, by kind, in the order in which it lists them."""

from collections.abc import Callable
from typing import Any

from kmp.models import hazards_of_layers as layers
from kmp.models import hazards_of_training as training
from kmp.models.hazards_of_layers import Hazards

HAZARDS: dict[str, Callable[[Any], Hazards]] = {
    "unscaled float16": training.unscaled_float16,
    "float16 on a TPU": training.float16_on_a_tpu,
    "half weights": training.half_weights,
    "half statistics": layers.half_statistics,
    "half softmax": training.half_softmax,
    "half loss": training.half_loss,
    "half metric": training.half_metric,
    "activity regularizer": layers.activity_regularizer,
    "half preprocessing": layers.half_preprocessing,
    "half indices": layers.half_indices,
    "epsilon": layers.epsilon,
    "constant": layers.constant,
    "lost on reload": training.lost_on_reload,
    "tensor cores": layers.tensor_cores,
}
