"""On TensorFlow no weight can be assigned before it is read again."""

import keras
import numpy as np
import pytest
from graph_orders import optimized_graphs, unordered

import kmp

pytestmark = pytest.mark.only("tensorflow")


@pytest.mark.parametrize("scaled", [False, True])
def test_a_weight_is_not_assigned_before_it_is_read_again(scaled):
    """Grappler had removed what ordered them; of MobileNetV2, 3 of 9 steps had a wrong gradient."""
    model = keras.Sequential([keras.Input((4,))])
    for i in range(3):
        model.add(keras.layers.Dense(4, use_bias=False))
        model.add(keras.layers.BatchNormalization(name=f"norm{i}"))
    model.add(keras.layers.Dense(1))
    kmp.recompute(model, segments=["norm0", "norm1", "norm2"])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(kmp.scaled(optimizer) if scaled else optimizer, "mse", jit_compile=False)
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    graphs = optimized_graphs(lambda: model.fit(x, y, verbose=0))
    numbers, pairs = zip(*map(unordered, graphs), strict=True)
    assert sum(numbers) > 2 * len(model.trainable_variables)
    assert not any(pairs), pairs
