"""What `kmp.audit` looks for in the optimizer, the losses and the metrics of a compiled model."""

import re
from typing import Any

import keras
import ml_dtypes
import numpy as np
from keras import Model
from keras.layers import Embedding, Softmax
from keras.losses import Loss
from keras.metrics import MeanMetricWrapper, Metric

from kmp._backend import backend
from kmp._keras import (
    cast_variables,
    compile_arguments,
    function_of,
    is_kerass_own,
    layers_of,
    path_of,
    symbolic_outputs,
)
from kmp._keras.optimizer import (
    inner_optimizer_of,
    is_loss_scale_optimizer,
    is_several,
    optimizers_of,
    variables_by_part,
)
from kmp._keras.training import adds_up_in_float32, is_traced
from kmp.half_memory import HalfMemory
from kmp.layers import Float32OutputDense
from kmp.models.audit_rules_of_layers import Findings, half_layers
from kmp.models.biases import stalls_by_its_bias
from kmp.models.indices import whole_numbers
from kmp.models.optimizers import scales_the_loss
from kmp.models.output_layers import output_layers
from kmp.models.programs import Program
from kmp.models.recurrence import adds_up_steps
from kmp.models.side_effects import (
    CAST_LOSS,
    frozen_weights_that_move,
    half_losses,
    loss_problem,
    moving_problem,
)
from kmp.precision.float_formats import formats
from kmp.precision.trees import HALF_DTYPES
from kmp.scaling.optimizer import LossScaleOptimizer

# Optimizers that correct the bias of their second moment, and what a beta_2 of 1 makes of that.
_CORRECTION = {
    "Adam": "is 0, and no weight moves",
    "AdamW": "is 0, and no weight moves",
    "Nadam": "divides by 0: weights stand still or become NaN",
    "Lamb": "divides by 0: weights stand still or become NaN",
}

# Optimizers whose steps are as long as the learning rate, or shorter.
_STEPS_OF_THE_RATE = (*_CORRECTION, "Adamax", "Lion")
_TOLERATED_STANDSTILL = 0.5  # share of the weights that no step moves, above which it is a finding


# Keras's losses of numbers, as `_function_name` has them.
_REGRESSIONS = {
    *("huber", "log_cosh", "logcosh", "mae", "mape", "mse", "msle", "poisson"),
    *("mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_error"),
    "mean_squared_logarithmic_error",
}


def unscaled_float16(model: Any) -> Findings:
    """float16 computation under an optimizer that does not scale the loss."""
    layers = [x for x in layers_of(model) if x.compute_dtype == "float16"]
    for name, optimizer in optimizers_of(model).items() if layers else ():
        if not scales_the_loss(optimizer):
            kind = type(getattr(optimizer, "inner_optimizer", optimizer)).__name__
            yield (
                path_of(layers[-1]),
                f"{len(layers)} layers compute in float16, and {kind} does not scale the loss: "
                "gradients below 6e-8 become zero.",
                f"Compile with kmp.scaled({kind}, ...)."
                if name == "optimizer"
                else f"Write {name}=kmp.scaled({kind}, ...), and {name}.scale_loss(loss) in "
                f"train_step, on JAX {name}.stateless_scale_loss(its variables, loss).",
            )


def float16_on_a_tpu(model: Any) -> Findings:
    """TPUs have no float16 matrix product."""
    layers = [x for x in layers_of(model) if x.compute_dtype == "float16"]
    if layers and backend.platform() == "tpu":
        yield (
            path_of(layers[-1]),
            "TPUs have no float16 matrix product.",
            'Use "mixed_bfloat16".',
        )


def half_weights(model: Any) -> Findings:
    """Half weights that the optimizer cannot move.

    Keras's optimizers compute in the dtype of the weights, in which beta_2 may be 1. A step that is
    shorter than half a unit in the last place of its weight is lost, unless kmp rounds at random or
    keeps a master.
    """
    outer = getattr(model, "optimizer", None)
    memory = _half_memory(outer)
    inner = inner_optimizer_of(outer)
    written = "MultiOptimizer(...)" if is_several(inner) else type(inner).__name__
    for dtype in HALF_DTYPES:
        half = [v for v in model.trainable_variables if v.dtype == dtype]
        if not half or (memory is not None and memory.moves_rarely(dtype)):
            continue
        advice = (
            f"Compile with kmp.scaled({written}, master_weights=True), or keep the weights in "
            f'float32: build the model under "mixed_{dtype}".'
        )
        for optimizer, variables in variables_by_part(inner, half):
            problem = _problem_of_half_weights(optimizer, variables, dtype, memory is not None)
            if problem:
                yield variables[-1].path, problem, advice


