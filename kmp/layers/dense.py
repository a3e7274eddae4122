"""A dense layer that multiplies in half precision and accumulates and returns float32."""

from typing import Any

import keras
from keras import ops

from kmp._backend import backend
from kmp._backend.types import Tensor
from kmp.precision.trees import HALF_DTYPES


@keras.saving.register_keras_serializable(package="kmp")
class Float32OutputDense(keras.layers.Dense):
    """Multiplies in half precision; accumulates, adds the bias and activates in float32.

    Use it as the output layer of a mixed-precision model. `keras.layers.Dense(units,
    dtype="float32")` returns float32 too, but also multiplies in float32. `keras.layers.Dense`
    under `"mixed_float16"` rounds the logits to half precision, where a sum above 65504 is inf and
    a softmax probability below 3e-8 is 0. This layer computes

        outputs = activation(float32(inputs @ half(kernel)) + bias)

    with `inputs` and `half(kernel)` in the layer's compute dtype. Arguments, weights and saved
    files are those of `keras.layers.Dense`, except for quantization. The bias is a float32
    variable under every policy; the kernel has the policy's variable dtype.

    Its gradients are computed by such products too. The incoming gradient is rounded to the compute
    dtype, as in any half-precision layer, so the loss must be scaled in float16. The gradient of
    the kernel is accumulated in float32 and rounded once, to the dtype of the kernel variable.
    If that is float32, it cannot overflow.

    Some backends have no half-precision product with a float32 result (TensorFlow outside XLA,
    PyTorch on CPU). There the operands are rounded to half and cast to float32 before they are
    multiplied, which gives the same result. Gradients of any order work, but JAX's forward mode,
    `jax.jvp`, is not supported.

    Args:
        units: positive int, the size of the output's last axis.
        activation: name or callable, applied to float32 `[..., units]`.
        use_bias: whether to add a bias, `float32[units]`.
        **kwargs: other arguments of `keras.layers.Dense`, such as `kernel_regularizer`,
            `activity_regularizer` (applied to the float32 output), `lora_rank`, `name`, `dtype`.

    Call arguments:
        inputs: `[batch, ..., features]`, rank 2 or more.

    Returns:
        `float32[batch, ..., units]`, with the mask of `inputs`.

    Raises:
        ValueError: if the dtype policy or `quantization_config` asks for quantization.
        NotImplementedError: if `quantize` is called.

    Example:
        >>> layer = Float32OutputDense(10, dtype="mixed_float16")
        >>> logits = layer(keras.ops.ones((2, 128)))
        >>> keras.backend.standardize_dtype(logits.dtype), layer.compute_dtype
        ('float32', 'float16')

    Source: the float32 logits of Micikevicius et al., "Mixed Precision Training" (2018), and
    `preferred_element_type` of `jax.lax.dot_general`.
    """

    def __init__(self, units: int, activation: Any = None, use_bias: bool = True, **kwargs: Any):
        super().__init__(units, activation=activation, use_bias=use_bias, **kwargs)
        self._refuse_quantization()

    def build(self, input_shape):
        # Again, because the policy may have been replaced, or come from a DTypePolicyMap by path.
        self._refuse_quantization()
        super().build(input_shape)

    def add_weight(self, *args, name=None, **kwargs):
        if name == "bias":
            kwargs["dtype"] = "float32"
        # `call` casts the kernel: autocasting would round the kernel's gradient to half.
        return super().add_weight(*args, name=name, **{**kwargs, "autocast": False})

    def call(self, inputs, training=None):
        x = ops.cast(inputs, self.compute_dtype)
        kernel = self.kernel
        if self.compute_dtype in HALF_DTYPES:
            x = matmul_half(x, kernel)
        else:
            x = ops.cast(ops.matmul(x, ops.cast(kernel, x.dtype)), "float32")
        if self.bias is not None:
            x = ops.add(x, self.bias)
        if self.activation is not None:
            x = self.activation(x)
        return ops.cast(x, "float32")

    def compute_output_spec(self, *args, **kwargs):
        spec = super().compute_output_spec(*args, **kwargs)
        return keras.KerasTensor(spec.shape, dtype="float32")

    def quantize(self, mode=None, type_check=True, config=None):
        # Model.quantize skips layers that raise this type of error, with a warning.
        raise NotImplementedError(
            f"kmp.layers.Float32OutputDense cannot be quantized. Received: mode={mode!r} for layer "
            f"{self.name!r}. Use keras.layers.Dense if you want to quantize the layer."
        )

    def _refuse_quantization(self):
        config = getattr(self, "quantization_config", None)  # since Keras 3.13
        if self.quantization_mode is not None or config is not None:
            raise ValueError(
                "kmp.layers.Float32OutputDense expects a floating-point `dtype` policy, such as "
                "'mixed_float16', and no `quantization_config`. Received: "
                f"dtype={self.dtype_policy}, quantization_config={config}. "
                "Use keras.layers.Dense if you want to quantize the layer."
            )


def matmul_half(x: Tensor, kernel: Tensor) -> Tensor:
    """float32[..., units]: half `x` times `kernel` rounded to its dtype, accumulated in float32.

    Gradients have the dtypes of `x`, `[..., features]`, and of `kernel`, `[features, units]`.
    """
    rows = x if len(x.shape) == 2 else ops.reshape(x, (-1, x.shape[-1]))
    # The cast reads the variable, because TensorFlow's custom gradients only take tensors.
    product = _matmul_rows(rows, ops.cast(kernel, kernel.dtype))
    return ops.reshape(product, (*ops.shape(x)[:-1], kernel.shape[-1]))


def _matmul_rows(x: Tensor, kernel: Tensor) -> Tensor:
    half = x.dtype

    def forward(x, kernel):
        return (backend.matmul_float32(x, ops.cast(kernel, half)),)

    def backward(inputs, kept, gradients):
        x, kernel = inputs
        upstream = ops.cast(gradients[0], half)
        to_x = _matmul_rows(upstream, ops.transpose(kernel))
        to_kernel = _matmul_rows(ops.transpose(x), upstream)
        return ops.cast(to_x, half), ops.cast(to_kernel, kernel.dtype)

    return backend.custom_gradient(forward, backward, (x, kernel))[0]
