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
