"""What `kmp.audit` looks for in each layer: numbers that half precision cannot hold, and sizes."""

import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import Layer, Model
from keras.layers import BatchNormalization, Dense, EinsumDense, Masking

from kmp._keras import is_inner_layer, is_preprocessing, layers_of, path_of, rounds_raw_inputs
from kmp._keras.training import adds_up_in_float32
from kmp.layers import Float32OutputDense
from kmp.models.constants import LostConstant, lost_constants
from kmp.models.indices import (
    ANGLES,
    DISTANCES,
    EQUALS,
    INDICES,
    LESS_GRAVE,
    NORMALIZED,
    ORDERED,
    RAW_INPUTS,
    Rounding,
    normalizes,
    of_activations,
    roundings,
    whole_numbers,
)
from kmp.models.pooling import error_of_averages
from kmp.models.programs import Program
from kmp.models.side_effects import OWN_READS, rounded_updates, state_problem
from kmp.models.sums_by_index import sums_by_index
from kmp.models.sums_of_squares import sums_of_squares
from kmp.precision.float_formats import formats
from kmp.precision.policy import get_policy
from kmp.precision.trees import HALF_DTYPES

Findings = Iterator[tuple[str, str, str]]  # path, problem, advice

# NVIDIA, "Matrix Multiplication Background User's Guide": sizes in 16 bits are multiples of 8.
_MULTIPLE = 8
# A moving average that may stay this far from what it averages is worth a finding.
_TOLERATED_STALL = 0.1

_ADVICE = 'Give the layer dtype="float32", or convert the model with kmp.to_mixed_precision.'

_CAST_FIRST = 'Square keras.ops.cast(x, "float32") in place of x'
_CAST_TABLE = 'Look up in keras.ops.cast(x, "float32") in place of x'
_MULTIPLY_TABLE = (
    'Look up in keras.ops.cast(x, "float32") * 1.0 in place of x: without the product TensorFlow '
    "casts back first, and adds up then"
)
_CAST_SUMMANDS = 'Add up keras.ops.cast(x, "float32") in place of x'
_OR_FLOAT32 = ', or give the layer dtype="float32"'

_REVERSIBLE: Any = getattr(keras.layers, "ReversibleEmbedding", ())  # not in every Keras 3
_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)


def half_layers(model: Model) -> list[keras.Layer]:
    """The layers that compute in half precision."""
    return [x for x in layers_of(model) if x.compute_dtype in HALF_DTYPES]


def activity_regularizer(model: Model) -> Findings:
    """Keras sums activity regularizers up in the dtype of the outputs."""
    for layer in half_layers(model):
        returns_half = not isinstance(layer, Float32OutputDense)
        if layer.activity_regularizer is not None and returns_half:
            yield (
                path_of(layer),
                f"its activity regularizer is summed up in {layer.compute_dtype}: inf beyond 65504 "
                "in float16, and `fit` crashes on TensorFlow.",
                'Give the layer dtype="float32".',
            )


def half_preprocessing(program: Program) -> Findings:
    """Raw inputs, such as pixels or prices, may be beyond the range of half precision."""
    candidates = [x for x in half_layers(program.model) if is_preprocessing(x)]
    hidden = of_activations(program) if candidates else set()
    for layer in candidates:
        if rounds_raw_inputs(layer) and id(layer) not in hidden:
            yield (
                path_of(layer),
                f"its raw inputs are cast to {layer.compute_dtype} before it sees them.",
                _ADVICE,
            )
    preprocesses = any(map(is_preprocessing, layers_of(program.model)))
    for each in _roundings(program, RAW_INPUTS) if preprocesses else ():
        yield (
            path_of(each.layer),
            f"it casts raw inputs to {each.layer.compute_dtype} before a preprocessing layer sees "
            "them.",
            _advice_to_keep_inputs(each),
        )

    for each in _roundings(program, *LESS_GRAVE):
        dtype = each.layer.compute_dtype
        what = "their mean" if each.why == NORMALIZED else "something, or a multiple of it,"
        yield (
            path_of(each.layer),
            f"it casts raw inputs to {dtype} before {what} is subtracted. What is left of numbers "
            "that lie close together, such as years, is rounding errors.",
            _advice_to_keep_inputs(each),
        )

    for each in _roundings(program, EQUALS, ORDERED):
        yield (
            path_of(each.layer),
            f"it casts raw inputs to {each.layer.compute_dtype} before it compares them with a "
            "number: others that are rounded to the same count as equal.",
            _advice_to_keep_inputs(each),
        )


