"""Recurrent layers whose gradients are added up in half precision, step after step."""

import functools
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.layers import GRU, LSTM

from kmp._backend import backend
from kmp.models.indices import whole_numbers
from kmp.precision.temporary import under
from kmp.precision.trees import HALF_DTYPES

ADDS_UP_STEPS = "would add up the gradients of many steps in half precision"
_TOLERATED = 0.1
_STEPS = 512
_SETTINGS = ("activation", "recurrent_activation", "use_bias", "reset_after", "use_cudnn")


def adds_up_steps(layer: Any, dtype: str) -> bool:
    """Whether the gradient of a recurrent layer's weights would stop growing in `dtype`.

    Keras casts the weights of a cell in each step. But GRU on JAX and PyTorch, and LSTM on PyTorch,
    have code of their own, which casts the weights once: the gradient of each step is then added to
    the sum of the others in half precision. That is tried on this machine. If a layer returns only
    its last output, the last steps count most, and nothing is wrong.
    """
    if dtype not in HALF_DTYPES or not isinstance(layer, (GRU, LSTM)) or not layer.built:
        return False
    steps = (layer.get_build_config() or {}).get("input_shape", (None, None))[1]
    if layer.unroll or not layer.use_cudnn or (steps is not None and steps <= whole_numbers(dtype)):
        return False
    kind = GRU if isinstance(layer, GRU) else LSTM
    settings = {name: getattr(layer, name) for name in _SETTINGS if hasattr(layer, name)}
    return layer.return_sequences and _error(kind, *settings.items()) > _TOLERATED


@functools.cache
def _error(kind: Any, *settings: tuple[str, Any]) -> float:
    """How wrong the gradient of 512 steps, all of which count, is in bfloat16."""
    if keras.backend.backend() == "tensorflow":  # adds up all steps at once
        return 0.0
    layer = kind(4, return_sequences=True, dtype="float32", **dict(settings))
    layer.build((1, _STEPS, 4))
    variables = layer.trainable_variables
    for v in variables:
        v.assign(np.full(v.shape, 0.5 / v.shape[0] if len(v.shape) > 1 else 0.1, "float32"))
    x = np.random.default_rng(0).uniform(0.5, 1, (1, _STEPS, 4)).astype("float32")

    def gradients(policy: str) -> list[np.ndarray]:
        with under(layer, policy):
            _, found = backend.gradients(
                lambda: ops.mean(ops.cast(layer(ops.convert_to_tensor(x)), "float32")), variables
            )
        return [ops.convert_to_numpy(each) for each in found]

    pairs = zip(gradients("mixed_bfloat16"), gradients("float32"), strict=True)
    return max(float(np.abs(half - exact).max() / np.abs(exact).max()) for half, exact in pairs)
