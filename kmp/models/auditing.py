"""Find what is dangerous about the precision of a model, without running or changing it."""

import dataclasses
from typing import NamedTuple

import keras

from kmp._keras import check_model
from kmp.models.audit_rules import AUDIT_RULES
from kmp.models.programs import Program

_NAMED = 3  # paths in a line


class Finding(NamedTuple):
    """One danger that `kmp.audit` found.

    Attributes:
        path: str, the path of a layer or variable, or `"optimizer"`.
        kind: str, such as `"unscaled float16"`; `kmp.audit` lists them.
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
    """What `kmp.audit` found. It is false if there are no findings.

    It prints one finding a line; layers of which it says the same share a line.

    Attributes:
        findings: tuple of `Finding`, in the order of the kinds in `kmp.audit`.
    """

    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return bool(self.findings)

    def of_kind(self, kind: str) -> tuple[Finding, ...]:
        """Return the findings of one kind.

        Raises:
            ValueError: if there is no such kind.
        """
        if kind not in AUDIT_RULES:
            raise ValueError(
                f"`kind` must be one of {tuple(AUDIT_RULES)}. Received: kind={kind!r}."
            )
        return tuple(each for each in self.findings if each.kind == kind)

    def __str__(self) -> str:
        alike: dict[Finding, list[str]] = {}
        for each in self.findings:
            alike.setdefault(each._replace(path=""), []).append(each.path)
        lines = [each._replace(path=_named(paths)) for each, paths in alike.items()]
        return "\n".join(map(str, lines)) or "Nothing dangerous was found."


def _named(paths: list[str]) -> str:
    more = len(paths) - _NAMED
    return ", ".join(paths[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def audit(model: keras.Model) -> AuditReport:
    """List what is dangerous about the precision of a model, without running or changing it.

    The kinds of findings:

    - `"unscaled float16"`: layers compute in float16, and the optimizer does not scale the loss;
    - `"float16 on a TPU"`: TPUs have no float16 matrix product;
    - `"half weights"`: weights in bfloat16 that Adam does not move, or in any half precision and so
      large that the optimizer's steps are rounded away;
    - `"frozen weights"`: those in half precision of a frozen layer, where the model's own code
      assigns variables: small steps, as of a momentum encoder, are rounded away;
    - `"half gradient"`: the gradient of an `Embedding` if Keras's train step on JAX adds it up in
      half precision, or those of the biases of a compiled model if this machine does so, unless
      `kmp.protect` or one of kmp's callbacks protects the model; and the gradient of a `GRU` or
      `LSTM` of many steps if Keras's own code for it does so;
    - `"rounded variables"`: those of a layer with `autocast=False`, which Keras rounds on JAX
      all the same;
    - `"half statistics"`: moving averages in half precision that stall far from the true value, and
      other variables that a layer rounds when it updates them; and an average pooling of so many
      numbers that it is wrong where this machine adds them up in half precision;
    - `"half softmax"`: probabilities in half precision with a loss that takes their logarithm;
    - `"half output"`: a regression whose last layer returns half precision;
    - `"half loss"`: a loss whose own dtype is half precision, or that a layer adds in it;
    - `"half metric"`: functions that Keras evaluates in the outputs' half precision;
    - `"activity regularizer"`: Keras sums it in half precision, and `fit` raises on TensorFlow;
    - `"half preprocessing"`: raw inputs are cast to half precision before they are normalized, or
      compared with a number, such as the value of a `Masking` or a threshold beyond the whole
      numbers that half precision holds;
    - `"half indices"`: a layer casts float indices to half precision before an `Embedding`, a
      one-hot vector or a table takes them. If a model is not a graph of layers, nobody knows
      whether its indices come as floats or integers; the cast is found where they come in one
      tensor with features. Positions that a layer counts and casts before they are looked up or
      their sine is taken are found, too;
    - `"sum of squares"`: a norm in float16 of so many numbers that their squares soon add up to
      more than 65504; what is divided by it becomes 0;
    - `"sum by index"`: numbers that are added up by their index, as by `keras.ops.segment_sum`, in
      half precision, where this machine rounds the sum after each of them: it stops growing; or
      that are looked up by their index, whose gradient is such a sum;
    - `"epsilon"`: a number that is 0 in the half precision that a layer computes with it in, such
      as an epsilon of 1e-8, or the optimizer's epsilon in the dtype of the weights;
    - `"constant"`: a number that is beyond the range of that dtype, such as the -1e9 of a mask, or
      a bound that becomes 1 in it, such as 1 - 1e-4;
    - `"lost on reload"`: loss scaling that Keras added by itself and does not save;
    - `"tensor cores"`: matrix products with sizes that are not multiples of 8.

    Args:
        model: built `keras.Model`, compiled or not; one without `call` needs built parts.

    Returns:
        `AuditReport`, which is false if nothing was found.

    Raises:
        TypeError: if `model` is not a Keras model.
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
    program = Program(model)
    found = [
        Finding(path, kind, problem, advice)
        for kind, look in AUDIT_RULES.items()
        for path, problem, advice in look(program)
    ]
    return AuditReport(tuple(found))
