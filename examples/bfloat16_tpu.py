"""The road to TPUs: mixed bfloat16 on JAX, on whatever this machine has.

    KERAS_BACKEND=jax python examples/bfloat16_tpu.py

bfloat16 has float32's range and a third of its digits: nothing overflows, no loss needs scaling,
and TPUs compute in nothing else. The script trains a CNN on digits in float32 and in mixed
bfloat16, data-parallel over all devices that JAX sees, and says what would change on a TPU. With
kmp's extra `tpu` (Linux on x86-64) it also lets the TPU's own compiler translate the training step
for a v5e and prints what that needs: no TPU is asked.
"""

import argparse
import importlib.util
import os
import subprocess
import sys

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet
import keras
import numpy as np
from keras import layers, ops
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kmp

BATCH = 64
NO_TPU_HERE = {  # its compiler must neither look for one nor ask the machine for its name
    "KERAS_BACKEND": "jax",
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def build_model(policy: str) -> keras.Model:
    """The same weights under both policies; statistics, logits and loss in float32."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, use_bias=False),
            kmp.layers.Float32BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            kmp.layers.Float32OutputDense(10),
        ]
    )
    keras.config.set_dtype_policy("float32")
    model.compile(
        # "none" scales nothing and still skips a step whose gradient is not finite.
        kmp.scaled("adam", "none", learning_rate=2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def compile_for_tpu() -> str:
    """What the TPU's compiler makes of the training step, in words; to run under NO_TPU_HERE."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    chips = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    mesh = Mesh(np.array(chips), ["batch"])

    def described(array, *axes):
        place = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)

    model = build_model("mixed_bfloat16")
    batch = (np.zeros((BATCH, 8, 8, 1), "float32"), np.zeros((BATCH,), "int32"))
    model.train_on_batch(*batch)  # builds what it needs
    state = tuple(
        [described(v.value) for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    data = tuple(described(array, "batch") for array in batch)
    compiled = jax.jit(model.train_step, donate_argnums=0).lower(state, data).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    return (
        f"{len(chips)} chips {chips[0].device_kind}: {text.count(' conditional(')} conditionals, "
        f"{text.count('infeed(') + text.count('outfeed(')} transfers to the host, "
        f"{(memory.temp_size_in_bytes + memory.argument_size_in_bytes) / 2**10:.0f} KiB a chip"
    )


def main() -> None:
    """Train in float32 and in mixed bfloat16, then look at the TPU's side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one epoch, nothing for the TPU")
    parser.add_argument("--compile", action="store_true", help="for a TPU alone, and nothing else")
    arguments = parser.parse_args()
    if arguments.compile:
        print(f"Compiled for {compile_for_tpu()}.")
        return
    backend = keras.backend.backend()
    if backend == "jax":
        devices = keras.distribution.list_devices()
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
        print(f"The batch is shared out among {len(devices)} devices, the first {devices[0]}.")
    digits = load_digits()
    x, x_test, y, y_test = train_test_split(
        digits.images[..., None].astype("float32") / 16, digits.target, random_state=0
    )
    for policy in ("mixed_bfloat16",) if arguments.smoke else ("float32", "mixed_bfloat16"):
        model = build_model(policy)
        model.fit(x, y, batch_size=BATCH, epochs=1 if arguments.smoke else 10, verbose=0)
        _, accuracy = model.evaluate(x_test, y_test, verbose=0)
        skipped = int(ops.convert_to_numpy(model.optimizer.skipped_steps))
        print(f"{policy:15s} test accuracy {accuracy:.1%}, {skipped} steps skipped on {backend}")
    print(
        "On a TPU: install jax[tpu] and keep the script. Make the batch a multiple of 8 times the "
        "number of chips and layers multiples of 128 wide. float16 does not exist there."
    )
    if not arguments.smoke and importlib.util.find_spec("libtpu"):
        subprocess.run(
            [sys.executable, __file__, "--compile"], env={**os.environ, **NO_TPU_HERE}, check=True
        )


if __name__ == "__main__":
    main()
