"""Quantization-aware training of an existing model, and its conversion to int8."""

from collections.abc import Callable
from typing import Any

import keras

from kmp._keras import check_model, forget_functions, layers_of, path_of
from kmp.int8.fake_quantization import FakeQuantized, FakeQuantizedDense
from kmp.int8.quantizable import not_told_to_train, plan_for
from kmp.int8.quantized import PREPARED, is_unseen, prepare, quantize, require_int8, undo
from kmp.models.convert import to_mixed_precision
from kmp.models.policies import remember_policies
from kmp.models.report import ConversionReport, LayerConversion, policy_word


def quantize_aware(
    model: keras.Model,
    *,
    weight_bits: int = 8,
    activation_bits: int = 8,
    momentum: float = 0.99,
    freeze_after: int | None = None,
    filter_fn: Callable[[keras.Layer, str], bool] | None = None,
) -> ConversionReport:
    """Let the layers of a built model train with the rounding of int8 inference.

    `Dense`, `EinsumDense`, `Conv1D`, `Conv2D` and `Conv3D` layers are converted in place, those in
    nested models and the projections of attention layers included; their weights keep their values.
    From then on each layer multiplies

    - its kernel, rounded to `weight_bits` in steps of `max |kernel[..., channel]| / 127` (7 for 4
      bits) with a scale for each output channel, as Keras's `quantize("int8")` does;
    - its inputs, rounded to `activation_bits` in steps of `range / 127`, where the layer's one
      range is a moving average of `max |inputs|` over training batches, symmetric about zero.

    Gradients pass straight through the rounding; inputs beyond the range get no gradient. Rounding
    is done in float32 under every policy, and its result is cast to the compute dtype, so the model
    trains under `"mixed_float16"` and `"mixed_bfloat16"` as well.

    Training updates the range, a float32 variable under every policy, as it updates the moving
    statistics of `kmp.layers.Float32BatchNormalization`. The range does not change in a batch whose
    inputs are not finite, in inference, or in a layer with `trainable=False`. If one of kmp's
    callbacks is in `fit`, it does not change in a step that is skipped for its gradients either. It
    stops moving after `freeze_after` batches, or when you call `kmp.freeze_observers`.

    Train, then convert with `kmp.to_int8`, which uses the same scales and ranges. Saved files hold
    the ranges; `import kmp` before loading them. A compiled model stays compiled, with the state of
    its optimizer.

    Args:
        model: built `keras.Model`: Sequential, Functional or subclassed, with float32 weights.
        weight_bits: int from 2 to 8, bits of the kernels. Fewer than 8 are stored in int8 too.
        activation_bits: int from 2 to 8, bits of the inputs.
        momentum: float in [0, 1), of the moving average of the ranges.
        freeze_after: positive int, the number of batches after which the ranges stop moving; None
            for never.
        filter_fn: called with each layer and its path; a layer, with all layers inside it, is left
            alone if it returns False.

    Returns:
        `ConversionReport` of the layers that have weights; the model is the same object.

    Raises:
        TypeError: if `model` is not a Keras model.
        ValueError: if an argument is not as above, the model is not built, its `call` does not pass
            `training` on, or there is nothing to convert. Nothing is converted then.

    Example:

    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    >>> report = quantize_aware(model, freeze_after=100)
    >>> model.compile(kmp.scaled("sgd"), "mse")
    >>> history = model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)
    >>> float(model.layers[0].input_range)
    1.0
    >>> report = to_int8(model)
    >>> model.layers[0].kernel.dtype
    'int8'

    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference" (2018); Bengio et al. 2013 for the straight-through gradient.
    """
    settings: dict[str, Any] = {
        "weight_bits": weight_bits,
        "activation_bits": activation_bits,
        "momentum": momentum,
        "freeze_after": freeze_after,
    }
    FakeQuantizedDense(1, **settings)  # raises if one of them is wrong
    check_model(model, "quantize_aware")
    plan = plan_for(model, filter_fn)
    if all(reason for _, reason in plan):
        raise ValueError(
            f"There is nothing to quantize in {model.name!r}. Expected a layer of the classes "
            f"{', '.join(each.__name__ for each in PREPARED)}. Received: "
            f"{', '.join(f'{path_of(x)} ({why})' for x, why in plan) or 'no layer with weights'}."
        )
    before = [(type(layer).__name__, _word(layer)) for layer, _ in plan]
    chosen = [layer for layer, reason in plan if not reason]
    for layer in chosen:
        prepare(layer, settings)
    if untold := not_told_to_train(model, chosen):
        for layer in chosen:
            undo(layer)
        raise ValueError(
            f"Layers must be told that they train. Received: {model.name!r}, whose call does not "
            f"pass `training` to {path_of(untold[0])!r} and {len(untold) - 1} more layers. Nothing "
            "was converted. Write call(self, inputs, training=None) and layer(x, training=training)"
            ", in layers of your own as well."
        )
    rows = [
        LayerConversion(path_of(layer), *words, _word(layer), reason)
        for (layer, reason), words in zip(plan, before, strict=True)
    ]
    forget_functions(model)
    remember_policies(model)
    return ConversionReport(tuple(rows))


