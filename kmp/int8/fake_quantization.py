"""Dense and convolution layers that train with the rounding of int8 inference."""

from typing import Any

import keras
from keras import ops

from kmp._backend.types import Tensor
from kmp._common import number, whole_number
from kmp._keras import without_autocast
from kmp.int8.convolution import add_bias_and_activate, convolve
from kmp.int8.range_quantizer import checked_bits, levels_of

OBSERVER = ("input_range", "observed_batches", "freeze_at")
NEVER = 2**24  # batches: float32 cannot count further


class FakeQuantized(keras.Layer):
    """Mixin for a layer with a kernel: it rounds kernel and inputs as the int8 layer will.

    Keras's `abs_max_quantize` rounds the kernel, with a scale for each output channel, as
    `quantize("int8")` does. Keras's `fake_quant_with_min_max_vars` rounds the inputs, in a range
    that the layer learns:

        kernel = round(kernel / step) * step          step = max |kernel[..., channel]| / 127
        inputs = round(clip(inputs, -range, range) / step) * step        step = range / 127

    (127 is the largest integer of 8 bits; with fewer bits it is smaller.)

        after each training batch with finite inputs, until the observer is frozen:
            range = 0.99 * range + 0.01 * max |inputs|      (the first batch sets it)

    Gradients pass through the rounding unchanged (straight-through estimator); inputs beyond the
    range get no gradient. inf and NaN are not clipped, so that an overflow is still seen.

    Attributes:
        input_range: float32[], the end of the range, which is symmetric about zero.
        observed_batches: float32[], how many batches set the range; while it is 0, inputs are not
            rounded.
        freeze_at: float32[], the number of batches at which the range stops moving.
    """

    def __init__(
        self,
        *args: Any,
        weight_bits: int = 8,
        activation_bits: int = 8,
        momentum: float = 0.99,
        freeze_after: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.configure(weight_bits, activation_bits, momentum, freeze_after)

    def configure(
        self, weight_bits: int, activation_bits: int, momentum: float, freeze_after: int | None
    ) -> None:
        """Set the arguments of the constructor, for a layer that was made as another class."""
        owner = type(self).__name__
        self.weight_bits = checked_bits("weight_bits", weight_bits, owner)
        self.activation_bits = checked_bits("activation_bits", activation_bits, owner)
        self.momentum = number("momentum", momentum, owner)
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"`momentum` of {owner} must be at least 0 and below 1, so that the range moves. "
                f"Received: momentum={momentum!r}. The default is 0.99."
            )
        if freeze_after is not None:
            freeze_after = whole_number("freeze_after", freeze_after, owner)
        self.freeze_after = freeze_after

    def build(self, input_shape):
        super().build(input_shape)
        self.add_observer()

    def add_observer(self) -> None:
        """Create the variables of `observer`."""

        def add(name, value, aggregation):
            # kmp's callbacks restore variables that are float and not trainable after a skip.
            return self.add_weight(
                name=name,
                shape=(),
                initializer=keras.initializers.Constant(value),
                dtype="float32",
                trainable=False,
                autocast=False,
                aggregation=aggregation,
            )

        self.input_range = add("input_range", 0.0, "mean")
        self.observed_batches = add("observed_batches", 0.0, "only_first_replica")
        self.freeze_at = add("freeze_at", float(self.freeze_after or NEVER), "only_first_replica")

    @property
    def summed_axes(self) -> tuple[int, ...]:
        """The axes of the kernel that its products are summed over; others have several scales."""
        return tuple(range(len(self.kernel.shape) - 1))

    def rounded_kernel(self) -> Tensor:
        """Return the kernel as int8 inference will have it, in the layer's compute dtype."""
        with without_autocast():  # the float32 kernel is what will be quantized
            kernel = self.kernel.value  # TensorFlow would cast the variable itself later
        levels = levels_of(self.weight_bits)
        # fake_quant_with_min_max_vars gives no gradient beyond the range, and may round the end of
        # the range to just below the largest weight of a channel.
        quantized, scale = keras.quantizers.abs_max_quantize(
            ops.stop_gradient(kernel),
            axis=self.summed_axes,
            value_range=(-levels, levels),
            dtype="float32",
        )
        straight_through = kernel - ops.stop_gradient(kernel)  # zero, with the kernel's gradient
        return ops.cast(quantized / scale + straight_through, self.compute_dtype)

    def rounded_inputs(self, inputs: Tensor, training: bool | None) -> Tensor:
        """Return the inputs as int8 inference will have them; in training, observe them first."""
        if training and self.trainable:
            self._observe(ops.stop_gradient(inputs))
        end = ops.maximum(ops.convert_to_tensor(self.input_range), keras.config.epsilon())
        rounded = keras.quantizers.fake_quant_with_min_max_vars(
            inputs, -end, end, num_bits=self.activation_bits, narrow_range=True
        )
        known = ops.convert_to_tensor(self.observed_batches) > 0
        return ops.where(ops.logical_and(ops.isfinite(inputs), known), rounded, inputs)

    def _observe(self, inputs: Tensor) -> None:
        seen = ops.convert_to_tensor(self.observed_batches)
        old = ops.convert_to_tensor(self.input_range)
        largest = ops.cast(ops.max(ops.abs(inputs), initial=0), "float32")
        finite = ops.all(ops.isfinite(inputs))  # XLA's maximum may pass over a NaN
        learn = ops.logical_and(finite, seen < ops.convert_to_tensor(self.freeze_at))
        new = old * self.momentum + largest * (1 - self.momentum)
        new = ops.where(ops.equal(seen, 0), largest, new)
        self.input_range.assign(ops.where(learn, new, old))
        self.observed_batches.assign(seen + ops.cast(learn, "float32"))

    @property
    def observer(self) -> dict[str, Any]:
        """The variables that the layer has besides its weights, by name."""
        return {name: getattr(self, name) for name in OBSERVER}

    def save_own_variables(self, store):
        super().save_own_variables(store)
        for name, variable in self.observer.items():
            store[name] = variable

    def load_own_variables(self, store):
        super().load_own_variables(store)
        for name, variable in self.observer.items():
            variable.assign(store[name])

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `configure`."""
        return {
            "weight_bits": self.weight_bits,
            "activation_bits": self.activation_bits,
            "momentum": self.momentum,
            "freeze_after": self.freeze_after,
        }

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings()}


@keras.saving.register_keras_serializable(package="kmp")
class FakeQuantizedDense(FakeQuantized, keras.layers.Dense):
    """A `keras.layers.Dense` in quantization-aware training; see `kmp.quantize_aware`.

    Args:
        *args: the positional arguments of `keras.layers.Dense`.
        weight_bits: int from 2 to 8, bits of the kernel.
        activation_bits: int from 2 to 8, bits of the inputs.
        momentum: float in [0, 1), of the moving average of the range.
        freeze_after: positive int, the number of batches after which the range stops moving; None
            for never.
        **kwargs: the keyword arguments of `keras.layers.Dense`.

    Raises:
        ValueError: if one of these is not as above.

    Example:

    >>> layer = FakeQuantizedDense(3, weight_bits=4)
    >>> outputs = layer(ops.ones((2, 5)), training=True)
    >>> float(layer.input_range), tuple(layer.rounded_kernel().shape)
    (1.0, (5, 3))
    """

    def call(self, inputs, training=None):
        x = ops.matmul(self.rounded_inputs(inputs, training), self.rounded_kernel())
        if self.bias is not None:
            x = ops.add(x, self.bias)
        return x if self.activation is None else self.activation(x)


@keras.saving.register_keras_serializable(package="kmp")
class FakeQuantizedEinsumDense(FakeQuantized, keras.layers.EinsumDense):
    """A `keras.layers.EinsumDense` with the further arguments of `FakeQuantizedDense`.

    Attention layers make their projections of it: query, key, value and output.
    """

    @property
    def summed_axes(self) -> tuple[int, ...]:
        """The axes of the kernel that are not in the output, as Keras's int8 has them."""
        kernel, outputs = self.equation.split(",")[1].split("->")
        return tuple(i for i, axis in enumerate(kernel) if axis not in outputs)

    def call(self, inputs, training=None):
        x = ops.einsum(self.equation, self.rounded_inputs(inputs, training), self.rounded_kernel())
        if self.bias is not None:
            x = ops.add(x, self.bias)
        return x if self.activation is None else self.activation(x)


class FakeQuantizedConvolution(FakeQuantized):
    """Mixin for convolutions in quantization-aware training."""

    def call(self, inputs, training=None):
        x = convolve(self, self.rounded_inputs(inputs, training), self.rounded_kernel())
        return add_bias_and_activate(self, x)


@keras.saving.register_keras_serializable(package="kmp")
class FakeQuantizedConv1D(FakeQuantizedConvolution, keras.layers.Conv1D):
    """A `keras.layers.Conv1D` with the further arguments of `FakeQuantizedDense`."""


@keras.saving.register_keras_serializable(package="kmp")
class FakeQuantizedConv2D(FakeQuantizedConvolution, keras.layers.Conv2D):
    """A `keras.layers.Conv2D` with the further arguments of `FakeQuantizedDense`."""


@keras.saving.register_keras_serializable(package="kmp")
class FakeQuantizedConv3D(FakeQuantizedConvolution, keras.layers.Conv3D):
    """A `keras.layers.Conv3D` with the further arguments of `FakeQuantizedDense`."""
