"""Training on replicas, to be killed and taken up again; see test_killed_replicas.py.

    python worker_replicas.py killed REPLICAS DIRECTORY      train to the end, and save; begin
                                                             anew, and die by SIGKILL in mid-epoch
    python worker_replicas.py restarted REPLICAS DIRECTORY   resume from the backups of the latter

The replicas are CPU devices of one process: of MirroredStrategy on TensorFlow, of DataParallel on
JAX. A model is trained in each of MODES, in DIRECTORY/MODE. What has come to its end writes its
state to whole.npz or restarted.npz there. On two replicas "restarted" then loads the file of each
mode, and trains on; see `convert`.
"""

import os
import pathlib
import signal
import sys

import keras
import numpy as np
from keras import ops

import kmp
from kmp.half_memory import exact_weights, numbers_of

# A policy, and arguments of `kmp.scaled`.
MODES = {
    "bfloat16": ("bfloat16", {}),
    "float32_slots": ("bfloat16", {"slot_dtype": "float32"}),
    "remainders": ("bfloat16", {"master_weights": True}),
    "remainders_int8": ("bfloat16", {"master_weights": True, "slot_dtype": "int8"}),
    "24_bits_int8": ("bfloat16", {"master_weights": 24, "slot_dtype": "int8"}),
    "mixed_int8": ("mixed_bfloat16", {"slot_dtype": "int8"}),
}
# TensorFlow takes five times as long as JAX.
if keras.backend.backend() == "tensorflow" and not os.environ.get("KMP_WHOLE_GRID"):
    MODES = {name: MODES[name] for name in ("bfloat16", "24_bits_int8", "mixed_int8")}
BATCH, BATCHES, EPOCHS = 8, 6, 4
OVERFLOW = (2, -1)  # of each epoch: the batch, and its row, which the last replica has
LARGE = 1e18  # as a target: the loss is finite, and its gradient too until it is scaled
SCALE = 2.0**72
INTERRUPTED = (2, 3)  # epoch and batch, both from 0


def make_devices():
    """Four, before anything is computed."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 4
        )
    else:
        import jax

        jax.config.update("jax_num_cpu_devices", 4)


def on_replicas(number):
    """Within, models are made for so many replicas."""
    if keras.backend.backend() == "tensorflow":
        import replicas

        return replicas.mirrored(number).scope()
    devices = keras.distribution.list_devices("cpu")[:number]
    return keras.distribution.DataParallel(devices=devices).scope()


def data():
    random = np.random.default_rng(3)
    x = random.integers(256, size=(BATCHES, BATCH, 4))
    y = random.normal(size=(BATCHES, BATCH, 1)).astype("float32")
    y[OVERFLOW] = LARGE
    return x.reshape(-1, 4), y.reshape(-1, 1)


def make_model(mode):
    """With a kernel and a table of 4,096 numbers each, enough for codes."""
    policy, memory = MODES[mode]
    keras.utils.set_random_seed(5)
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(256, 16),
            keras.layers.Flatten(),
            keras.layers.Dense(64, "tanh", use_bias=False),
            kmp.layers.Float32OutputDense(1, use_bias=False),
        ]
    )
    keras.config.set_dtype_policy("float32")
    # The scale grows if no step is forgotten.
    rule = kmp.DynamicLossScale(SCALE, growth_interval=BATCHES - 1, max_scale=SCALE)
    model.compile(kmp.scaled("adam", rule, learning_rate=0.01, **memory), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model, callbacks=()):
    """Train; the epochs that were done: of a model that has restored a backup, those after it."""
    fixed = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    return model.fit(*data(), epochs=EPOCHS, callbacks=list(callbacks), **fixed).epoch


def on_each_replica(variable):
    """float32 or integers [replicas, ...], what each replica holds of a variable."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        strategy = tf.distribute.get_strategy()
        each = strategy.experimental_local_results(variable.value)
    else:
        each = [shard.data for shard in variable.value.addressable_shards]
    each = np.stack([np.asarray(x) for x in each])
    return each.astype("float32") if variable.dtype == "bfloat16" else each


def whole_state(model):
    """Every number that training depends on, by place and path, and on each replica."""
    variables = enumerate(model.variables + model.optimizer.variables)
    return {f"{i} {v.path}": on_each_replica(v) for i, v in variables}


def exact_state(model):
    """float32: the weights with their remainders, and what slots stand for, by what holds them."""
    optimizer = model.optimizer
    views = optimizer.stored.weights.values()
    rests = {id(view.variable): f"+{view.remainder.dtype}" for view in views}
    exact, found = exact_weights(optimizer.stored), {}
    for i, v in enumerate(model.trainable_variables):
        found[f"weight {i} {v.dtype}{rests.get(id(v), '')}"] = exact.get(id(v), v)
    for i, slot in enumerate(numbers_of(optimizer.inner_optimizer, optimizer.stored)):
        found[f"slot {i} {getattr(slot, 'variable', slot).dtype}"] = slot
    return {
        name: np.array(ops.convert_to_numpy(ops.cast(x, "float32"))) for name, x in found.items()
    }


class AtBatch(keras.callbacks.Callback):
    """Does something after one batch of one epoch."""

    def __init__(self, action):
        super().__init__()
        self.action = action

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == INTERRUPTED:
            self.action()


def killed(directory, replicas):
    models = {mode: make_model(mode) for mode in MODES}
    for mode, model in models.items():
        variables = model.variables + model.optimizer.variables
        start = [ops.convert_to_numpy(v) for v in variables]
        save(directory / mode / "whole.npz", model, fit(model))
        np.savez(directory / mode / "exact.npz", **exact_state(model))
        model.save_weights(directory / mode / "whole.weights.h5")
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
    die_in_all(directory, models)


def die_in_all(directory, models):
    """Within a batch of the first run begin the next, and so on; in the last, kill them all."""
    (mode, model), *others = models.items()

    def interrupt():
        if others:
            die_in_all(directory, dict(others))
        os.kill(os.getpid(), signal.SIGKILL)

    fit(model, [backup(directory, mode), AtBatch(interrupt)])


def restarted(directory, replicas):
    for mode in MODES:
        model = make_model(mode)
        epochs = fit(model, [backup(directory, mode)])
        save(directory / mode / "restarted.npz", model, epochs)
        if replicas == 2:
            convert(model, directory, mode)


def convert(model, directory, mode):
    """Load what was saved in each mode, and train on; write what came of it, before and after."""
    for saved in MODES:
        model.load_weights(directory / saved / "whole.weights.h5")
        np.savez(directory / mode / f"from_{saved}.npz", **exact_state(model))
        fit(model)
        np.savez(directory / mode / f"on_from_{saved}.npz", **exact_state(model))


def backup(directory, mode):
    return keras.callbacks.BackupAndRestore(directory / mode / "backup")


def save(path, model, epochs):
    np.savez(path, epochs=epochs, **whole_state(model))


def main(name, replicas, directory):
    make_devices()
    replicas, directory = int(replicas), pathlib.Path(directory)
    for mode in MODES:
        (directory / mode).mkdir(parents=True, exist_ok=True)
    with on_replicas(replicas):
        {f.__name__: f for f in (killed, restarted)}[name](directory, replicas)


if __name__ == "__main__":
    main(*sys.argv[1:])
