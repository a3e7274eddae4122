"""The dangers that `kmp.audit` looks for, one function each."""

from collections.abc import Callable, Iterator
from typing import Any

import keras

from kmp import _backend
from kmp._keras import compile_arguments, is_preprocessing, layers_of, path_of
from kmp.layers import Float32OutputDense
from kmp.models.heads import output_layers
from kmp.precision.casts import HALF_DTYPES
from kmp.precision.float_formats import formats
from kmp.scaling.rules import NoOpLossScale

_OURS = ("keras", "kmp")
_MULTIPLE = 8  # NVIDIA, "Matrix Multiplication Background User's Guide": of 16-bit sizes

Hazards = Iterator[tuple[str, str, str]]  # path, problem, advice


def _half_layers(model: keras.Model) -> list[keras.Layer]:
    return [x for x in layers_of(model) if x.compute_dtype in HALF_DTYPES]


def _unscaled_float16(model: Any) -> Hazards:
    optimizer = getattr(model, "optimizer", None)
    rule = getattr(optimizer, "loss_scale", None)
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if optimizer is None or (scales and not isinstance(rule, NoOpLossScale)):
        return
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    layers = [x for x in layers_of(model) if x.compute_dtype == "float16"]
    if layers and optimizer.loss_scale_factor is None:
        yield (
            path_of(layers[-1]),
            f"{len(layers)} layers compute in float16, and {type(optimizer).__name__} does not "
            "scale the loss: gradients below 6e-8 become zero.",
            f"Compile with kmp.scaled({type(optimizer).__name__}, ...).",
        )


def _float16_on_a_tpu(model: Any) -> Hazards:
    layers = [x for x in layers_of(model) if x.compute_dtype == "float16"]
    if layers and _backend.platform() == "tpu":
        yield (
            path_of(layers[-1]),
            "a TPU's compiler has no float16 matrix product.",
            'Use "mixed_bfloat16".',
        )


def _half_softmax(model: Any) -> Hazards:
    losses = [x for x in keras.tree.flatten(getattr(model, "loss", None)) if x is not None]
    if not any(map(_takes_logarithms, losses)):
        return
    for layer in _half_outputs(model):
        squashes = _name(getattr(layer, "activation", None)) in ("softmax", "sigmoid")
        if squashes or isinstance(layer, keras.layers.Softmax):
            yield (
                path_of(layer),
                f"probabilities in {layer.compute_dtype} are 0 where the loss takes their "
                "logarithm, and so is the gradient.",
                "End in kmp.layers.Float32OutputDense without an activation, and give the loss "
                "from_logits=True.",
            )


def _takes_logarithms(loss: Any) -> bool:
    config = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}
    return "crossentropy" in _name(loss) and not config.get("from_logits")


def _half_outputs(model: Any) -> list[keras.Layer]:
    outputs = [x for x in output_layers(model) if x.compute_dtype in HALF_DTYPES]
    return [x for x in outputs if not isinstance(x, Float32OutputDense)]


def _half_loss(model: Any) -> Hazards:
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        if callable(loss) and not isinstance(loss, (str, keras.losses.Loss)):
            for layer in _half_outputs(model):
                yield (
                    path_of(layer),
                    f"the loss function {_name(loss)} is evaluated in {layer.compute_dtype}; a "
                    "square above 65504 is inf in float16.",
                    "Pass the keras.losses class, which computes in float32, or let the last layer "
                    "return float32.",
                )


def _half_metric(model: Any) -> Hazards:
    config = compile_arguments(model)
    metrics = keras.tree.flatten([config.get("metrics"), config.get("weighted_metrics")])
    exact = ("acc", "accuracy")  # counts, which no dtype changes
    names = [_name(x) for x in metrics if x is not None and _name(x) not in exact]
    for layer in _half_outputs(model) if names else ():
        yield (
            path_of(layer),
            f"the metrics {', '.join(names)} are evaluated in {layer.compute_dtype}, whatever "
            "their own dtype says.",
            "Let the last layer return float32, for example kmp.layers.Float32OutputDense.",
        )


def _activity_regularizer(model: Any) -> Hazards:
    for layer in _half_layers(model):
        returns_half = not isinstance(layer, Float32OutputDense)
        if layer.activity_regularizer is not None and returns_half:
            yield (
                path_of(layer),
                f"its activity regularizer is summed up in {layer.compute_dtype}: inf beyond 65504 "
                "in float16, and `fit` crashes on TensorFlow.",
                'Give the layer dtype="float32".',
            )