def _problem_of_half_weights(
    optimizer: Any, variables: list[Any], dtype: str, in_float32: bool
) -> str | None:
    """What keeps an optimizer, which may compute in float32, from moving half weights."""
    name = type(optimizer).__name__
    if name not in _STEPS_OF_THE_RATE or not is_kerass_own(optimizer):
        return None
    if not in_float32 and name in _CORRECTION and _rounded(optimizer.beta_2, dtype) == 1:
        return (
            f"{len(variables)} variables are in {dtype}, in which {name}'s beta_2="
            f"{optimizer.beta_2:g} is 1: its bias correction {_CORRECTION[name]}."
        )
    if name == "Lamb":  # whose steps grow with the weights
        return None
    rate = float(optimizer.learning_rate)
    still = _share_that_stands_still(variables, dtype, rate)
    if still <= _TOLERATED_STANDSTILL:
        return None
    return (
        f"{len(variables)} variables are in {dtype}, and {still:.0%} of their weights are so large "
        f"that a step of {name}, learning rate {rate:g}, is rounded away."
    )


def frozen_weights(model: Any) -> Findings:
    """Frozen half weights that the model's own code moves, as those of a momentum encoder."""
    for layer, dtype in frozen_weights_that_move(model).items():
        yield (
            path_of(layer),
            f"it {moving_problem(dtype)}",
            f'Keep its weights in float32: build it under "mixed_{dtype}", or exclude it with '
            "filter_fn when you convert the model.",
        )


def _half_memory(optimizer: Any) -> HalfMemory | None:
    """How an optimizer updates half weights in float32; None if it does not."""
    is_kmps = isinstance(optimizer, LossScaleOptimizer)
    wrapped_late = is_kmps and optimizer.built and optimizer.rounding_seed is None
    return optimizer.half_memory if is_kmps and not wrapped_late else None


def _rounded(number: float, dtype: str) -> float:
    return float(np.asarray(number, ml_dtypes.finfo(dtype).dtype))


def _share_that_stands_still(variables: list[Any], dtype: str, step: float) -> float:
    """The share of weights that a step changes in neither direction."""
    kind = ml_dtypes.finfo(dtype).dtype
    weights = [np.ravel(v.numpy()).astype("float32") for v in variables]
    before = np.concatenate(weights)
    up, down = ((before + x).astype(kind).astype("float32") for x in (step, -step))
    return float(np.mean((up == before) & (down == before)))


def half_gradient(model: Any) -> Findings:
    """Gradients that Keras's train step adds up in half precision; protected ones do not."""
    protect, or_float32 = _protection(model), 'or give the layer dtype="float32"'
    for layer in model.layers if not adds_up_in_float32(model) else ():
        if isinstance(layer, Embedding) and layer.trainable and _is_cast_first(layer):
            yield (
                path_of(layer),
                f"Keras's train step on JAX adds up the gradient of a word in "
                f"{layer.compute_dtype}, where a sum of ones stalls at "
                f"{whole_numbers(layer.compute_dtype)}.",
                f"{protect}, {or_float32}.",
            )
    biased = _layers_that_stall_by_their_bias(model)
    if biased:
        first, dtype = biased[0], biased[0].compute_dtype
        others = f", as of {len(biased) - 1} more," if len(biased) > 1 else ""
        yield (
            path_of(first),
            f"Keras's train step adds up the gradient of its bias{others} in {dtype} on this "
            f"machine, where a sum of ones stalls at {whole_numbers(dtype)}.",
            f"{protect}.",
        )
    for layer in half_layers(model):
        if layer.trainable and adds_up_steps(layer, layer.compute_dtype):
            yield (
                path_of(layer),
                f"Keras's code for {type(layer).__name__} adds up the gradients of its steps in "
                f"{layer.compute_dtype}, where a sum of ones stalls at "
                f"{whole_numbers(layer.compute_dtype)}.",
                'Write use_cudnn=False, or give the layer dtype="float32".',
            )


def rounded_variables(model: Any) -> Findings:
    """Variables that a layer wants as they are, and that Keras rounds all the same on JAX."""
    for layer in model.layers:
        if not isinstance(layer, Embedding) and _is_cast_first(layer):  # its rows become half
            names = ", ".join(v.name for v in cast_variables(layer))
            yield (
                path_of(layer),
                f"Keras's fit, evaluate and predict on JAX hand it {names} in "
                f"{layer.compute_dtype}, although its autocast is false.",
                "Write self.add_weight(..., autocast=False) for what it needs in float32.",
            )


