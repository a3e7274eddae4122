"""What several tests share: answers that use none of kmp's code, and the ways to run a function."""

import keras
import numpy as np

BACKEND = keras.backend.backend()
MODES = {
    "tensorflow": ["eager", "graph", "xla"],
    "jax": ["eager", "jit"],
    "torch": ["eager"],
}[BACKEND]
COMPILED_MODES = [mode for mode in MODES if mode != "eager"]


def compiled(function, mode):
    """`function` as the backend runs it in `mode`."""
    if mode == "eager":
        return function
    if mode == "jit":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, jit_compile=mode == "xla")


def number(x):
    """A scalar tensor or variable as a NumPy scalar of its own dtype."""
    return keras.ops.convert_to_numpy(x)[()]


def loss_scales(
    finite,
    initial_scale=2.0**15,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=2000,
    min_scale=1.0,
    max_scale=2.0**24,
    hysteresis=1,
):
    """The loss scale after each step, in the words of the documentation and in float32."""
    scale, good, bad = np.float32(initial_scale), 0, 0
    scales = []
    for step in finite:
        if step:
            good, bad = good + 1, 0
            if good >= growth_interval:
                with np.errstate(over="ignore"):
                    scale = min(scale * np.float32(growth_factor), np.float32(max_scale))
                good = 0
        else:
            good, bad = 0, bad + 1
            if bad >= hysteresis:
                scale = max(scale * np.float32(backoff_factor), np.float32(min_scale))
        scales.append(scale)
    return np.array(scales, "float32")
