"""On TensorFlow nothing is assigned that may still have to be read."""

import keras
import numpy as np
import pytest
from graph_orders import optimized_graphs, unordered

import kmp

pytestmark = pytest.mark.only("tensorflow")
CASES = {
    "float16": ("mixed_float16", {}, {"use_ema": True, "ema_overwrite_frequency": 2}),
    "accumulated": ("mixed_float16", {}, {"gradient_accumulation_steps": 2}),
    "spikes": ("mixed_bfloat16", {"spikes": "skip", "slot_dtype": "int8"}, {}),
    "masters": ("bfloat16", {"master_weights": True}, {"global_clipnorm": 1.0}),
    "24 bits": ("bfloat16", {"slot_dtype": "int8", "master_weights": 24}, {}),
}


@pytest.mark.filterwarnings("ignore::kmp.PrecisionWarning")
@pytest.mark.parametrize("case", [pytest.param(x, marks=pytest.mark.wide) for x in CASES])
def test_every_write_has_its_order(case, tmp_path):
    """In one direction or the other: Grappler may remove an edge that it takes for one too many."""
    policy, options, settings = CASES[case]
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    image, words = keras.Input((6, 6, 2)), keras.Input((4,), dtype="int32")
    x = kmp.layers.Float32BatchNormalization()(keras.layers.Conv2D(4, 3)(image))
    x = keras.layers.BatchNormalization()(keras.layers.Dropout(0.1)(keras.layers.ReLU()(x)))
    text = keras.layers.GRU(4, recurrent_initializer="zeros")(keras.layers.Embedding(9, 16)(words))
    x = keras.layers.Concatenate()([keras.layers.Flatten()(x), text])
    model = keras.Model([image, words], kmp.layers.Float32OutputDense(2)(x))
    optimizer = kmp.scaled(keras.optimizers.Adam(**settings), **options)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    images = np.random.default_rng(0).normal(size=(8, 6, 6, 2)).astype("float32")
    inputs = images, np.arange(32).reshape(8, 4) % 9
    y, health = np.ones((8, 2), "float32"), kmp.callbacks.GradientHealth(log_dir=tmp_path)
    graphs = optimized_graphs(
        lambda: model.fit(inputs, y, batch_size=4, verbose=0, callbacks=[health])
    )
    numbers, pairs = zip(*map(unordered, graphs), strict=True)
    assert sum(numbers) > 5 * len(model.trainable_variables)
    assert not any(pairs), pairs
