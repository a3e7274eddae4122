"""The rules of `kmp.audit` by the kind of finding, in the order in which `audit` lists the kinds.

A rule is a function of a `Program`, or, if it is wrapped in `_of_model`, of the model alone. It
yields the path, the problem and the advice of each finding.
"""

from collections.abc import Callable
from typing import Any

from kmp.models import audit_rules_of_layers as layers
from kmp.models import audit_rules_of_training as training
from kmp.models.audit_rules_of_layers import Findings
from kmp.models.programs import Program


def _of_model(look: Callable[[Any], Findings]) -> Callable[[Program], Findings]:
    """A rule that looks at the model alone, not at what it computes."""
    return lambda program: look(program.model)


AUDIT_RULES: dict[str, Callable[[Program], Findings]] = {
    "unscaled float16": _of_model(training.unscaled_float16),
    "float16 on a TPU": _of_model(training.float16_on_a_tpu),
    "half weights": _of_model(training.half_weights),
    "frozen weights": _of_model(training.frozen_weights),
    "half gradient": _of_model(training.half_gradient),
    "rounded variables": _of_model(training.rounded_variables),
    "half statistics": layers.half_statistics,
    "half softmax": _of_model(training.half_softmax),
    "half output": _of_model(training.half_output),
    "half loss": training.half_loss,
    "half metric": _of_model(training.half_metric),
    "activity regularizer": _of_model(layers.activity_regularizer),
    "half preprocessing": layers.half_preprocessing,
    "half indices": layers.half_indices,
    "sum of squares": layers.sum_of_squares,
    "sum by index": layers.sum_by_index,
    "epsilon": layers.epsilon,
    "constant": layers.constant,
    "lost on reload": _of_model(training.lost_on_reload),
    "tensor cores": _of_model(layers.tensor_cores),
}
