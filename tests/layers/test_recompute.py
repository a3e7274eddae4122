"""The layers inside `torch.utils.checkpoint`, which runs them again for the backward pass."""

import keras
import numpy as np
import pytest
from keras import ops

from kmp.layers import Float32BatchNormalization, Float32OutputDense

pytestmark = pytest.mark.only("torch")

LAYERS = {
    "normalization": Float32BatchNormalization,
    "dense": lambda: Float32OutputDense(3, "tanh"),
    "both": lambda: keras.Sequential([Float32BatchNormalization(), Float32OutputDense(3)]),
}


@pytest.mark.parametrize("use_reentrant", [False, True, None])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_without_it(name, policy, use_reentrant):
    import torch
    from torch.utils.checkpoint import checkpoint

    keras.config.set_dtype_policy(policy)
    layer = LAYERS[name]()
    layer.build((8, 4))
    values = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")

    def pull_back(run):
        layer.zero_grad()
        x = torch.tensor(values, requires_grad=True)
        y = run(lambda x: layer(x, training=True), x)
        ops.sum(ops.cast(y, "float32") ** 3).backward()
        return [y, x.grad, *(v.value.grad for v in layer.trainable_variables)]

    plain = pull_back(lambda call, x: call(x))
    if use_reentrant is None:  # each tensor that is kept goes to the host and back
        with torch.autograd.graph.save_on_cpu():
            found = pull_back(lambda call, x: call(x))
    else:
        found = pull_back(lambda call, x: checkpoint(call, x, use_reentrant=use_reentrant))
    assert len(found) == 2 + len(layer.trainable_variables)
    for x, expected in zip(found, plain, strict=True):
        assert x.dtype == expected.dtype and torch.equal(x, expected)


@pytest.mark.parametrize("kind", [Float32BatchNormalization, keras.layers.BatchNormalization])
def test_statistics_move_twice(kind):
    """As docs/limits.md says: the batch is 1, and half of the way is left after each time."""
    import torch
    from torch.utils.checkpoint import checkpoint

    layer = kind(momentum=0.5)
    x = torch.ones((8, 4), requires_grad=True)
    y = checkpoint(lambda x: layer(x, training=True), x, use_reentrant=False)
    y.sum().backward()
    assert ops.convert_to_numpy(layer.moving_mean).tolist() == [0.75] * 4
