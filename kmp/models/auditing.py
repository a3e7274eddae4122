"""What is dangerous about a model's precision, read off without running or changing it."""

import dataclasses
from typing import NamedTuple

import keras

from kmp._keras import check_model
from kmp.models.hazards import HAZARDS


class Finding(NamedTuple):
    """One dangerous thing.

    Attributes:
        path: str, the layer, or the part of the model, that it is about.
        kind: str, such as `"unscaled float16"`; see `kmp.audit`.
        problem: str, what will happen.
        advice: str, what to write instead.
    """

    path: str
    kind: str
    problem: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}: {self.problem} {self.advice}"


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """What `kmp.audit` found; false if nothing; `print` shows one finding a line.

    Attributes:
        findings: tuple of `Finding`, in the order of the kinds in `kmp.audit`.
    """

    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return bool(self.findings)

    def of_kind(self, kind: str) -> tuple[Finding, ...]:
        """The findings of one kind."""
        if kind not in HAZARDS:
            raise ValueError(f"`kind` must be one of {tuple(HAZARDS)}. Received: kind={kind!r}.")
        return tuple(each for each in self.findings if each.kind == kind)

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings)) or "Nothing dangerous was found."


def audit(model: keras.Model) -> AuditReport:
    """List what is dangerous about the precision of a model, without running or changing it.

    Looked for, each a kind of finding:

    - `"unscaled float16"`: float16 computation under an optimizer that does not scale the loss;
    - `"float16 on a TPU"`: TPUs have no float16 matrix product;
    - `"half weights"`: weights in bfloat16 under Adam, of which none moves;
    - `"half statistics"`: moving averages in half precision, which stall far from the truth;
    - `"half softmax"`: probabilities in half precision with a loss that takes their logarithm;
    - `"half loss"`, `"half metric"`: functions that Keras evaluates in the dtype of half outputs;
    - `"activity regularizer"`: summed in half; `fit` crashes on TensorFlow;
    - `"half preprocessing"`: raw inputs cast to half precision before they are normalized;
    - `"epsilon"`: an epsilon that is 0 in the layer's, or the weights', dtype;
    - `"constant"`: a number in the config or the code of a layer beyond the range of its dtype,
      such as a mask's -1e9;
    - `"lost on reload"`: loss scaling that Keras added by itself and does not save;
    - `"tensor cores"`: matrix products with sizes that are not multiples of 8.

    Args:
        model: built `keras.Model`, compiled or not.

    Returns:
        `AuditReport`; false where nothing was found.

    Raises:
        TypeError: if `model` is no Keras model.
        ValueError: if it is not built.

    Example:

    >>> keras.config.set_dtype_policy("mixed_float16")
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, "softmax")])
    >>> model.compile("sgd", "categorical_crossentropy", auto_scale_loss=False)
    >>> [finding.kind for finding in audit(model).findings]
    ['unscaled float16', 'half softmax']
    >>> keras.config.set_dtype_policy("float32")

    Source: defects measured in Keras 3.15.1; Micikevicius et al. 2018 for losses and softmax.
    """
    check_model(model, "audit")
    found = [
        Finding(path, kind, problem, advice)
        for kind, look in HAZARDS.items()
        for path, problem, advice in look(model)
    ]
    return AuditReport(tuple(found))
