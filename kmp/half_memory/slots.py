"""Which slots of an optimizer may be held in 8 bits: those that are declared, and no others.

A slot that a weight is computed from would carry its error into the weight. So would the
accumulator of Ftrl, beside `linear`, and the momentum of ScheduleFreeAdamW. Where two slots are
subtracted, as in a centered RMSprop, their errors make a negative number of a small difference.
Where the larger of two is kept, as with `amsgrad`, it grows by each error above 0.
"""

from collections.abc import Mapping
from typing import Any

from keras import initializers
from keras.initializers import Constant, Zeros

from kmp._backend import backend
from kmp._backend.types import Variable
from kmp._common import checked_choice, is_number
from kmp._keras.optimizer import layouts_of
from kmp.half_memory.codes import BY_NAME, Code, Groups, groups_of

SCALES = "_scales"  # after the name of a slot
_DECLARED = "slots_of_8_bits"
_MOMENTUM, _SQUARES = {"momentum": "signed"}, {"velocity": "non-negative"}
_ADAM = {**_MOMENTUM, **_SQUARES}
_OF_KERAS: dict[str, Mapping[str, str]] = {
    "Adadelta": {"accumulated_grad": "non-negative", "accumulated_delta_var": "non-negative"},
    "Adafactor": _SQUARES,  # of what it does not factor; the factors are float32
    "Adagrad": {"accumulator": "non-negative"},
    "Adam": _ADAM,
    "Adamax": {**_MOMENTUM, "norm": "non-negative"},
    "AdamW": _ADAM,
    "Lamb": _ADAM,
    "Lion": _MOMENTUM,
    "Muon": _ADAM,
    "Nadam": _ADAM,
    "RMSprop": {**_MOMENTUM, **_SQUARES},
    "SGD": _MOMENTUM,
}


def code_of(optimizer: Any, name: str | None) -> Code | None:
    """The code of a slot; None if it is not to be coded.

    Raises:
        ValueError: if the class of the optimizer declares it as something else.
    """
    kind = _declared(optimizer).get(name or "")
    if kind is None:
        return None
    return BY_NAME[checked_choice(f"{_DECLARED}[{name!r}]", kind, tuple(BY_NAME))]


def _declared(optimizer: Any) -> Mapping[str, str]:
    """The slots to code, by name: those of Keras's optimizers, or what a user's class declares."""
    cls = type(optimizer)
    if _DECLARED in vars(cls):
        return vars(cls)[_DECLARED]
    if not cls.__module__.startswith("keras.") or getattr(optimizer, "centered", False):
        return {}
    declared = _OF_KERAS.get(cls.__name__, {})
    return _MOMENTUM if getattr(optimizer, "amsgrad", False) else declared


def groups_for(variable: Variable) -> Groups | None:
    """The groups of the slots of a weight; None if they are too small to be coded."""
    shape = tuple(map(int, variable.shape))
    layouts = layouts_of([variable]) or backend.placements([variable])
    shard = backend.sharding(layouts).shard_shapes([shape])[0] if layouts else shape
    return groups_of(shape, shard, by_row=variable.name == "embeddings")


def first_value(initializer: Any) -> float | None:
    """The number, not below 0, that an initializer fills a slot with; None if it does not."""
    found = initializers.get(initializer)
    if isinstance(found, Zeros):
        return 0.0
    first = found.value if isinstance(found, Constant) else -1.0
    return float(first) if is_number(first) and first >= 0 else None
