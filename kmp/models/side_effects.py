"""Layers that half precision harms: in losses they add, state, constants, sums, decompositions.

Keras hands a layer its variables rounded to the dtype that it computes in. A moving average that
is updated from its own rounded value stalls, although the variable itself is float32: steps below
half a unit in the last place are lost. The steps of the optimizer are lost in the same way if the
layer rescales a weight and writes it back, as `keras.layers.SpectralNormalization` does. Losses
are added in the dtype that the layer computes in, and TensorFlow does not add those to losses in
float32.
"""

import inspect
from typing import Any

from keras import Layer, Model
from keras.layers import RNN

from kmp._keras import layers_of, path_of
from kmp.models.constants import HAS_A_CONSTANT, lost_constants
from kmp.models.indices import Rounding
from kmp.models.programs import Program, whose, with_callers
from kmp.models.sums_by_index import ADDS_UP_BY_INDEX, sums_by_index
from kmp.models.sums_of_squares import ADDS_UP_SQUARES, sums_of_squares
from kmp.precision.trees import HALF_DTYPES

ROUNDED_STATE = "updates its state, which half precision would round"
HALF_LOSSES = "adds a loss"
DECOMPOSES = "decomposes matrices or signals, which half precision cannot"


def rounded_updates(program: Program) -> dict[Any, tuple[str, list[str]]]:
    """By layer, the dtype that its state is rounded to before it is updated, and its variables.

    The state of an RNN is no sum: it is left out.
    """
    found: dict[Any, tuple[str, list[str]]] = {}
    for layer, kind, name, dtype in program.effects:
        if kind == "update" and dtype in HALF_DTYPES and not isinstance(layer, RNN):
            found.setdefault(layer, (dtype, []))[1].append(name)
    return found


def half_losses(program: Program) -> dict[Any, str]:
    """By layer, the half precision of a loss that its code adds."""
    return {
        layer: dtype
        for layer, kind, _, dtype in program.effects
        if kind == "loss" and dtype in HALF_DTYPES and layer.activity_regularizer is None
    }


def decomposing(program: Program) -> list[Layer]:
    """The layers whose code factors matrices, inverts them, or takes Fourier transforms.

    Not each backend has that in half precision; where one has not, it raises when the model runs,
    and not yet in a symbolic call.
    """
    found: list[Layer] = []
    for operations in program.operations_in_float32:
        for each, inside in with_callers(operations or ()):
            if each.kind == "decompose" and (layer := whose(inside)):
                found.append(layer)
    return found


def harmed_layers(program: Program) -> dict[int, Rounding]:
    """The layers that are exact if they compute in float32, by their ids.

    Models are left out: their code computes with what their layers return.
    """
    sums = [each.layer for each in sums_of_squares(program) if each.is_cheap_in_float32]
    constants = [each.layer for each in lost_constants(program) if each.is_cheap_in_float32]
    by_index = [each.layer for each in sums_by_index(program) if each.is_cheap_in_float32]
    found = dict.fromkeys(constants, HAS_A_CONSTANT) | dict.fromkeys(sums, ADDS_UP_SQUARES)
    found |= dict.fromkeys(by_index, ADDS_UP_BY_INDEX)
    found |= dict.fromkeys(decomposing(program), DECOMPOSES)
    found |= dict.fromkeys(half_losses(program), HALF_LOSSES)
    found |= dict.fromkeys(rounded_updates(program), ROUNDED_STATE)
    return {
        id(layer): Rounding(layer, why, True)
        for layer, why in found.items()
        if not isinstance(layer, Model)
    }


def frozen_weights_that_move(model: Model) -> dict[Layer, str]:
    """The outermost frozen layers whose weights the model's own code may move, and their dtype.

    That is so if they are in half precision and the code assigns variables, other than when the
    model is made.
    """
    if not _assigns(type(model)):
        return {}
    found: dict[Layer, str] = {}
    inside: set[int] = set()
    for layer in layers_of(model):
        halves = [v.dtype for v in layer.weights if v.dtype in HALF_DTYPES]
        if halves and not layer.trainable and id(layer) not in inside:
            found[layer] = halves[0]
            inside |= {id(x) for x in layers_of(layer)}
    return found


def _assigns(kind: type[Model]) -> bool:
    """Whether a method of a class that is not Keras's assigns variables."""
    own = [x for x in kind.__mro__ if not x.__module__.startswith("keras.")]
    methods = [each for x in own for name, each in vars(x).items() if name not in _MAKING]
    codes = [each.__code__ for each in methods if inspect.isfunction(each)]
    for code in codes:
        if _ASSIGNING & set(code.co_names):
            return True
        codes += [x for x in code.co_consts if inspect.iscode(x)]
    return False


_MAKING = {"__init__", "build"}
_ASSIGNING = {"assign", "assign_add", "assign_sub"}


def told_of_models(program: Program) -> str:
    """What the code of the models themselves rounds, and what to write; empty if nothing."""
    told = [
        f"{path_of(layer)!r} {moving_problem(dtype)} Exclude it with filter_fn then."
        for layer, dtype in frozen_weights_that_move(program.model).items()
    ]
    for layer, dtype in half_losses(program).items():
        if isinstance(layer, Model):
            told.append(f"{path_of(layer)!r} itself {loss_problem(dtype)} {CAST_LOSS}")
    for layer, (dtype, names) in rounded_updates(program).items():
        if isinstance(layer, Model):
            told.append(f"{path_of(layer)!r} itself {state_problem(dtype, names)} {OWN_READS}")
    return "\n".join(told)


CAST_LOSS = 'Write self.add_loss(keras.ops.cast(loss, "float32")).'
OWN_READS = "Write self.add_weight(..., autocast=False) for it."


def loss_problem(dtype: str) -> str:
    """What happens to a loss that is added in half precision."""
    inf = ", inf beyond 65504" if dtype == "float16" else ""
    return f"adds a loss in {dtype}: it is rounded{inf}, and `fit` raises on TensorFlow."


def moving_problem(dtype: str) -> str:
    """What happens to frozen weights that move by small steps."""
    return (
        f"is frozen, and its weights are in {dtype}. If the model's own code moves them by small "
        "steps, as those of a momentum encoder, most are rounded away."
    )


def state_problem(dtype: str, names: list[str]) -> str:
    """What happens to state that is updated from a rounded copy."""
    return (
        f"reads {', '.join(names)} in {dtype} and writes it back: the variable is rounded in each "
        "step, and what is below half a unit in its last place is lost."
    )
