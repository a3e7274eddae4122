"""Convolutions with int8 kernels, which Keras's own `quantize("int8")` does not make."""

from typing import Any

import keras
from keras import ops

from kmp._keras import mark_quantized
from kmp.int8.convolution import add_bias_and_activate, along_channels, convolve


class Int8Convolution(keras.Layer):
    """Mixin of a convolution with an int8 kernel and inputs rounded to int8.

        outputs = conv(int8(inputs), int8 kernel) / (input scale * kernel scale[channel]) + bias

    The integers are multiplied and summed in float32, which is exact up to 2**24. So the sums are
    those of an int8 convolution with int32 sums for up to 1040 products a sum (9 positions in 115
    channels), and within float32's rounding beyond. Keras's backends have no int8 convolution in
    common: the kernel takes a quarter of the memory, and the call as long as in float32.

    Args:
        quantization_config: `keras.quantizers.Int8QuantizationConfig`, as Keras's int8 layers take
            it, with a `RangeQuantizer` as its activation quantizer.
        **kwargs: the arguments of the convolution.
    """

    def __init__(self, *args: Any, quantization_config: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.quantization_config = keras.saving.deserialize_keras_object(quantization_config)

    def build(self, input_shape):
        super().build(input_shape)
        self.add_scale()

    def add_scale(self) -> None:
        """Create the scale of each filter."""
        self.kernel_scale = self.add_weight(
            name="kernel_scale", shape=(self.filters,), initializer="ones", trainable=False
        )
        mark_quantized(self)

    def add_weight(self, *args, name=None, **kwargs):
        if name == "kernel":
            kwargs.update(dtype="int8", initializer="zeros", trainable=False)
            kwargs.update(regularizer=None, constraint=None)
        return super().add_weight(*args, name=name, **kwargs)

    def call(self, inputs):
        integers, inputs_scale = self.quantization_config.activation_quantizer(inputs)
        kernel = ops.cast(self.kernel, "float32")
        x = convolve(self, ops.cast(integers, "float32"), kernel)
        x = x / along_channels(self, ops.multiply(self.kernel_scale, inputs_scale))
        return add_bias_and_activate(self, x)

    quantized_call = call  # Keras calls this under the policy "int8_from_float32"

    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["kernel_scale"] = self.kernel_scale

    def load_own_variables(self, store):
        super().load_own_variables(store)
        self.kernel_scale.assign(store["kernel_scale"])

    def get_config(self) -> dict[str, Any]:
        config = keras.saving.serialize_keras_object(self.quantization_config)
        return {**super().get_config(), "quantization_config": config}


@keras.saving.register_keras_serializable(package="kmp")
class Int8Conv1D(Int8Convolution, keras.layers.Conv1D):
    """A `keras.layers.Conv1D` that `kmp.to_int8` has quantized."""


@keras.saving.register_keras_serializable(package="kmp")
class Int8Conv2D(Int8Convolution, keras.layers.Conv2D):
    """A `keras.layers.Conv2D` that `kmp.to_int8` has quantized."""


@keras.saving.register_keras_serializable(package="kmp")
class Int8Conv3D(Int8Convolution, keras.layers.Conv3D):
    """A `keras.layers.Conv3D` that `kmp.to_int8` has quantized."""