def _half_preprocessing(model: Any) -> Hazards:
    for layer in _half_layers(model):
        if is_preprocessing(layer):
            yield (
                path_of(layer),
                f"its raw inputs are cast to {layer.compute_dtype} before it sees them.",
                'Give the layer dtype="float32", or convert the model with kmp.to_mixed_precision.',
            )


def _epsilon(model: Any) -> Hazards:
    # The layers of Keras and of kmp that have an epsilon use it in float32.
    foreign = [x for x in _half_layers(model) if type(x).__module__.split(".")[0] not in _OURS]
    owners = [(path_of(x), x, x.compute_dtype) for x in foreign]
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    weights = {v.dtype for v in model.trainable_variables}
    owners += [("optimizer", inner, dtype) for dtype in HALF_DTYPES if dtype in weights]
    for path, owner, dtype in owners:
        epsilon = getattr(owner, "epsilon", None)
        smallest = formats[dtype].smallest_subnormal
        if isinstance(epsilon, float) and 0 < epsilon < smallest:
            yield (
                path,
                f"epsilon={epsilon:g} is below {smallest:.3g}, the smallest number of {dtype}, and "
                "protects from no division by zero.",
                f"Write epsilon={formats[dtype].smallest_normal:.1g}, or keep it in float32.",
            )


def _constant(model: Any) -> Hazards:
    for layer in _half_layers(model):
        largest = formats[layer.compute_dtype].largest
        for number in _numbers_of(layer):
            if largest < abs(number) < float("inf"):
                yield (
                    path_of(layer),
                    f"the constant {number:g} is beyond {largest:g}, the largest number of "
                    f"{layer.compute_dtype}: it becomes inf, and inf - inf is NaN.",
                    f"Use {-largest / 2 if number < 0 else largest / 2:g}, or keep it in float32.",
                )


def _numbers_of(layer: keras.Layer) -> list[float]:
    """The floats in a layer's config and, where the class is not Keras's, in its `call`."""
    try:  # a model's config is that of its layers
        config = {} if isinstance(layer, keras.Model) else layer.get_config()
    except NotImplementedError:  # a class that was not written to be saved
        config = {}
    numbers = [x for x in keras.tree.flatten(config) if isinstance(x, float)]
    if type(layer).__module__.partition(".")[0] != "keras":
        numbers += _float_constants(getattr(type(layer).call, "__code__", None))
    return numbers


def _float_constants(code: Any) -> list[float]:
    constants = getattr(code, "co_consts", ())
    inner = [x for each in constants for x in _float_constants(each)]
    return [x for x in constants if isinstance(x, float)] + inner


def _tensor_cores(model: Any) -> Hazards:
    kinds = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)
    for layer in _half_layers(model):
        if not isinstance(layer, (*kinds, keras.layers.Conv1D, keras.layers.Conv2D)):
            continue
        for weight in layer.trainable_weights:
            sizes = tuple(weight.shape)
            odd = [n for n in sizes[-2:] if n % _MULTIPLE]
            if len(sizes) > 1 and odd:
                yield (
                    path_of(layer),
                    f"{weight.name} of shape {sizes} has sizes that are no multiples of "
                    f"{_MULTIPLE}; GPUs pad them, or leave the tensor cores idle.",
                    f"Round {odd[-1]} up to {-(-odd[-1] // _MULTIPLE) * 8}.",
                )


def _lost_on_reload(model: Any) -> Hazards:
    optimizer = getattr(model, "optimizer", None)
    saved = compile_arguments(model).get("optimizer")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not isinstance(
        saved, keras.optimizers.LossScaleOptimizer
    ):
        yield (
            "optimizer",
            "Keras wrapped it in loss scaling by itself and does not save that: a loaded model "
            "goes on without, from an empty optimizer.",
            f"Compile with kmp.scaled({type(optimizer.inner_optimizer).__name__}, ...).",
        )


def _name(x: Any) -> str:
    """The name that Keras knows a loss, a metric or an activation by."""
    if isinstance(x, str):
        return x.lower()
    return str(getattr(x, "name", None) or getattr(x, "__name__", type(x).__name__)).lower()


HAZARDS: dict[str, Callable[[Any], Hazards]] = {
    "unscaled float16": _unscaled_float16,
    "float16 on a TPU": _float16_on_a_tpu,
    "half softmax": _half_softmax,
    "half loss": _half_loss,
    "half metric": _half_metric,
    "activity regularizer": _activity_regularizer,
    "half preprocessing": _half_preprocessing,
    "epsilon": _epsilon,
    "constant": _constant,
    "tensor cores": _tensor_cores,
    "lost on reload": _lost_on_reload,
}