def _protection(model: Any) -> str:
    """What to write for steps that add up in float32."""
    optimizer: Any = getattr(model, "optimizer", None)
    if not is_traced(model):
        return (
            "Compile without run_eagerly=True and jit_compile=False, and give fit one of kmp's "
            "callbacks"
        )
    if optimizer is None or is_loss_scale_optimizer(optimizer):
        return "Give fit one of kmp's callbacks, or call kmp.protect(model)"
    return "Give fit one of kmp's callbacks"


def _is_cast_first(layer: Any) -> bool:
    """Whether Keras casts a layer's variables on JAX although its `autocast` is false.

    An embedding is such a layer. `fit`, `evaluate` and `predict` call `model.call`, which opens no
    scope of a policy. So the layers of the model itself are called outside any scope, and there
    `Layer.__call__` casts the variables of every layer.
    """
    is_jax, casts = keras.backend.backend() == "jax", layer.compute_dtype in HALF_DTYPES
    return is_jax and casts and not layer.autocast and bool(cast_variables(layer))


def _layers_that_stall_by_their_bias(model: Any) -> list[keras.Layer]:
    """Those whose bias has a gradient that stalls in the step, as on CPUs."""
    has_steps = model.compiled and not adds_up_in_float32(model)
    by_xla = keras.backend.backend() == "tensorflow" and model.jit_compile  # which adds up well
    if not has_steps or by_xla:
        return []
    return [layer for layer in half_layers(model) if stalls_by_its_bias(layer)]


def lost_on_reload(model: Any) -> Findings:
    """Keras wraps an optimizer in loss scaling, and saves the optimizer without."""
    optimizer: Any = getattr(model, "optimizer", None)
    saved = compile_arguments(model).get("optimizer")
    if is_loss_scale_optimizer(optimizer) and not is_loss_scale_optimizer(saved):
        yield (
            "optimizer",
            "Keras wrapped it in loss scaling by itself and does not save that: a loaded model "
            "goes on without, from an empty optimizer.",
            f"Compile with kmp.scaled({type(optimizer.inner_optimizer).__name__}, ...).",
        )


def half_softmax(model: Any) -> Findings:
    """Probabilities in half precision with a loss that takes their logarithm."""
    losses = [x for x in keras.tree.flatten(getattr(model, "loss", None)) if x is not None]
    if not any(map(_takes_logarithms, losses)):
        return
    for layer in _half_outputs(model):
        squashes = _name(getattr(layer, "activation", None)) in ("softmax", "sigmoid")
        if squashes or isinstance(layer, Softmax):
            rounded = {
                "float16": "below 3e-8 are 0 in float16, and so is their gradient",
                "bfloat16": "above 0.9981 are 1 in bfloat16, where their gradient is 0 or wrong",
            }[layer.compute_dtype]
            yield (
                path_of(layer),
                f"the loss takes the logarithm of probabilities: those {rounded}.",
                "End in kmp.layers.Float32OutputDense without an activation, and give the loss "
                "from_logits=True.",
            )


def half_output(model: Any) -> Findings:
    """Predictions of numbers in half precision; probabilities have other findings."""
    losses = keras.tree.flatten(getattr(model, "loss", None))
    if not any(_function_name(x) in _REGRESSIONS for x in losses if x is not None):
        return
    for layer in _half_outputs(model):
        dtype = layer.compute_dtype
        yield (
            path_of(layer),
            f"it returns {dtype}: predictions have {formats[dtype].decimal_digits} digits, and "
            f"whole numbers beyond {whole_numbers(dtype)} are rounded.",
            _FLOAT32_OUTPUTS,
        )


def half_loss(program: Program) -> Findings:
    """A loss in half precision: told so by itself or by Keras's `floatx`, or added by a layer."""
    model = program.model
    for layer, dtype in half_losses(program).items():
        whole = "" if isinstance(layer, Model) else 'Give the layer dtype="float32". Or: '
        yield path_of(layer), f"it {loss_problem(dtype)}", f"{whole}{CAST_LOSS}"
    floatx = keras.config.floatx()  # Keras averages the losses of the batches in it
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        own = loss.dtype if isinstance(loss, Loss) else floatx
        dtype = floatx if floatx in HALF_DTYPES else own
        if loss is not None and dtype in HALF_DTYPES:
            yield (
                "loss",
                f"{_name(loss)} is evaluated in {dtype}, which rounds it"
                + ("; a square above 65504 is inf." if dtype == "float16" else "."),
                'Write keras.config.set_floatx("float32") before compiling.'
                if floatx in HALF_DTYPES
                else 'Give the loss dtype="float32".',
            )


