"""The call of Keras's convolution layers, with a kernel that is not their variable."""

from typing import Any

from keras import ops

from kmp._backend.types import Tensor


def convolve(layer: Any, inputs: Tensor, kernel: Tensor) -> Tensor:
    """Convolve `inputs` with `kernel` as a `Conv1D`, `Conv2D` or `Conv3D` does, without bias."""
    padding = layer.padding
    if padding == "causal":
        before = layer.dilation_rate[0] * (layer.kernel_size[0] - 1)
        steps, whole = [before, 0], [0, 0]
        last = layer.data_format == "channels_last"
        inputs = ops.pad(inputs, [whole, steps, whole] if last else [whole, whole, steps])
        padding = "valid"
    return ops.conv(
        inputs,
        kernel,
        strides=list(layer.strides),
        padding=padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )


def along_channels(layer: Any, values: Tensor) -> Tensor:
    """Reshape `values[filters]` so that they broadcast over the layer's outputs."""
    if layer.data_format == "channels_last":
        return ops.reshape(values, (1,) * (layer.rank + 1) + (layer.filters,))
    return ops.reshape(values, (1, layer.filters) + (1,) * layer.rank)


def add_bias_and_activate(layer: Any, outputs: Tensor) -> Tensor:
    """Add the bias and apply the activation of a convolution."""
    if layer.use_bias:
        outputs = ops.add(outputs, along_channels(layer, layer.bias))
    return outputs if layer.activation is None else layer.activation(outputs)
