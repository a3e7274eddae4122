"""Round inputs to int8 in a range that training has learned."""

from typing import Any

import keras
from keras import ops

from kmp._backend.types import Tensor
from kmp._common import number


def levels_of(bits: int) -> int:
    """The largest integer of a symmetric range in so many bits: 127 in 8 bits."""
    return 2 ** (bits - 1) - 1


def checked_bits(name: str, value: Any, owner: str) -> int:
    """Return `value` if it is a number of bits that an int8 can hold, sign included."""
    if number(name, value, owner) not in range(2, 9):
        raise ValueError(
            f"`{name}` of {owner} must be a whole number from 2 to 8. Received: "
            f"{name}={value!r}. int8 has 8."
        )
    return int(value)


@keras.saving.register_keras_serializable(package="kmp")
class RangeQuantizer(keras.quantizers.Quantizer):
    """Quantizes to int8 in a fixed range; `AbsMaxQuantizer` computes one for each row.

    It is an `activation_quantizer` for `keras.quantizers.Int8QuantizationConfig`:

        outputs = int8(round(clip(inputs, -max_abs, max_abs) * scale))      scale = 127 / max_abs

    127 is the largest integer of 8 bits; with fewer `bits` it is smaller.
    Halves are rounded up, as Keras's `fake_quant_with_min_max_vars` rounds them in training.

    Args:
        max_abs: float of at least 0; the range is from -max_abs to max_abs.
        bits: int from 2 to 8.

    Raises:
        ValueError: if one of them is not.
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

        Keras passes `axis` and `to_numpy`; neither matters to one range for all axes.
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
