"""Rounding to a range that is known beforehand: what int8 layers do with their inputs."""

from typing import Any

import keras
from keras import ops

from kmp._backend.types import Tensor
from kmp._common import number


def levels_of(bits: int) -> int:
    """The largest number that is symmetric in that many bits: 127 of 8."""
    return 2 ** (bits - 1) - 1


def checked_bits(name: str, value: Any, owner: str) -> int:
    """Return `value` if integers of so many bits can stand in an int8 and tell signs apart."""
    if number(name, value, owner) not in range(2, 9):
        raise ValueError(
            f"`{name}` of {owner} must be a whole number from 2 to 8. Received: "
            f"{name}={value!r}. int8 has 8."
        )
    return int(value)


@keras.saving.register_keras_serializable(package="kmp")
class RangeQuantizer(keras.quantizers.Quantizer):
    """Quantizes to a range that is known beforehand, where `AbsMaxQuantizer` takes each row's own.

    What `keras.quantizers.Int8QuantizationConfig` takes as `activation_quantizer`:

        outputs = int8(round(clip(inputs, -max_abs, max_abs) * scale))      scale = 127 / max_abs

    Halves are rounded up, as Keras's `fake_quant_with_min_max_vars` rounds them in training.

    Args:
        max_abs: float of at least 0, the end of the range.
        bits: int from 2 to 8.

    Raises:
        ValueError: if they are not.
    """

    def __init__(self, max_abs: float, bits: int = 8):
        super().__init__(output_dtype="int8")
        self.max_abs = number("max_abs", max_abs, "RangeQuantizer")
        if not 0 <= self.max_abs < float("inf"):
            raise ValueError(
                "`max_abs` of RangeQuantizer must be finite and at least 0. Received: "
                f"max_abs={max_abs!r}. Write the largest absolute value to expect."
            )
        self.bits = checked_bits("bits", bits, "RangeQuantizer")

    def __call__(self, x: Tensor, axis: Any = None, to_numpy: bool = False) -> tuple[Any, Any]:
        """Return int8 of the shape of `x`, and the float32[1, ..., 1] that it is to be divided by.

        `axis` and `to_numpy` are what Keras passes: there is one range for all axes.
        """
        levels = levels_of(self.bits)
        scale = ops.convert_to_tensor(
            levels / max(self.max_abs, keras.config.epsilon()), dtype="float32"
        )
        scale = ops.reshape(scale, (1,) * len(x.shape))
        integers = ops.floor(ops.cast(x, "float32") * scale + 0.5)
        return ops.cast(ops.clip(integers, -levels, levels), "int8"), scale

    def get_config(self) -> dict[str, Any]:
        return {"max_abs": self.max_abs, "bits": self.bits}
