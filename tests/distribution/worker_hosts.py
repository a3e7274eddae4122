"""One of the two processes of test_two_hosts.py: two of four devices on JAX, one on PyTorch.

    python worker_hosts.py DIRECTORY

Where they meet, and which of them this is, stands in the environment, as docs/guide.md says. For
each of DISTRIBUTIONS the process works in DIRECTORY/DISTRIBUTION/host_RANK and writes what `run`
returns to results.json there. DIRECTORY/DISTRIBUTION/shared_logs is the log_dir of both.
"""

import json
import os
import pathlib
import sys
import warnings

import keras
import numpy as np
from keras import ops

import kmp

BATCH, FEATURES, HIDDEN, UNITS = 8, 4, 8, 4
OVERFLOW = 2.0**122  # as a target: the loss is finite, and its gradient too until it is scaled
ALL = slice(None)


def data_parallel():
    return keras.distribution.DataParallel(auto_shard_dataset=False)


def model_parallel(axes, shape=(2, 2)):
    mesh = keras.distribution.DeviceMesh(shape, axes)
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*first/kernel"] = (None, "model")
    layout[".*second/kernel"] = ("model", None)
    return keras.distribution.ModelParallel(
        layout_map=layout, batch_dim_name="batch", auto_shard_dataset=False
    )


# In the last each process holds half of each kernel and, as it has devices for all of the batch,
# all of the data.
DISTRIBUTIONS = {
    "data_parallel": data_parallel,
    "model_parallel": lambda: model_parallel(["batch", "model"]),
    "model_parallel_across_hosts": lambda: model_parallel(["model", "batch"]),
}
if keras.backend.backend() == "torch":
    axes = ["batch", "model"]
    DISTRIBUTIONS = {
        "data_parallel": data_parallel,
        "model_parallel": lambda: model_parallel(axes, (2, 1)),
        "model_parallel_across_hosts": lambda: model_parallel(axes, (1, 2)),
    }
# Where all processes need the same data, and Keras gives each a part of a dataset all the same.
SAME_DATA = {"model_parallel_across_hosts"} if keras.backend.backend() == "jax" else set()


def main(directory):
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_num_cpu_devices", 2)
    keras.distribution.initialize()
    rank, half = int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"]), BATCH // 2
    own_rows = slice(rank * half, (rank + 1) * half)
    for name, distribution in DISTRIBUTIONS.items():
        home = pathlib.Path(directory, name, f"host_{rank}")
        home.mkdir(parents=True)
        os.chdir(home)
        keras.distribution.set_distribution(distribution())
        found = run(ALL if "across" in name else own_rows, home.parent / "shared_logs")
        if name not in SAME_DATA:
            found["sharded"] = sharded()
        pathlib.Path("results.json").write_text(json.dumps(found))
        keras.utils.clear_session()
    if keras.backend.backend() == "torch":
        # Now and then CPython never ends its last garbage collection after DistributedDataParallel.
        os._exit(0)


def run(rows, log_dir):
    """Everything that is done in `fit`, with the `rows` of each batch that this process holds."""
    of_torch = {"unwatched": unwatched}
    found = of_torch if keras.backend.backend() == "torch" else {}
    return {
        **{name: function(rows) for name, function in found.items()},
        "coded": coded(rows),
        "watched": watched(rows, log_dir),
        "stopped": stopped(rows),
        "rolled_back": rolled_back(rows),
        "swept": swept(rows),
        "resumed": resumed(rows),
        "rounded": rounded(rows),
    }


def watched(rows, log_dir):
    """An overflow and a loss of inf under all that watches."""
    model = make_model()
    callbacks = [
        kmp.callbacks.GradientHealth(log_dir=log_dir, update_freq=1),
        kmp.callbacks.DivergenceGuard(update_freq=1),
        kmp.callbacks.TerminateOnNaN(update_freq=1),
    ]
    found = fit(model, rows, poisoned(5, {1: OVERFLOW, 2: np.inf}), callbacks)
    assert_distributed(model)
    return {**found, **state(model)}


