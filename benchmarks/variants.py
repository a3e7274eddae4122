"""The optimizers that the benchmarks compare."""

import keras

import kmp

# "watched" has a `GradientHealth` too, which the benchmarks that run give to `fit`.
VARIANTS = {
    "plain": lambda inner: inner,
    "keras": keras.optimizers.LossScaleOptimizer,
    "kmp": lambda inner: kmp.LossScaleOptimizer(inner, measure_gradients=False),
    "health": kmp.LossScaleOptimizer,
    "watched": kmp.LossScaleOptimizer,
}

# Those that leave out spikes, for the benchmarks that are asked for them.
WITH_SPIKES = {
    "spikes": lambda inner: kmp.LossScaleOptimizer(inner, measure_gradients=False, spikes="skip"),
    "health, spikes": lambda inner: kmp.LossScaleOptimizer(inner, spikes="skip"),
}

# Those that keep slots in less, for weights in bfloat16; see docs/half_the_memory.md.
HALF_MEMORY = {
    "half": lambda inner: _half(inner),
    "int8 slots": lambda inner: _half(inner, slot_dtype="int8"),
}


def _half(inner: keras.optimizers.Optimizer, **memory) -> kmp.LossScaleOptimizer:
    return kmp.LossScaleOptimizer(inner, loss_scale="none", measure_gradients=False, **memory)
