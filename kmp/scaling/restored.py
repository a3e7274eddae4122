"""Whether a checkpoint brought all of the optimizer's state: said at the first step after it.

Keras restores an Orbax checkpoint by the paths of variables, and silently leaves out what has
another path now. The optimizer's counters have the same names in every model, while its slots are
named after the weights. So if counters arrive without slots, the model had other names when it was
saved.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from kmp._backend import backend
from kmp._backend.types import Tensor, Variable
from kmp._common import warn
from kmp._keras.optimizer import accumulators_of, parts_of
from kmp.half_memory import MASTER
from kmp.health.measure import L2_NORM
from kmp.precision.trees import is_float

_NAMED = 3  # paths in a warning


def warn_of_counters_alone(optimizer: Any) -> bool:
    """Warn if an optimizer that is about to be built has steps behind it; tell whether it has.

    Only a checkpoint can have put the steps there: nothing else assigns the wrapper's own count of
    steps. The variables that `build` makes did not exist yet, so they could not be restored.
    """
    (steps,) = _counts(optimizer.steps)
    if steps:
        warn(
            f"The state of {optimizer.name!r} was restored in part: the count of its {steps} steps "
            "came before it was built; its slots and its loss scale begin anew. Write "
            "model.optimizer.build(model.trainable_variables) before model.load_weights(...)."
        )
    return steps > 0


def warn_of_new_slots(optimizer: Any) -> bool:
    """Warn if slots are as new though the counters say that steps were applied.

    Returns:
        Whether the counters say so: then there is no need to look again.
    """
    steps, skipped = _counts(optimizer.steps, optimizer.skipped_steps)
    applied = steps - skipped
    if applied <= 0:
        return False
    with backend.outside_functions():
        lost, weights = _weights_with_new_slots(optimizer)
    if lost:
        named = ", ".join(map(repr, lost[:_NAMED])) + ", ..." * (len(lost) > _NAMED)
        warn(
            f"The state of {optimizer.name!r} was restored in part: its counters say that "
            f"{applied} steps were applied, but the slots of {len(lost)} of {weights} weights are "
            f"as new: {named}. Keras restores an Orbax checkpoint by the paths of variables, so "
            "that these weights have most likely not been restored either. Give the model and its "
            "layers the names that they had, or call keras.utils.clear_session() before you make "
            "them; for a Sequential model write load_weights(directory), not "
            "load_model(directory)."
        )
    return True


def _counts(*counters: Variable) -> list[int]:
    """The numbers that counters have at present; zeros where nobody can read them."""
    values = backend.present_values(counters) or np.zeros(len(counters), "int32")
    return [int(ops.convert_to_numpy(x)) for x in values]


def _weights_with_new_slots(optimizer: Any) -> tuple[list[str], int]:
    """The paths of weights that were trained and whose slots are zero; how many have slots."""
    slots = slots_by_path(optimizer)
    values = backend.present_values([slot for each in slots.values() for slot in each])
    if not values:
        return [], len(slots)
    moved = iter(ops.convert_to_numpy(_have_moved(values)).tolist())
    new = [path for path, each in slots.items() if not any([next(moved) for _ in each])]
    if optimizer.telemetry is None:  # a weight with new slots may never have had a gradient
        return (new if len(new) == len(slots) else []), len(slots)
    (health,) = backend.present_values([optimizer.telemetry.health])
    norms = ops.convert_to_numpy(health)[:, L2_NORM]
    trained = {p for p, norm in zip(optimizer.variable_paths, norms, strict=True) if norm > 0}
    return [path for path in new if path in trained], len(slots)


def slots_by_path(optimizer: Any) -> dict[str, list[Variable]]:
    """The slots of each weight that has any, by the weight's path.

    Accumulators are left out, which are zero now and then, and so are masters, which never are.
    """
    inner = optimizer.inner_optimizer
    accumulating = [x for x in parts_of(inner) if x.built and x.gradient_accumulation_steps]
    left_out = {id(x) for part in accumulating for x in accumulators_of(part)}
    prefixes = {path.replace("/", "_") + "_": path for path in optimizer.variable_paths}
    found: dict[str, list[Variable]] = {}
    for slot in inner.variables:
        # One layer's name may begin another's: the longest is meant.
        fitting = [prefix for prefix in prefixes if slot.name.startswith(prefix)]
        if id(slot) in left_out or not fitting or not is_float(slot):
            continue
        prefix = max(fitting, key=len)
        if slot.name != prefix + MASTER:
            found.setdefault(prefixes[prefix], []).append(slot)
    return found


@backend.compiled
def _have_moved(values: Sequence[Tensor]) -> Tensor:
    """bool[n]: whether any number of each tensor is not zero."""
    return ops.stack([ops.any(ops.not_equal(x, 0)) for x in values])
