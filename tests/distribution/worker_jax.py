"""One of the two processes of test_two_hosts.py, each with two devices of the four.

    python worker_jax.py RANK COORDINATOR:PORT DISTRIBUTION RESULTS.json

DISTRIBUTION is a key of DISTRIBUTIONS. Each process holds the rows of each batch that belong to
its devices. What `train` returns goes to RESULTS.json.
"""

import json
import sys
import warnings

import keras
import numpy as np
from keras import ops

import kmp

BATCH, FEATURES, HIDDEN, UNITS = 8, 4, 8, 4
OVERFLOW = 2.0**122  # as a target: the loss is finite, and its gradient too until it is scaled


def data_parallel():
    return keras.distribution.DataParallel(auto_shard_dataset=False)


def model_parallel():
    """The batch over the processes, the kernels over the devices of each."""
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"])
    layout = keras.distribution.LayoutMap(mesh)
    layout["first/kernel"] = (None, "model")
    layout["second/kernel"] = ("model", None)
    return keras.distribution.ModelParallel(
        layout_map=layout, batch_dim_name="batch", auto_shard_dataset=False
    )


DISTRIBUTIONS = {"data_parallel": data_parallel, "model_parallel": model_parallel}


def main(rank, coordinator, distribution, results):
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 2)
    keras.distribution.initialize(coordinator, num_processes=2, process_id=int(rank))
    keras.distribution.set_distribution(DISTRIBUTIONS[distribution]())
    found = train(rank=int(rank))
    with open(results, "w") as file:
        json.dump(found, file)


def train(rank=None):
    """An overflow and a loss of inf in `fit`, under all that watches.

    Args:
        rank: int, the process whose rows to train on; None for all rows.

    Returns:
        kmp's warnings, and `{name: numbers}` of the history and of the state at the end.
    """
    model = make_model()
    callbacks = [
        kmp.callbacks.GradientHealth(update_freq=1),
        kmp.callbacks.DivergenceGuard(update_freq=1),
        kmp.callbacks.TerminateOnNaN(update_freq=1),
    ]
    return fit(model, callbacks, rank, steps=5, poisoned={1: OVERFLOW, 2: np.inf})


def make_model():
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(HIDDEN, use_bias=False, name="first"),
            keras.layers.Dense(UNITS, use_bias=False, name="second"),
        ]
    )
    model.set_weights([integers(FEATURES, HIDDEN, seed=1), integers(HIDDEN, UNITS, seed=2)])
    rule = kmp.DynamicLossScale(initial_scale=1024, growth_interval=100)
    # The learning rate undoes the division by the batch: the weights stay small integers.
    model.compile(kmp.scaled("sgd", rule, learning_rate=float(BATCH), momentum=0.5), linear_loss)
    return model


def linear_loss(y_true, y_pred):
    """Its gradient does not depend on the prediction: small integers stay exact for some steps."""
    return ops.sum(y_true * y_pred, axis=-1)


def integers(*shape, seed):
    """-1, 0 and 1, half of them 0."""
    return np.random.default_rng(seed).choice(np.float32([-1, 0, 0, 1]), shape)


def fit(model, callbacks, rank, steps, poisoned, epochs=1):
    """Train on the rows of `rank`; targets of process 1 are as bad as `poisoned` says, by step."""
    x = integers(steps, BATCH, FEATURES, seed=3)
    y = integers(steps, BATCH, UNITS, seed=4)
    for step, value in poisoned.items():
        y[step, -1] = value
    half = BATCH // 2
    rows = slice(None) if rank is None else slice(rank * half, (rank + 1) * half)
    x, y = x[:, rows].reshape(-1, FEATURES), y[:, rows].reshape(-1, UNITS)
    settings = {"batch_size": len(x) // steps, "epochs": epochs, "shuffle": False, "verbose": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(x, y, callbacks=callbacks, **settings).history
    said = [str(w.message) for w in caught if str(w.message).startswith("Step")]
    state = numbers(model.variables + model.optimizer.variables)
    return {"warnings": said, **history, **state}


def numbers(variables):
    return {v.path: whole(v).tolist() for v in variables}


def whole(variable):
    """All of a variable, of which this process may hold a part."""
    if keras.backend.backend() == "jax" and not variable.value.is_fully_addressable:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(variable.value, tiled=True))
    return ops.convert_to_numpy(variable)


if __name__ == "__main__":
    main(*sys.argv[1:])
