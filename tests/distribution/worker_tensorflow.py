"""One worker of test_multi_worker.py under tf.distribute.MultiWorkerMirroredStrategy.

    python worker_tensorflow.py RESULTS.jsonl OPTIMIZER,graph|eager[/OPTIMIZER,...] CASE...

Each CASE is a step of a custom loop in which the workers named by its digits ("", "0", "1", "01")
overflow. The loop is run for each of the optimizers in turn. After each step a line with the
whole state is appended to RESULTS.jsonl. RESULTS.writes says at the end whether this worker is the
one that writes event files.
"""

import json
import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import kmp
from kmp._backend import backend

SETTINGS = {"learning_rate": 0.5, "momentum": 0.5}
OPTIMIZERS = {
    "kmp": lambda: kmp.LossScaleOptimizer(keras.optimizers.SGD(**SETTINGS), 1024.0),
    "accumulation": lambda: kmp.LossScaleOptimizer(
        keras.optimizers.SGD(**SETTINGS, gradient_accumulation_steps=2), 1024.0
    ),
    "keras": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(**SETTINGS), 1024.0),
}


def main(results, runs, *cases):
    worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    for run in runs.split("/"):
        optimizer_name, mode = run.split(",")
        model = train(strategy, worker, OPTIMIZERS[optimizer_name], mode == "graph", results, cases)
    pathlib.Path(results).with_suffix(".writes").write_text(str(backend.writes_logs(model)))


def train(strategy, worker, make_optimizer, graph, results, cases):
    keras.utils.clear_session()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        model.set_weights([np.float32([[1.0], [2.0]])])
        optimizer = make_optimizer()
        optimizer.build(model.trainable_variables)

    def replica_step(x):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(model(x)) / strategy.num_replicas_in_sync)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    def step(x):
        strategy.run(replica_step, args=(x,))

    if graph:
        step = tf.function(step)
    for case in cases:
        x = np.float32([[1.0 + worker, -0.5]])
        if str(worker) in case:
            x[0, 1] = 1e37  # the loss is finite, its scaled gradient is not
        step(tf.constant(x))
        with open(results, "a") as file:
            print(json.dumps(state(model, optimizer)), file=file)
    return model


def state(model, optimizer):
    variables = model.variables + optimizer.variables
    return {v.path: np.asarray(v.numpy()).tolist() for v in variables}


if __name__ == "__main__":
    main(*sys.argv[1:])