def half_metric(model: Any) -> Findings:
    """Keras evaluates most metrics in the dtype of the outputs."""
    compiled = compile_arguments(model)
    given = keras.tree.flatten([compiled.get("metrics"), compiled.get("weighted_metrics")])
    metrics = [x for x in given if x is not None]
    names = [_name(x) for x in metrics if _is_rounded(x)]
    labels = [_name(x) for x in metrics if _casts_labels(x, model)]
    # TensorFlow's `in_top_k` takes float32 alone.
    ranks = [_name(x) for x in metrics if "top_k" in _function_name(x)]
    ranks = ranks if keras.backend.backend() == "tensorflow" else []
    for layer in _half_outputs(model) if names or labels or ranks else ():
        dtype, path = layer.compute_dtype, path_of(layer)
        if names:
            problem = f"the metrics {', '.join(names)} are evaluated in {dtype}, whatever their own"
            yield path, f"{problem} dtype says.", _FLOAT32_OUTPUTS
        if labels and _classes(model, dtype) > whole_numbers(dtype):
            problem = (
                f"for {', '.join(labels)} Keras casts labels to {dtype}, which holds every whole "
                f"number only up to {whole_numbers(dtype)}: beyond, other classes count as right."
            )
            yield path, problem, _FLOAT32_OUTPUTS
        if ranks:
            problem = f"{', '.join(ranks)} raises in `fit`: TensorFlow ranks no {dtype} outputs."
            yield path, problem, _FLOAT32_OUTPUTS


_FLOAT32_OUTPUTS = "Let the last layer return float32, for example kmp.layers.Float32OutputDense."


def _casts_labels(metric: Any, model: Any) -> bool:
    """Whether Keras casts the labels to the dtype of the outputs to compare them with classes."""
    name = _function_name(metric)
    losses = keras.tree.flatten(getattr(model, "loss", None))
    if name in ("acc", "accuracy") and isinstance(metric, str):  # Keras chooses by the labels
        return any("sparse" in _function_name(x) for x in losses)
    return name == "sparse_categorical_accuracy"


def _classes(model: Any, dtype: str) -> int:
    """The most classes that an output in `dtype` has; 0 if that is not known."""
    outputs = keras.tree.flatten(symbolic_outputs(model))
    sizes = [x.shape[-1] for x in outputs if x is not None and x.dtype == dtype and x.shape]
    return max((n for n in sizes if n is not None), default=0)


def _function_name(x: Any) -> str:
    """The name of the function that Keras evaluates for a loss or a metric."""
    if isinstance(x, (str, Loss, Metric)):
        x = x if isinstance(x, str) else function_of(x)
    name = x if isinstance(x, str) else getattr(x, "__name__", type(x).__name__)
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _is_rounded(metric: Any) -> bool:
    """Whether Keras computes the numbers of a metric in the dtype of the outputs.

    Accuracies only compare and count, so rounding changes nothing but large labels. Metric classes
    other than `MeanMetricWrapper` get the outputs as they are. Keras's own classes cast them to
    their own dtype, and so do other people's whose `update_state` mentions a cast or a dtype.
    """
    if _name(metric) in ("acc", "accuracy") or "accuracy" in type(metric).__name__.lower():
        return False
    if isinstance(metric, str):
        metric = keras.metrics.get(metric)
        return _is_rounded(metric)
    if not isinstance(metric, Metric):
        return not _name(metric).endswith("accuracy")
    if isinstance(metric, MeanMetricWrapper):
        return True
    code = getattr(type(metric).update_state, "__code__", None)
    casts = {"cast", "dtype", "_dtype"} & set(getattr(code, "co_names", ()))
    return not is_kerass_own(metric) and not casts


def _takes_logarithms(loss: Any) -> bool:
    # An attribute of Keras's losses before 3.16, and since then only one of their arguments.
    arguments = loss.get_config() if is_kerass_own(loss) else {}
    from_logits = getattr(loss, "from_logits", arguments.get("from_logits", False))
    return "crossentropy" in _name(loss) and not from_logits


def _half_outputs(model: Any) -> list[keras.Layer]:
    return [x for x in output_layers(model) if _returned_dtype(x) in HALF_DTYPES]


def _returned_dtype(layer: Any) -> str:
    """What an output layer returns; a `ReversibleEmbedding` is one in reverse."""
    if isinstance(layer, Float32OutputDense):
        return "float32"
    return getattr(layer, "reverse_dtype", None) or layer.compute_dtype


def _name(x: Any) -> str:
    """The name that Keras knows a loss, a metric or an activation by."""
    if isinstance(x, str):
        return x.lower()
    return str(getattr(x, "name", None) or getattr(x, "__name__", type(x).__name__)).lower()
