"""The terms of a loss that belong to layers: what `add_loss` collects, and regularizers."""

from typing import Any

from kmp._keras import layers_of, path_of
from kmp._keras.state import added_losses
from kmp.debug.blame import Blame
from kmp.debug.stats import has_nonfinite, measure


def first_bad_term(model: Any) -> Blame | None:
    """The first such term that is not finite, or None. Call it right after the model was called."""
    for layer in layers_of(model):
        added = measure(added_losses(layer))
        if has_nonfinite(added):
            return Blame("loss", None, "add_loss", outputs=added, owner=path_of(layer))
    for variable in model.trainable_variables:
        value = measure(variable.regularizer(variable)) if variable.regularizer else ()
        if has_nonfinite(value):
            owner, names = variable.path.rpartition("/")[0], (variable.path,)
            weights = measure(variable)
            return Blame(
                "loss", None, "regularizer", None, None, weights, value, names, owner=owner
            )
    return None
