"""Prepare one layer for quantization-aware training, or turn it into int8, in place."""

from typing import Any

import keras
from keras import ops

from kmp._keras import (
    drop_variable,
    kernel_as_array,
    replace_kernel,
    take_class,
    unlocked,
    versions,
)
from kmp.int8 import fake_quantization as fake
from kmp.int8 import int8_convolution as int8
from kmp.int8.fake_quantization import OBSERVER, FakeQuantized
from kmp.int8.range_quantizer import RangeQuantizer, levels_of
from kmp.precision.trees import as_number

PREPARED: dict[Any, Any] = {
    keras.layers.Dense: fake.FakeQuantizedDense,
    keras.layers.EinsumDense: fake.FakeQuantizedEinsumDense,
    keras.layers.Conv1D: fake.FakeQuantizedConv1D,
    keras.layers.Conv2D: fake.FakeQuantizedConv2D,
    keras.layers.Conv3D: fake.FakeQuantizedConv3D,
}
QUANTIZED: dict[Any, Any] = {
    fake.FakeQuantizedDense: keras.layers.Dense,
    fake.FakeQuantizedEinsumDense: keras.layers.EinsumDense,
    fake.FakeQuantizedConv1D: int8.Int8Conv1D,
    fake.FakeQuantizedConv2D: int8.Int8Conv2D,
    fake.FakeQuantizedConv3D: int8.Int8Conv3D,
}


_KERAS_QUANTIZES = (keras.layers.Dense, keras.layers.EinsumDense)


def require_int8(owner: str) -> None:
    """Check that Keras has what `quantize` and the loading of its layers need.

    Raises:
        NotImplementedError: if it is older than that.
    """
    versions.require(
        "quantization_config",
        owner,
        "Save the model as it is, and convert and run it with that Keras or a later one.",
    )


def prepare(layer: Any, settings: dict[str, Any]) -> None:
    """Let a built layer train with the rounding of int8; it keeps its variables.

    Args:
        layer: of a class in `PREPARED`.
        settings: what `FakeQuantized.configure` takes.
    """
    take_class(layer, PREPARED[type(layer)])
    layer.configure(**settings)
    with unlocked(layer):
        layer.add_observer()


def undo(layer: Any) -> None:
    """Take back what `prepare` did."""
    _drop_observer(layer)
    take_class(layer, next(cls for cls, made in PREPARED.items() if made is type(layer)))


def quantize(layer: Any) -> None:
    """Turn a prepared layer into its int8 twin, which computes in float32 otherwise.

    Keras quantizes its own `Dense` and `EinsumDense`; a convolution takes its class in `QUANTIZED`.
    """
    inputs = RangeQuantizer(as_number(layer.input_range), layer.activation_bits)
    levels = levels_of(layer.weight_bits)
    weights = keras.quantizers.AbsMaxQuantizer(
        axis=layer.summed_axes, value_range=(-levels, levels)
    )
    _drop_observer(layer)
    take_class(layer, QUANTIZED[type(layer)])
    _quantize(layer, keras.quantizers.Int8QuantizationConfig(weights, inputs))


def _drop_observer(layer: Any) -> None:
    with unlocked(layer):
        for name in OBSERVER:
            drop_variable(layer, name)


def _quantize(layer: Any, config: Any) -> None:
    layer.dtype_policy = keras.DTypePolicy("float32")
    with unlocked(layer):
        if type(layer) in _KERAS_QUANTIZES:
            kernel_as_array(layer)
            type(layer).quantize(layer, "int8", config=config)
        else:
            _quantize_convolution(layer, config)


def _quantize_convolution(layer: Any, config: Any) -> None:
    shape = layer.kernel.shape
    kernel, scale = config.weight_quantizer(layer.kernel, to_numpy=True)
    layer.quantization_config = config
    replace_kernel(layer, lambda: layer.add_weight(name="kernel", shape=shape))
    layer.add_scale()
    layer.kernel.assign(kernel)
    layer.kernel_scale.assign(ops.reshape(scale, (-1,)))
    layer.dtype_policy = keras.dtype_policies.get(f"int8_from_{layer.dtype_policy.name}")


def quantization_of(layer: Any) -> dict[str, Any] | None:
    """What `quantize_like` needs to make a plain layer like this one; None if this one is plain."""
    if isinstance(layer, FakeQuantized):
        return {"settings": layer.settings()}
    if layer.quantization_mode != "int8" or type(layer) not in QUANTIZED.values():
        return None
    return {"config": keras.saving.serialize_keras_object(layer.quantization_config)}


def quantize_like(layer: Any, quantization: dict[str, Any]) -> None:
    """Give a built layer the class and variables of a saved one; Keras loads their values later."""
    if type(layer) not in PREPARED or layer.quantization_mode is not None:
        return  # its own config has brought it back
    if "settings" in quantization:
        prepare(layer, quantization["settings"])
        return
    require_int8("Loading a model that kmp.to_int8 has made")
    if type(layer) not in _KERAS_QUANTIZES:
        take_class(layer, QUANTIZED[PREPARED[type(layer)]])
    _quantize(layer, keras.saving.deserialize_keras_object(quantization["config"]))


def is_unseen(layer: FakeQuantized) -> bool:
    """Whether a prepared layer has not learned any range yet."""
    return as_number(layer.observed_batches) == 0
