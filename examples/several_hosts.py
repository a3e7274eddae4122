"""Several hosts train one model; a run that loses a host goes on from its last epoch, bit for bit.

    sbatch examples/hosts/slurm_jax.sh                  SLURM, JAX
    sbatch examples/hosts/slurm_torch.sh                SLURM, PyTorch with Keras 3.16
    kubectl apply -f examples/hosts/kubernetes.yaml     Kubernetes, JAX or PyTorch
    bash examples/hosts/tpu_pod.sh                      a Cloud TPU pod, JAX
    torchrun --standalone --nproc-per-node=2 examples/several_hosts.py      one host, PyTorch

Each starts this script once for each process, in a directory that all hosts share, and the same
command again goes on where a run broke off. docs/several_devices.md says how the processes find one
another. With --smoke it is one process alone.
"""

import argparse
import os
import pathlib
import socket

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keep TensorFlow's start-up quiet

import keras
import numpy as np
from sklearn.datasets import load_digits

import kmp

BACKEND = keras.backend.backend()
BATCH_SIZE = 32  # of each process


def meet() -> tuple[int, int]:
    """Wait for the other processes. Returns which of them this is, and how many there are."""
    keras.distribution.initialize()
    if BACKEND == "jax":
        import jax

        return jax.process_index(), jax.process_count()
    import torch.distributed

    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def own_data(rank: int, processes: int) -> tuple[np.ndarray, np.ndarray]:
    """This process's part of the digits, of the same number of batches as that of each other."""
    digits = load_digits()
    number = len(digits.data) // (BATCH_SIZE * processes) * BATCH_SIZE
    x, y = digits.data[rank::processes] / 16.0, digits.target[rank::processes]
    return x[:number].astype("float32"), y[:number].astype("int32")


def build_and_compile() -> keras.Model:
    """The model in mixed float16, with an optimizer that a checkpoint can be loaded into."""
    keras.utils.set_random_seed(0)  # the same everywhere: all begin with the same weights
    keras.config.set_dtype_policy("mixed_float16")  # TPUs: "mixed_bfloat16"
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            # Without a seed of its own it draws from PyTorch's generator there, which is not saved.
            keras.layers.Dropout(0.1, seed=0, name="dropout"),
            kmp.layers.Float32OutputDense(10, name="logits"),
        ],
        name="digits",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # TPUs: loss_scale="none". bfloat16 has float32's range, and bad steps are skipped all the same.
    model.compile(kmp.scaled("adam", loss_scale="dynamic", learning_rate=2e-3), loss)
    model.optimizer.build(model.trainable_variables)
    return model


class Checkpoint(keras.callbacks.Callback):
    """The state after the last epoch in one file, which process 0 writes and all load.

    With files of their own they might go on from different epochs. It has the seeds of dropout,
    too, which Keras's own files leave out.
    """

    def __init__(self, directory: pathlib.Path, rank: int):
        super().__init__()
        self.directory, self.rank = directory, rank

    def load(self, model: keras.Model) -> int:
        """Load the file, if there is one; the number of epochs that are behind it."""
        if not (files := sorted(self.directory.glob("epoch_*.npz"))):
            return 0
        with np.load(files[-1]) as arrays:
            for variable, name in zip(state_of(model), arrays, strict=True):
                variable.assign(arrays[name])
        return int(files[-1].stem.removeprefix("epoch_"))

    def on_epoch_end(self, epoch, logs=None):
        """Write the new file whole before the old one goes."""
        model = self.model  # on all processes: JAX brings the state out of the loop on all at once
        if self.rank == 0:
            old = list(self.directory.glob("epoch_*.npz"))
            unfinished = self.directory / "unfinished.npz"
            np.savez(unfinished, *map(keras.ops.convert_to_numpy, state_of(model)))
            unfinished.rename(self.directory / f"epoch_{epoch + 1:04d}.npz")
            for file in old:
                file.unlink()


def state_of(model: keras.Model) -> list:
    """The variables that training changes."""
    optimizer = model.optimizer.variables
    return [*model.trainable_variables, *model.non_trainable_variables, *optimizer]


def train(directory: pathlib.Path, epochs: int) -> None:
    """Join the others, load what there is, train on."""
    rank, processes = meet()
    directory.mkdir(parents=True, exist_ok=True)
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    model, (x, y) = build_and_compile(), own_data(rank, processes)
    checkpoint = Checkpoint(directory, rank)
    first = checkpoint.load(model)
    if first >= epochs:
        print(f"The {epochs} epochs are done: {directory}")
        return
    health = kmp.callbacks.GradientHealth(log_dir=directory / "logs")
    print(f"Process {rank} of {processes} begins with epoch {first + 1}.", flush=True)
    model.fit(
        x,
        y,
        BATCH_SIZE,
        initial_epoch=first,
        epochs=epochs,
        shuffle=False,  # a resumed run sees the batches in the same order
        callbacks=[health, kmp.callbacks.TerminateOnNaN(), checkpoint],
        verbose=0,
    )
    print(f"Process {rank} of {processes}: {health.verdict}", flush=True)


def alone() -> None:
    """Say that this process is the only one, at a port that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {"JOB_ADDRESSES": f"127.0.0.1:{port}", "NUM_PROCESSES": "1", "PROCESS_ID": "0"}
    os.environ.update({f"KERAS_DISTRIBUTION_{name}": value for name, value in values.items()})


def main() -> None:
    """Train, if this backend's `fit` takes several processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="logs/several_hosts", help="shared by all hosts")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--smoke", action="store_true", help="one process alone, two epochs")
    arguments = parser.parse_args()
    if BACKEND == "tensorflow" or (BACKEND == "torch" and not hasattr(keras.Model(), "ddp_model")):
        print(f"On {BACKEND} Keras {keras.__version__} has no fit of several processes.")
        return
    if arguments.smoke:
        alone()
    train(pathlib.Path(arguments.directory), 2 if arguments.smoke else arguments.epochs)
    if BACKEND == "torch":
        # Now and then CPython never ends its last garbage collection after DistributedDataParallel.
        os._exit(0)


if __name__ == "__main__":
    main()