def freeze_observers(model: keras.Model) -> None:
    """Stop the ranges of a prepared model from moving; its weights go on training.

    `freeze_after` does the same after a number of batches. Inside `fit`, pass the model of the
    callback, `kmp.freeze_observers(self.model)`: on JAX it holds the state of the training loop.

    Args:
        model: `keras.Model` that `kmp.quantize_aware` has prepared.

    Raises:
        TypeError: if `model` is not a Keras model.
        ValueError: if it is not prepared.

    Example:

    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    >>> report = quantize_aware(model)
    >>> outputs = model(np.ones((1, 3)), training=True)
    >>> freeze_observers(model)
    >>> outputs = model(np.full((1, 3), 9.0), training=True)
    >>> float(model.layers[0].input_range)
    1.0
    """
    for layer in _prepared(model, "freeze_observers"):
        layer.freeze_at.assign(0)


def to_int8(model: keras.Model) -> ConversionReport:
    """Turn a model that trained after `kmp.quantize_aware` into int8, for inference.

    Kernels become int8 variables with a float32 scale for each output channel, and inputs are
    rounded to int8 in the range that training has learned. Prepared `Dense` and `EinsumDense`
    layers become Keras's own int8 layers, by `quantize("int8")` with the learned range in place of
    each row's largest value: products of int8, summed in int32. Keras quantizes no convolutions:
    these become layers of kmp that store int8 and sum the same integers in float32, which saves
    memory and no time.

    All other layers compute in float32 afterwards, because Keras refuses int8 beside float16. The
    outputs are those of the prepared model in float32 with `training=False`, except that sums may
    be rounded differently, which may move an input of the next layer to the neighbouring integer.

    The kernels cannot be trained any more: to go on training, convert a copy (save the model, and
    `keras.models.load_model`). A compiled model stays compiled, with a new optimizer of the same
    settings for the variables that are left.

    Args:
        model: `keras.Model` that `kmp.quantize_aware` has prepared, trained since.

    Returns:
        `ConversionReport` of the quantized layers; the model is the same object.

    Raises:
        TypeError: if `model` is not a Keras model.
        ValueError: if it is not prepared, or one of its layers has seen no training batch. Nothing
            is converted then.
        NotImplementedError: before Keras 3.13, which has no quantizers to choose for its layers.

    Example: see `kmp.quantize_aware`.

    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    >>> report = quantize_aware(model)
    >>> outputs = model(np.ones((1, 3)), training=True)
    >>> report = to_int8(model)
    >>> print(report.rows[0].after)
    int8_from_float32
    """
    require_int8("kmp.to_int8")
    layers = _prepared(model, "to_int8")
    unseen = [layer for layer in layers if is_unseen(layer)]
    if unseen:
        raise ValueError(
            f"The layers must have learned the ranges of their inputs. Received: {model.name!r}, "
            f"in which {path_of(unseen[0])!r} and {len(unseen) - 1} more have seen no training "
            "batch with finite inputs. Train the model, or call model(x, training=True) on some "
            "batches." + _about_frozen(unseen)
        )
    before = [_word(layer) for layer in layers]
    to_mixed_precision(model, "float32")
    for layer in layers:
        quantize(layer)
    forget_functions(model)
    _renew_optimizer(model)
    rows = [
        LayerConversion(path_of(layer), type(layer).__name__, word, layer.dtype_policy.name, "")
        for layer, word in zip(layers, before, strict=True)
    ]
    return ConversionReport(tuple(rows))


def _about_frozen(unseen: list[Any]) -> str:
    """What to do about layers that no training reaches, such as the teacher in a distillation."""
    frozen = [path_of(layer) for layer in unseen if not layer.trainable]
    if not frozen:
        return ""
    return (
        f" {frozen[0]!r} is frozen, so training does not change its range: set trainable=True for "
        "these batches, or leave it out: "
        "kmp.quantize_aware(model, filter_fn=lambda layer, path: layer.trainable)."
    )


def _renew_optimizer(model: Any) -> None:
    """Give the model a new optimizer: the old one has state for kernels that are gone."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return
    model.optimizer = type(optimizer).from_config(optimizer.get_config())
    model.optimizer.build(model.trainable_variables)


def _prepared(model: Any, owner: str) -> list[Any]:
    check_model(model, owner)
    found = [layer for layer in layers_of(model) if isinstance(layer, FakeQuantized)]
    if not found:
        raise ValueError(
            f"`model` must have layers that kmp.quantize_aware has prepared. Received: "
            f"{model.name!r}, which has none. Write kmp.quantize_aware(model), and train."
        )
    return found


def _word(layer: Any) -> str:
    word = policy_word(layer.dtype_policy)
    if isinstance(layer, FakeQuantized):
        word += f", {layer.weight_bits}-bit kernel, {layer.activation_bits}-bit inputs"
    return word