def half_indices(program: Program) -> Findings:
    """Indices and positions that a layer rounds before it looks up, subtracts or takes a sine."""
    for each in _roundings(program, INDICES, ANGLES, DISTANCES):
        dtype = each.layer.compute_dtype
        what, then = {
            INDICES: ("indices", "beyond, others are looked up in their place."),
            ANGLES: ("positions or times", "of large ones the sine is that of others."),
            DISTANCES: ("positions", "their differences are those of others."),
        }[each.why]
        yield (
            path_of(each.layer),
            f"it casts {what} to {dtype}, which holds every whole number only up to "
            f"{whole_numbers(dtype)}: {then}",
            _advice_to_keep_inputs(each),
        )


def _roundings(program: Program, *why: str) -> list[Rounding]:
    found = half_layers(program.model) and roundings(program, certain=True)
    return [each for each in found or () if each.why in why]


def _advice_to_keep_inputs(rounding: Rounding) -> str:
    is_plain = rounding.by_itself or not rounding.layer.weights
    if is_plain or (rounding.why == NORMALIZED and normalizes(rounding.layer)):
        return _ADVICE
    policy = get_policy(rounding.layer.dtype_policy).with_inputs_uncast()
    return (
        f'Give the layer dtype=kmp.Policy("{policy}"), which leaves its inputs as they are, or '
        "convert the model with kmp.to_mixed_precision."
    )


def epsilon(program: Program) -> Findings:
    """A constant that is rounded to 0, such as an epsilon, which protects from nothing then."""
    for lost in _lost_constants(program):
        if lost.instead == 0:
            yield (path_of(lost.layer), *_becomes_zero(f"the constant {lost.number:g}", lost.dtype))
    optimizer = getattr(program.model, "optimizer", None)
    number = getattr(getattr(optimizer, "inner_optimizer", optimizer), "epsilon", None)
    for dtype in sorted({v.dtype for v in program.model.trainable_variables} & set(HALF_DTYPES)):
        if isinstance(number, float) and 0 < number < formats[dtype].smallest_subnormal:
            yield ("optimizer", *_becomes_zero(f"epsilon={number:g}", dtype))


def _becomes_zero(what: str, dtype: str) -> tuple[str, str]:
    return (
        f"{what} is below {formats[dtype].smallest_subnormal:.3g}, the smallest number of {dtype}, "
        "and becomes 0: as an epsilon it protects from no division by zero.",
        f"Write {formats[dtype].smallest_normal:.1g}, or keep it in float32.",
    )


def half_statistics(program: Program) -> Findings:
    """An average stalls where what is added is below half a unit in its last place."""
    for layer, (dtype, names) in rounded_updates(program).items():
        in_float32 = 'Give the layer dtype="float32", or convert the model with '
        is_model = isinstance(layer, Model)
        yield (
            path_of(layer),
            f"it {state_problem(dtype, names)}",
            OWN_READS if is_model else f"{in_float32}kmp.to_mixed_precision.",
        )
    for layer in half_layers(program.model):
        if error := error_of_averages(layer, layer.compute_dtype):
            yield (
                path_of(layer),
                f"its averages of {math.prod(layer.pool_size)} numbers are wrong by up to "
                f"{error:.0%}, because this machine adds them up in {layer.compute_dtype}.",
                _ADVICE,
            )
    for layer in layers_of(program.model):
        if not isinstance(layer, BatchNormalization) or not layer.built:
            continue
        dtype = layer.moving_mean.dtype
        if dtype not in HALF_DTYPES or layer.momentum == 1:
            continue
        stalls = formats[dtype].eps / 4 / (1 - layer.momentum)
        if stalls >= _TOLERATED_STALL:
            yield (
                path_of(layer),
                f"with momentum={layer.momentum:g} its moving averages stall in {dtype}: a batch "
                f"within {stalls:.0%} of them does not move them.",
                "Use kmp.layers.Float32BatchNormalization, whose statistics are float32.",
            )


def sum_of_squares(program: Program) -> Findings:
    """Sums of squares that float16 cannot hold, by whose root a norm divides."""
    for each in sums_of_squares(program) if half_layers(program.model) else ():
        largest = math.sqrt(formats["float16"].largest / each.number)
        cast_first = _CAST_FIRST + _OR_FLOAT32 * each.is_of_a_layer
        yield (
            path_of(each.layer),
            f"it adds up the squares of {each.number:,} numbers in float16: where their root mean "
            f"square is above {largest:.2g}, the sum is inf, and what its root divides becomes 0.",
            _ADVICE if each.is_cheap_in_float32 else f"{cast_first}.",
        )