def sharded():
    """The same faults in a dataset of all rows, of which Keras gives each process its part."""
    import tensorflow as tf

    distribution = keras.distribution.distribution()
    if distribution is not None:
        distribution.auto_shard_dataset = True
    x, y = own(ALL, poisoned(5, {1: OVERFLOW, 2: np.inf}))
    model = make_model()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    found = watched_fit(model, [kmp.callbacks.GradientHealth(update_freq=1)], x=data)
    if distribution is not None:
        distribution.auto_shard_dataset = False
    return {**found, **state(model)}


def stopped(rows):
    """Losses of inf until TerminateOnNaN has had enough of them."""
    model, stop = make_model(), kmp.callbacks.TerminateOnNaN(patience=3, update_freq=1)
    found = fit(model, rows, poisoned(8, dict.fromkeys(range(2, 8), np.inf)), [stop])
    return {**found, **state(model), "because": stop.stopped_because}


def rolled_back(rows):
    """Inputs of two steps a hundred times as large, after which the loss diverges."""
    guard = kmp.callbacks.DivergenceGuard(
        "rollback",
        update_freq=1,
        snapshot_freq=1,
        detector=kmp.callbacks.SpikeDetector(patience=2),
    )
    model = make_model(learning_rate=2.0**-8, loss="mse")
    x, y = batches(20)
    x[14:16, -1] *= 100.0
    found = fit(model, rows, (x, y), [guard])
    return {**found, **state(model), "rollbacks": guard.rollbacks}


