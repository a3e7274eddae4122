"""A training run in a process of its own, to be killed and taken up again; see test_resume.py.

    python training_run.py whole DIRECTORY       train to the end; save in passing, in mid-epoch
    python training_run.py killed DIRECTORY      die by SIGKILL in mid-epoch, leaving a backup
    python training_run.py restarted DIRECTORY   the same script again: resume from the backup
    python training_run.py continued DIRECTORY   load what "whole" saved, do the remaining batches
    python training_run.py one_epoch DIRECTORY   train one epoch and save

Several of them, with commas in between, and several directories are gone through in one process. A
directory's name ends in the name of its policy. All but the run that is killed write their whole
state to DIRECTORY/<name>.npz at the end.
"""

import os
import pathlib
import signal
import sys

import keras
import numpy as np
from keras import ops

import kmp

# The second keeps weights and slots in bfloat16, the third in 24 and 8 bits, but for those that are
# small. They overflow where the first does.
POLICIES = {"float16": "mixed_float16", "bfloat16": "p=bf16,c=f16", "codes": "p=bf16,c=f16"}
MEMORY = {"codes": {"slot_dtype": "int8", "master_weights": 24}}
WIDTH = {"codes": 1024}  # a kernel of 6,144 numbers
BATCH, BATCHES, EPOCHS = 8, 6, 4
POISONED_BATCH = 2  # of each epoch: an overflow before the interruption, and one after it
INTERRUPTED = (2, 3)  # epoch and batch, both from 0


def data():
    random = np.random.default_rng(3)
    x = random.normal(size=(BATCH * BATCHES, 6)).astype("float32")
    y = x[:, :1] * 2 + 1
    y[POISONED_BATCH * BATCH + 5] = 1e4  # the loss is finite, its gradient in float16 is not
    return x, y


def make_model(directory):
    keras.utils.set_random_seed(5)
    name = directory.name.split("_")[-1]
    policy = kmp.Policy(POLICIES[name])
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(WIDTH.get(name, 8), activation="relu", dtype=policy),
            kmp.layers.Float32BatchNormalization(dtype=policy),
            kmp.layers.Float32OutputDense(1, dtype=policy),
        ]
    )
    rule = kmp.DynamicLossScale(
        initial_scale=256, growth_interval=BATCHES - 1
    )  # grows if no step is forgotten
    # The peak fades so fast that some steps of the last epoch are spikes.
    spikes = kmp.SkipSpikes(factor=1.05, half_life=1) if "bfloat16" in directory.name else None
    memory = MEMORY.get(name, {})
    optimizer = kmp.scaled("adam", rule, spikes=spikes, learning_rate=0.05, **memory)
    model.compile(optimizer, loss="mse")
    return model


def whole_state(model):
    """Every number that training depends on, by place and path."""
    variables = model.variables + model.optimizer.variables
    wide = [ops.cast(v, "float32") if v.dtype == "bfloat16" else v for v in variables]
    pairs = enumerate(zip(variables, map(ops.convert_to_numpy, wide), strict=True))
    return {f"{i} {v.path}": x for i, (v, x) in pairs}


class AtBatch(keras.callbacks.Callback):
    """Does something after one batch of one epoch."""

    def __init__(self, epoch, batch, action):
        super().__init__()
        self.place, self.action, self.epoch = (epoch, batch), action, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.place:
            self.action(self.model)


def fit(model, callbacks=(), **arguments):
    x, y = data()
    fixed = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=list(callbacks), **{"epochs": EPOCHS, **fixed, **arguments})


def whole(directory):
    model = make_model(directory)
    fit(model, [AtBatch(*INTERRUPTED, lambda model: model.save(directory / "in_passing.keras"))])
    return model


def backup(directory):
    return keras.callbacks.BackupAndRestore(
        directory / "backup", double_checkpoint="double" in directory.name
    )


def killed(directory):
    def kill(model):
        os.kill(os.getpid(), signal.SIGKILL)

    fit(make_model(directory), [backup(directory), AtBatch(*INTERRUPTED, kill)])


def restarted(directory):
    model = make_model(directory)
    fit(model, [backup(directory)])
    return model


def continued(directory):
    model = keras.models.load_model(directory / "in_passing.keras")
    epoch, batch = INTERRUPTED
    x, y = data()
    rest = slice((batch + 1) * BATCH, None)
    model.fit(x[rest], y[rest], batch_size=BATCH, shuffle=False, verbose=0)
    fit(model, epochs=EPOCHS - epoch - 1)
    return model


def one_epoch(directory):
    model = make_model(directory)
    fit(model, epochs=1)
    model.save(directory / "one_epoch.keras")
    return model


if __name__ == "__main__":
    runs = {f.__name__: f for f in (whole, killed, restarted, continued, one_epoch)}
    names, *directories = sys.argv[1:]
    for directory in map(pathlib.Path, directories):
        for name in names.split(","):
            keras.utils.clear_session()
            model = runs[name](directory)
            np.savez(directory / f"{name}.npz", **whole_state(model))
