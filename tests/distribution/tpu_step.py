"""Compile a training step for four TPU v5e chips, on a machine without one; write its HLO.

    python tpu_step.py OPTIMIZER MODEL HLO.txt

OPTIMIZER is a key of OPTIMIZERS, MODEL one of MODELS. XLA's TPU compiler comes with the wheel
libtpu and runs ahead of time; nothing is executed.
"""

import os
import pathlib
import sys

os.environ.update(
    KERAS_BACKEND="jax",
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",  # or it would look for the machine's metadata server
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # there is no TPU that two processes could quarrel about
)

import jax
import keras
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kmp

BATCH = 64


class AsksTheHost(kmp.LossScaleOptimizer):
    """What kmp must never do; here so that the search for it is known to find it."""

    def scale_loss(self, loss):
        jax.debug.callback(lambda x: None, loss)
        return super().scale_loss(loss)


def watched():
    """As `GradientHealth` has it."""
    optimizer = kmp.scaled("adam")
    optimizer.measures_details = True
    return optimizer


OPTIMIZERS = {
    "kmp": lambda: kmp.scaled("adam"),
    "watched": watched,
    "keras": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    "asks_the_host": lambda: AsksTheHost(keras.optimizers.Adam()),
}


def images():
    layers = [
        keras.Input((16, 16, 3)),
        keras.layers.Conv2D(32, 3, use_bias=False),
        kmp.layers.Float32BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.GlobalAveragePooling2D(),
    ]
    return layers, np.zeros((BATCH, 16, 16, 3), "float32")


def words():
    layers = [
        keras.Input((8,), dtype="int32"),
        keras.layers.Embedding(20000, 768),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(768),
        keras.layers.Dense(768),
    ]
    return layers, np.zeros((BATCH, 8), "int32")


MODELS = {"images": images, "words": words}


def make_model(optimizer, name):
    keras.config.set_dtype_policy("mixed_bfloat16")
    layers, x = MODELS[name]()
    model = keras.Sequential([*layers, kmp.layers.Float32OutputDense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    y = np.zeros((BATCH,), "int32")
    model._symbolic_build(data_batch=(x, y))  # the metrics' and the optimizer's variables
    return model, (x, y)


def optimised_hlo(model, data):
    """The step as the TPU runs it, batch over all chips, state on each."""
    topology = topologies.get_topology_desc("v5e:2x2", platform="tpu")
    mesh = Mesh(np.array(topology.devices), ["batch"])

    def described(array, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    state = [
        [described(v.value) for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    ]
    data = [described(array, "batch") for array in data]
    step = jax.jit(model.train_step, donate_argnums=0)
    return step.lower(tuple(state), tuple(data)).compile().as_text()


if __name__ == "__main__":
    model, data = make_model(OPTIMIZERS[sys.argv[1]](), sys.argv[2])
    pathlib.Path(sys.argv[3]).write_text(optimised_hlo(model, data))
