"""Several devices, one verdict: an overflow on the last replica skips the step on all of them.

    KERAS_BACKEND=tensorflow python examples/distributed.py    tf.distribute, 2 replicas
    KERAS_BACKEND=jax python examples/distributed.py           keras.distribution, 4 devices

The devices are slices of this machine's CPU, so that it runs anywhere. Comments that begin with
"GPUs", "TPUs" and "Hosts" say what to change for real ones; the optimizer stays as it is, but for
the loss scale that TPUs do not need.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet
# Four devices out of one CPU; JAX reads this once, when it starts.
# GPUs, TPUs: leave it out, JAX finds them.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import keras
import numpy as np
from sklearn.datasets import load_digits

import kmp

BACKEND = keras.backend.backend()
BATCH_SIZE = 64  # of all replicas together; each computes its share


def build_and_compile() -> keras.Model:
    """The model and its optimizer, in mixed float16 with dynamic loss scaling."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            kmp.layers.Float32OutputDense(10, name="logits"),
        ]
    )
    model.compile(
        # TPUs: keras.config.set_dtype_policy("mixed_bfloat16") below and loss_scale="none" here.
        # bfloat16 has float32's range: nothing needs a scale. Bad steps are skipped all the same.
        optimizer=kmp.scaled(keras.optimizers.Adam, loss_scale="dynamic", learning_rate=2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def model_on_tensorflow() -> keras.Model:
    """A variable for each replica, gradients summed over them: `tf.distribute`."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    # GPUs: leave the two lines above out and write tf.distribute.MirroredStrategy().
    # TPUs: tf.distribute.TPUStrategy(resolver), after tf.tpu.experimental.initialize_tpu_system.
    # Hosts: tf.distribute.MultiWorkerMirroredStrategy() with TF_CONFIG set on each of them, and a
    # loop of your own (examples/custom_loop.py inside strategy.run): Keras 3's fit fails there.
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        return build_and_compile()


def model_on_jax() -> keras.Model:
    """One program over all devices, which share each batch: `keras.distribution`."""
    # GPUs, TPUs: keras.distribution.DataParallel() takes all that there are.
    # Hosts: keras.distribution.initialize(job_addresses=..., num_processes=..., process_id=...) as
    # the first call of each process; everything after it stays as it is.
    devices = keras.distribution.list_devices("cpu")[:4]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    return build_and_compile()


def on_each_replica(variable: keras.Variable) -> list[np.ndarray]:
    """The copies of a variable, one for each device."""
    if BACKEND == "jax":
        return [np.asarray(shard.data) for shard in variable.value.addressable_shards]
    return [copy.numpy() for copy in variable.value.values]


def main() -> None:
    """Train with a poisoned row on the last replica and look at all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="one epoch, to see that it runs")
    arguments = parser.parse_args()
    if BACKEND == "torch":
        print(
            "On torch, distribute a loop of your own: torch.distributed.init_process_group, "
            "DistributedDataParallel around the model, and the loop of examples/custom_loop.py."
        )
        return

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("mixed_float16")
    model = model_on_tensorflow() if BACKEND == "tensorflow" else model_on_jax()

    digits = load_digits()
    number = len(digits.data) // BATCH_SIZE * BATCH_SIZE
    x = (digits.data[:number] / 16.0).astype("float32")
    y = digits.target[:number].astype("int32")

    def fit(rows: slice, epochs: int = 1) -> None:
        model.fit(x[rows], y[rows], BATCH_SIZE, epochs=epochs, shuffle=False, verbose=0)

    fit(slice(None), 1 if arguments.smoke else arguments.epochs)
    before = model.get_weights()

    x[BATCH_SIZE - 1] = np.inf  # the last row of the first batch: the last replica's
    fit(slice(BATCH_SIZE))
    moved = any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))
    print(f"After a batch with inf on the last replica: weights moved: {moved}")
    fit(slice(BATCH_SIZE, None))

    copies = [on_each_replica(v) for v in model.trainable_variables]
    same = all((copy == group[0]).all() for group in copies for copy in group)
    finite = all(np.isfinite(copy).all() for group in copies for copy in group)
    loss = model.evaluate(x[BATCH_SIZE:], y[BATCH_SIZE:], BATCH_SIZE, verbose=0)
    print(f"After an epoch more: weights finite: {finite}, training loss {loss:.3f}")
    print(f"Replicas: {len(copies[0])}, all with the same weights: {same}")
    scales = [float(scale) for scale in on_each_replica(model.optimizer.dynamic_scale)]
    skipped = [int(steps) for steps in on_each_replica(model.optimizer.skipped_steps)]
    print(f"Loss scale on each: {scales}, skipped steps: {skipped}")


if __name__ == "__main__":
    main()
