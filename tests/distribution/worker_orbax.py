"""One of two processes that save with Orbax while they train, on JAX with two devices each.

    python worker_orbax.py DIRECTORY EPOCH DISTRIBUTION...

For each distribution it trains up to EPOCHS, from the last checkpoint in
DIRECTORY/DISTRIBUTION/checkpoints on if there is one, and writes all arrays to
DIRECTORY/DISTRIBUTION/host_RANK.npz. Process 1 kills itself in the epoch of the number EPOCH; -1
for none.
"""

import os
import pathlib
import signal
import sys

import keras
import numpy as np
import worker_hosts

import kmp

EPOCHS, STEPS, BATCH = 5, 4, 8


def main(directory, epoch, *names):
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 2)
    keras.distribution.initialize()
    for name in names:
        home = pathlib.Path(directory, name)
        home.mkdir(parents=True, exist_ok=True)
        keras.distribution.set_distribution(worker_hosts.DISTRIBUTIONS[name]())
        arrays = trained(home, rows_of(name), int(epoch))
        np.savez(home / f"host_{jax.process_index()}.npz", **arrays)
        keras.utils.clear_session()


def rows_of(name):
    """Those of each batch that this process holds; see `worker_hosts.DISTRIBUTIONS`."""
    rank = int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"])
    return slice(None) if "across" in name else slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)


def trained(home, rows, kill_in):
    """All of the state after EPOCHS epochs under all of kmp's callbacks."""
    model, checkpoints = make_model(), home / "checkpoints"
    done = [int(x.name) for x in checkpoints.glob("*") if x.name.isdigit()]
    if done:
        model.load_weights(checkpoints)
    x, y = (array[:, rows].reshape(-1, array.shape[-1]) for array in batches())
    sweep(model, x, y)
    model.fit(
        x,
        y,
        batch_size=len(x) // STEPS,
        shuffle=False,
        initial_epoch=max(done, default=-1) + 1,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[
            keras.callbacks.OrbaxCheckpoint(str(checkpoints), monitor="loss"),
            kmp.callbacks.GradientHealth(log_dir=home / "logs", update_freq=3),
            kmp.callbacks.DivergenceGuard("rollback", update_freq=1, snapshot_freq=1),
            kmp.callbacks.TerminateOnNaN(update_freq=1),
            KillAProcess(kill_in),
        ],
    )
    return arrays(model)


def arrays(model):
    """All of the state."""
    return {
        v.path.replace("/", "."): worker_hosts.whole(v)
        for v in (*model.variables, *model.optimizer.variables)
    }


def sweep(model, x, y):
    """Look for a learning rate, before the first epoch and again in a run that goes on.

    It puts back every bit, so that the run ends as one that has begun once.
    """
    before = arrays(model)
    finder = kmp.callbacks.LearningRateFinder(1e-4, 1.0, steps=10)
    finder.find(model, x, y, batch_size=len(x) // STEPS, shuffle=False)
    assert len(finder.losses) == 10
    after = arrays(model)
    assert all(np.array_equal(before[path], after[path], equal_nan=True) for path in before)


class KillAProcess(keras.callbacks.Callback):
    """Process 1, before the third step of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.in_epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        is_last = os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] == "1"
        if is_last and batch == 2 and self.epoch == self.in_epoch:
            os.kill(os.getpid(), signal.SIGKILL)


def make_model():
    """float16, dropout, moving statistics, and a scale that moves."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    x = keras.Input((4,))
    hidden = keras.layers.Dense(8, name="first", use_bias=False)(x)
    hidden = kmp.layers.Float32BatchNormalization(name="normalization")(hidden)
    hidden = keras.layers.Dropout(0.25, name="dropout")(hidden)
    hidden = keras.layers.Dense(4, name="second", use_bias=False)(hidden)
    model = keras.Model(x, keras.layers.Activation("linear", dtype="float32")(hidden), name="model")
    keras.config.set_dtype_policy("float32")
    rule = kmp.DynamicLossScale(initial_scale=2.0**20, growth_interval=6)
    model.compile(kmp.scaled("adam", rule, learning_rate=0.01), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def batches():
    """Inputs [STEPS, BATCH, 4] and targets; the scale is too high for the first steps."""
    numbers = np.random.default_rng(0).normal(size=(2, STEPS, BATCH, 4))
    return numbers.astype("float32")


if __name__ == "__main__":
    main(*sys.argv[1:])
