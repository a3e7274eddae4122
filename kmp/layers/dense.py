"""A dense layer with half operands whose every sum, and whose result, is float32."""

from typing import Any

import keras
from keras import ops

from kmp import _backend
from kmp._backend.types import Tensor
from kmp.precision.trees import HALF_DTYPES


@keras.saving.register_keras_serializable(package="kmp")
class Float32OutputDense(keras.layers.Dense):
    """Multiplies in half precision; accumulates, adds the bias and activates in float32.

    The head for a mixed-precision model. `keras.layers.Dense(units, dtype="float32")` also returns
    float32, but multiplies in float32; `keras.layers.Dense` under `"mixed_float16"` rounds the
    logits to half, where a sum above 65504 is inf and a softmax tail below 6e-8 is 0:

        outputs = activation(float32(inputs @ half(kernel)) + bias)

    where `inputs` and `half(kernel)` have the layer's compute dtype. Arguments, weights and saved
    files are those of `keras.layers.Dense`, quantization aside. The bias is a float32 variable
    under every policy; the kernel has the policy's variable dtype.

    The gradients are products of the same kind. The incoming gradient is rounded to the compute
    dtype, as it is in any other half layer, so in float16 the loss has to be scaled. What reaches
    the kernel is accumulated in float32 and rounded once, to the dtype of the kernel variable:
    in float32 it cannot overflow.

    Where the backend has no half product with a float32 result (TensorFlow outside XLA, PyTorch
    on CPU) the half operands are cast up before they are multiplied. The numbers are the same.
    Gradients of any order are there, but JAX's forward mode, `jax.jvp`, cannot pass the layer.

    Args:
        units: positive int, the size of the output's last axis.
        activation: name or callable, applied to float32 `[..., units]`.
        use_bias: whether to add a bias, `float32[units]`.
        **kwargs: the further arguments of `keras.layers.Dense`, such as `kernel_regularizer`,
            `activity_regularizer` (it sees the float32 output), `lora_rank`, `name`, `dtype`.

    Call arguments:
        inputs: `[batch, ..., features]`, rank 2 or more.

    Returns:
        `float32[batch, ..., units]`; the mask of `inputs` passes through.

    Raises:
        ValueError: the dtype policy or `quantization_config` asks for quantization.
        NotImplementedError: `quantize` is called.

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
        # Again, for a policy that was replaced or that a DTypePolicyMap holds under this path.
        self._refuse_quantization()
        super().build(input_shape)

    def add_weight(self, *args, name=None, **kwargs):
        if name == "bias":
            kwargs["dtype"] = "float32"
        # The layer casts for itself, or the gradient of the kernel would be rounded to half.
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
        # Of this type, because Model.quantize skips the layers that raise it, with a warning.
        raise NotImplementedError(
            f"kmp.layers.Float32OutputDense cannot be quantized. Received: mode={mode!r} for layer "
            f"{self.name!r}. Use keras.layers.Dense for a layer that is to be quantized."
        )

    def _refuse_quantization(self):
        if self.quantization_mode is not None or self.quantization_config is not None:
            raise ValueError(
                "kmp.layers.Float32OutputDense expects a floating-point `dtype` policy, such as "
                "'mixed_float16', and no `quantization_config`. Received: "
                f"dtype={self.dtype_policy}, quantization_config={self.quantization_config}. "
                "Use keras.layers.Dense for a layer that is to be quantized."
            )


def matmul_half(x: Tensor, kernel: Tensor) -> Tensor:
    """`x @ kernel` with both operands in the half dtype of `x`, summed in float32.

    Args:
        x: half `[..., features]`.
        kernel: float32 or half `[features, units]`; rounded to the dtype of `x`.

    Returns:
        `float32[..., units]`. Its gradients have the dtypes of `x` and of `kernel`.
    """
    rows = x if len(x.shape) == 2 else ops.reshape(x, (-1, x.shape[-1]))
    # The cast reads the variable: TensorFlow's custom gradients take tensors alone.
    product = _matmul_rows(rows, ops.cast(kernel, kernel.dtype))
    return ops.reshape(product, (*ops.shape(x)[:-1], kernel.shape[-1]))


def _matmul_rows(x: Tensor, kernel: Tensor) -> Tensor:
    half = x.dtype

    def forward(x, kernel):
        return (_backend.matmul_float32(x, ops.cast(kernel, half)),)

    def backward(inputs, kept, gradients):
        x, kernel = inputs
        upstream = ops.cast(gradients[0], half)
        to_x = _matmul_rows(upstream, ops.transpose(kernel))
        to_kernel = _matmul_rows(ops.transpose(x), upstream)
        return ops.cast(to_x, half), ops.cast(to_kernel, kernel.dtype)

    return _backend.custom_gradient(forward, backward, (x, kernel))[0]
