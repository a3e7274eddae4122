"""Codes and remainders beside sparse gradients and LoRA."""

import keras
import numpy as np
import pytest
from keras import ops
from oracle import few

import kmp

MEMORY = {"slot_dtype": "int8", "master_weights": 24}


def bits(variables):
    """Every number of these variables, in order."""
    wide = [ops.cast(v, "float32") if v.dtype == "bfloat16" else v for v in variables]
    return [ops.convert_to_numpy(v) for v in wide]


@pytest.mark.only("tensorflow")
@pytest.mark.filterwarnings("ignore:Gradients are applied")
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", ["adam", "adamw", "lion", "sgd"])
def test_a_sparse_gradient_does_as_the_dense_one(name, graph):
    """Bit for bit, with two gradients for one row, and a step that is skipped."""
    import tensorflow as tf

    def train(gradient_of):
        keras.utils.set_random_seed(0)
        table = keras.Variable(np.linspace(-1, 1, 256 * 32).reshape(256, 32), dtype="bfloat16")
        inner = keras.optimizers.get({"class_name": name, "config": {"learning_rate": 0.01}})
        optimizer = kmp.scaled(inner, 1024, **MEMORY)
        optimizer.build([table])

        def step(gradient):
            optimizer.apply([gradient], [table])

        step = tf.function(step) if graph else step
        for i in range(4):
            values = np.random.default_rng(i).normal(size=(3, 32)).astype("float32")
            values[1, 3] = np.inf if i == 2 else values[1, 3]
            rows = tf.IndexedSlices(
                tf.constant(values), tf.constant([7, 200, 7]), tf.constant([256, 32])
            )
            step(gradient_of(rows))
        assert int(optimizer.skipped_steps) == 1
        return bits([table, *optimizer.variables])

    for sparse, dense in zip(train(lambda x: x), train(tf.convert_to_tensor), strict=True):
        np.testing.assert_array_equal(sparse, dense)


@pytest.mark.filterwarnings("ignore:The .grad")  # of torch.compile
@pytest.mark.parametrize(
    "compile_kwargs", few([{}, {"jit_compile": True}, {"run_eagerly": True}], {}), ids=str
)
def test_adapters_train_with_codes_over_a_frozen_base(compile_kwargs):
    """The base stays bit for bit and has no slots; the loss is that with slots in float32."""
    random = np.random.default_rng(0)
    x = random.normal(size=(256, 512)).astype("float32")
    y = x[:, :4] @ random.normal(size=(4, 8)).astype("float32")

    def train(**memory):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((512,)),
                keras.layers.Dense(512, "tanh", dtype="bfloat16"),
                kmp.layers.Float32OutputDense(8, dtype="bfloat16"),
            ]
        )
        model.layers[0].enable_lora(16)
        model.layers[1].trainable = False
        base = bits([model.layers[0]._kernel, model.layers[1].kernel])
        model.compile(
            kmp.scaled("adam", "none", learning_rate=3e-3, **memory), "mse", **compile_kwargs
        )
        losses = model.fit(x, y, batch_size=32, epochs=10, verbose=0).history["loss"]
        for was, now in zip(
            base, bits([model.layers[0]._kernel, model.layers[1].kernel]), strict=True
        ):
            np.testing.assert_array_equal(now, was)
        return losses, model.optimizer.inner_optimizer.variables

    losses, slots = train(**MEMORY)
    coded = {v.path.split("/")[-1]: v.dtype for v in slots if v.dtype in ("int8", "uint8")}
    assert {dtype for name, dtype in coded.items() if "momentum" in name} == {"int8"}
    assert len(coded) >= 4, coded  # of both adapters
    expected, _ = train(slot_dtype="float32", master_weights=True)
    assert expected[-1] < 0.7 * expected[0]
    assert losses[-1] == pytest.approx(expected[-1], rel=0.05)