def sum_by_index(program: Program) -> Findings:
    """Sums by index, which stop growing in half precision; and gradients that are such sums."""
    for each in sums_by_index(program) if half_layers(program.model) else ():
        if each.is_gradient and adds_up_in_float32(program.model):
            continue
        rounds, cast_first = f"it adds up by index in {each.dtype}", _CAST_SUMMANDS
        if each.is_gradient:
            cast_first = _MULTIPLY_TABLE if each.is_cast_back_first else _CAST_TABLE
            rounds = f"the gradient of what it looks up is added up by index in {each.dtype}"
        helps = is_inner_layer(each.layer) and not each.is_cast_back_first
        or_float32 = _OR_FLOAT32 * helps
        yield (
            path_of(each.layer),
            f"{rounds}, and this machine rounds the sum after each number: of ones it stays at "
            f"{whole_numbers(each.dtype)}, however many more come.",
            _ADVICE if each.is_cheap_in_float32 else f"{cast_first}{or_float32}.",
        )


def constant(program: Program) -> Findings:
    """Numbers that are inf in the dtype that a layer computes in, and bounds that are 1."""
    compared = [id(each.layer) for each in _roundings(program, EQUALS)]  # with what cannot change
    for lost in _lost_constants(program):
        largest, eps = formats[lost.dtype].largest, formats[lost.dtype].eps
        is_mask = isinstance(lost.layer, Masking) and id(lost.layer) in compared
        of_a_mask = is_mask or (compared and type(lost.layer).__name__ in ("Equal", "NotEqual"))
        if abs(lost.instead) == 1:
            next_to_1 = 1 - eps / 2 if abs(lost.number) < 1 else 1 + eps
            yield (
                path_of(lost.layer),
                f"the bound {np.float32(lost.number)!s} becomes {lost.instead:g} in {lost.dtype}: "
                "of this a logarithm or a quotient may be infinite.",
                _advice_for(lost, math.copysign(next_to_1, lost.number)),
            )
        elif lost.instead and not of_a_mask:
            yield (
                path_of(lost.layer),
                f"the constant {lost.number:g} is beyond {largest:g}, the largest number of "
                f"{lost.dtype}: it becomes inf, and inf - inf and 0 * inf are NaN.",
                _advice_for(lost, math.copysign(largest / 2, lost.number)),
            )


def _advice_for(lost: LostConstant, instead: float) -> str:
    if not lost.is_of_kerass_code:
        return f"Use {instead:g}, or keep it in float32."
    if not isinstance(lost.layer, Layer):
        return 'Call it on keras.ops.cast(x, "float32") in place of x.'
    return _ADVICE if lost.is_cheap_in_float32 else 'Give the layer dtype="float32".'


def _lost_constants(program: Program) -> list[LostConstant]:
    return lost_constants(program) if half_layers(program.model) else []


def tensor_cores(model: Model) -> Findings:
    """Sizes of matrix products that are not multiples of 8."""
    for layer in half_layers(model):
        sizes = _product_sizes(layer)
        odd = [n for n in sizes if n % _MULTIPLE]
        if odd:
            yield (
                path_of(layer),
                f"it multiplies by a matrix of {sizes[0]} x {sizes[1]}, and {odd[-1]} is not a "
                f"multiple of {_MULTIPLE}: GPUs pad it, or leave the tensor cores idle.",
                f"Round {odd[-1]} up to {math.ceil(odd[-1] / _MULTIPLE) * _MULTIPLE}.",
            )


def _product_sizes(layer: Any) -> tuple[int, ...]:
    """How many numbers each product of a layer sums, and how many sums it makes; () without one.

    Biases are added, embeddings are looked up, and heads and features of an attention layer are one
    axis of its product: none of these sizes counts.
    """
    if layer.quantization_mode is not None or not layer.built:
        return ()
    if isinstance(layer, _CONVOLUTIONS):
        channels, filters = layer.kernel.shape[-2:]
        # Images have 1, 3 or 4 channels, and cuDNN has kernels for these.
        return (channels, filters) if channels > 4 else (_MULTIPLE, filters)
    if isinstance(layer, _REVERSIBLE):
        return layer.output_dim, layer.input_dim
    if isinstance(layer, Dense):
        return tuple(layer.kernel.shape)
    if not isinstance(layer, EinsumDense):
        return ()
    kernel, outputs = layer.equation.split(",")[1].split("->")
    sizes = list(zip(kernel, layer.kernel.shape, strict=True))
    summed = math.prod(size for axis, size in sizes if axis not in outputs)
    return summed, math.prod(size for axis, size in sizes if axis in outputs)