def swept(rows):
    """A learning rate found, and whether all of the state is as before, bit for bit."""
    model = make_model(learning_rate=2.0**-8, loss="mse")
    x, y = own(rows, batches(2))
    begun = state(model)  # before any step, as most do
    finder = kmp.callbacks.LearningRateFinder(1e-3, 1.0, steps=10)
    with warnings.catch_warnings(action="ignore"):  # so few steps suggest nothing
        finder.find(model, x, y, batch_size=len(x) // 2, shuffle=False)
    assert equal(begun, {path: x for path, x in state(model).items() if path in begun})
    fit(model, rows, batches(1))
    x, y = own(rows, poisoned(1, {0: np.nan}))
    model.evaluate(x, y, batch_size=len(x), verbose=0)  # an average of NaN has to come back too
    before = state(model, model.metrics_variables)
    finder = kmp.callbacks.LearningRateFinder(1e-3, 1.0, steps=20, log_dir="finder_logs")
    x, y = own(rows, batches(20))
    finder.find(model, x, y, batch_size=len(x) // 20, shuffle=False)
    same = equal(before, state(model, model.metrics_variables))
    points = [finder.learning_rates, finder.losses]
    return {"suggestion": finder.suggestion, "points": points, "same": same}


def resumed(rows):
    """The state after two `fit`s, the second of what was saved after the first."""
    model = make_model()
    fit(model, rows, poisoned(2, {1: np.nan}))
    try:
        model.save("model.keras")
    except RuntimeError as error:
        return {"refused": str(error)}
    saved = state(model)
    model = keras.models.load_model("model.keras", {"linear_loss": linear_loss})
    same = equal(saved, state(model))
    found = fit(model, rows, batches(2), [kmp.callbacks.GradientHealth(log_dir="own_logs")])
    return {**found, **state(model), "same": same}


def rounded(rows):
    """One step with weights and slots in bfloat16, whose exact results lie between two of these.

    The squares of its updates are multiples of 2**-16 and sum to less than 128: float32 holds them.
    """
    keras.config.set_dtype_policy("bfloat16")
    model = make_model(learning_rate=BATCH * (1 + 2.0**-8))
    keras.config.set_dtype_policy("float32")
    found = fit(model, rows, batches(1), [kmp.callbacks.GradientHealth()])
    return {**found, **state(model)}


def coded(rows):
    """One step with weights in 24 bits and slots in 8, of kernels large enough for codes."""
    keras.config.set_dtype_policy("bfloat16")
    x = keras.Input((HIDDEN,))
    hidden = keras.layers.Dense(512, use_bias=False, name="first")(x)
    model = keras.Model(x, keras.layers.Dense(HIDDEN, use_bias=False, name="second")(hidden))
    keras.config.set_dtype_policy("float32")
    model.set_weights([integers(HIDDEN, 512, seed=1), integers(512, HIDDEN, seed=2)])
    optimizer = kmp.scaled(
        "sgd", learning_rate=BATCH / 3, momentum=0.5, slot_dtype="int8", master_weights=24
    )
    model.compile(optimizer, linear_loss)
    x, y = (integers(1, BATCH, HIDDEN, seed=seed) for seed in (3, 4))
    found = fit(model, rows, (x, y), [kmp.callbacks.GradientHealth()])
    assert any(v.dtype in ("int8", "uint8") for v in optimizer.inner_optimizer.variables)
    # But for the sums of squares of what a third has rounded, in another order.
    exact = {path: x for path, x in state(model).items() if not path.endswith("gradient_details")}
    return {**found, **exact}


def unwatched(rows):
    """The loss scale after a loss of inf that nothing of kmp's but the optimizer sees."""
    model = make_model()
    x, y = own(rows, poisoned(3, {1: np.inf}))
    model.fit(x, y, batch_size=len(x) // 3, shuffle=False, verbose=0)
    return {"scale": float(ops.convert_to_numpy(model.optimizer.scale_variable))}


def make_model(learning_rate=float(BATCH), loss=None):
    """By default the learning rate undoes the division by the batch: all numbers stay exact."""
    x = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(HIDDEN, use_bias=False, name="first")(x)
    model = keras.Model(x, keras.layers.Dense(UNITS, use_bias=False, name="second")(hidden))
    model.set_weights([integers(FEATURES, HIDDEN, seed=1), integers(HIDDEN, UNITS, seed=2)])
    rule = kmp.DynamicLossScale(initial_scale=1024, growth_interval=100)
    optimizer = kmp.scaled("sgd", rule, learning_rate=learning_rate, momentum=0.5)
    model.compile(optimizer, loss or linear_loss)
    return model


def assert_distributed(model):
    distribution = keras.distribution.distribution()
    in_pieces = isinstance(distribution, keras.distribution.ModelParallel)
    if distribution is not None and keras.backend.backend() == "torch":
        assert (model.ddp_model is None) == in_pieces
        assert hasattr(model.trainable_variables[0].value, "placements") == in_pieces
    elif distribution is not None:
        sharding = model.trainable_variables[0].value.sharding
        assert len(sharding.device_set) == 4
        assert sharding.is_fully_replicated != in_pieces


def linear_loss(y_true, y_pred):
    """Its gradient does not depend on the prediction: small integers stay exact for some steps."""
    return ops.sum(y_true * y_pred, axis=-1)


def integers(*shape, seed):
    """-1, 0 and 1, half of them 0."""
    return np.random.default_rng(seed).choice(np.float32([-1, 0, 0, 1]), shape)


def batches(steps):
    """Inputs [steps, BATCH, FEATURES] and targets [steps, BATCH, UNITS]."""
    return integers(steps, BATCH, FEATURES, seed=3), integers(steps, BATCH, UNITS, seed=4)


def poisoned(steps, targets):
    """The same with the `{step: target}` in the last row, which is one of process 1."""
    x, y = batches(steps)
    for step, target in targets.items():
        y[step, -1] = target
    return x, y


def own(rows, data):
    """The rows of each batch that a process holds, one after another."""
    return [array[:, rows].reshape(-1, array.shape[-1]) for array in data]


def fit(model, rows, data, callbacks=()):
    """The history of what a process holds of the data, and kmp's warnings."""
    x, y = own(rows, data)
    return watched_fit(model, callbacks, x=x, y=y, batch_size=len(x) // len(data[0]))


def watched_fit(model, callbacks, **data):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = [kmp.callbacks.TerminateOnNaN(), *callbacks]
        history = model.fit(**data, shuffle=False, callbacks=callbacks, verbose=0).history
    said = [str(w.message) for w in caught if str(w.message).startswith("Step")]
    return {"warnings": said, **history}


def state(model, more=()):
    """Weights, the optimizer's whole state, and more."""
    variables = [*model.variables, *model.optimizer.variables, *more]
    return {v.path: whole(v).tolist() for v in variables}


def equal(before, after):
    return before.keys() == after.keys() and all(
        np.array_equal(before[path], value, equal_nan=True) for path, value in after.items()
    )


def whole(variable):
    """All of a variable, of which this process may hold a part."""
    if keras.backend.backend() == "jax" and not variable.value.is_fully_addressable:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(variable.value, tiled=True))
    return ops.convert_to_numpy(variable)


if __name__ == "__main__":
    main(*sys.argv[1:])
