"""examples/hosts/: each way to start two hosts, and to start them again when one was lost.

There is no cluster here: pretended_cluster.py stands for its programs and sets its variables. But
torchrun is PyTorch's own, which starts two processes on one host.
"""

import contextlib
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import older
import pytest
from conftest import BACKEND
from processes import environment

pytestmark = [
    pytest.mark.slow,
    *([older.torch_fit_on_processes] if BACKEND == "torch" else [pytest.mark.only("jax")]),
]

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
STARTED_BY = {
    "jax": ["slurm_jax.sh", "tpu_pod.sh", "kubernetes.yaml"],
    "torch": ["slurm_torch.sh", "kubernetes.yaml", "torchrun"],
}.get(BACKEND, [])
SCRIPT = ROOT / "examples" / "several_hosts.py"
# What torchrun starts in the place of Python.
OF_TORCHRUN = """\
echo $$ > "$HOSTS/pid_$RANK"
exec python "$@" > "$HOSTS/said_$RANK" 2>&1"""
TIMEOUT = 300  # seconds; alone on two cores it takes 20
SLURM_PORTS = 2**16 - 2**12  # JAX takes one of the 4,096 from here on, by the number of the job


class Cluster:
    """Two hosts, whose shared directory this is."""

    def __init__(self, directory):
        self.directory, self.run = directory, directory / "run"
        programs = directory / "bin"
        programs.mkdir(parents=True)
        commands = {"python": sys.executable}
        for name in ("srun", "scontrol", "gcloud"):
            commands[name] = f"{sys.executable} {HERE}/pretended_cluster.py {name}"
        commands["torchrun"] = f"{sys.executable} -m torch.distributed.run"
        programs_of = {name: f'exec {command} "$@"' for name, command in commands.items()}
        programs_of["of_torchrun"] = OF_TORCHRUN
        for name, code in programs_of.items():
            (programs / name).write_text(f"#!/bin/sh\n{code}\n")
            (programs / name).chmod(0o755)
        (directory / "kmp").symlink_to(ROOT)  # tpu_pod.sh goes there

    def start(self, file):
        """The process of a script of examples/hosts/, or what stands for Kubernetes."""
        port = free_port_for_slurm()
        variables = environment(
            needs=["sklearn"],
            PATH=f"{self.directory}/bin:{os.environ['PATH']}",
            HOSTS=str(self.directory),
            RUN=str(self.run),
            JAX_PLATFORMS="cpu",
            JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo",
            JAX_COORDINATOR_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
            SLURM_JOB_ID=str(2**12 * 7 + port - SLURM_PORTS),
            SLURM_JOB_NODELIST="localhost,elsewhere",
            PORT=str(port),
            TPU="pod",
            ZONE="zone",
        )
        if "slurm" in file:
            del variables["JAX_COORDINATOR_PORT"]  # to be found by the number of the job
        command = ["bash", ROOT / "examples" / "hosts" / file]
        if file == "kubernetes.yaml":
            command = [sys.executable, HERE / "pretended_cluster.py", "kubectl", ROOT, str(port)]
        if file == "torchrun":
            (line,) = re.findall(r"^ +(torchrun .*\.py) ", SCRIPT.read_text(), re.MULTILINE)
            command = [*line.split(), "--directory", self.run]
            variables["PYTHON_EXEC"] = f"{self.directory}/bin/of_torchrun"
            command[0] = f"{self.directory}/bin/torchrun"
        directory = self.directory if file == "tpu_pod.sh" else ROOT
        return subprocess.Popen(command, env=variables, cwd=directory, start_new_session=True)

    def said(self):
        return [(self.directory / f"said_{rank}").read_text()[-3000:] for rank in range(2)]

    def saved(self):
        """The newest checkpoint, if there is one."""
        return max(self.run.glob("epoch_*.npz"), default=None)


def free_port_for_slurm():
    while True:
        port = random.randrange(SLURM_PORTS, 2**16)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def wait_for(condition, process):
    deadline = time.monotonic() + TIMEOUT
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def run_to_its_end(cluster, file):
    process = cluster.start(file)
    try:
        wait_for(lambda: False, process)
        assert process.poll() == 0 and cluster.saved(), cluster.said()
    finally:
        end(cluster, process)


def end(cluster, process):
    for path in cluster.directory.glob("pid_*"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(path.read_text()), signal.SIGKILL)
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("uninterrupted") / "cluster")
    run_to_its_end(cluster, STARTED_BY[0])
    return cluster


@pytest.mark.parametrize("file", STARTED_BY)
def test_the_same_command_goes_on_where_a_host_was_lost(uninterrupted, tmp_path, file):
    cluster = Cluster(tmp_path / "cluster")
    process = cluster.start(file)
    try:
        wait_for(cluster.saved, process)
        assert process.poll() is None, cluster.said()
        os.killpg(int((cluster.directory / "pid_1").read_text()), signal.SIGKILL)
        wait_for(lambda: False, process)
    finally:
        end(cluster, process)
    requeued = (cluster.directory / "requeued").exists()
    assert requeued == ("slurm" in file) and (process.returncode == 0) == requeued
    assert cluster.saved().name < uninterrupted.saved().name
    run_to_its_end(cluster, file)
    for rank, said in enumerate(cluster.said()):
        (epoch,) = re.findall(rf"Process {rank} of 2 begins with epoch (\d+)\.", said)
        assert int(epoch) > 1
        assert f"Process {rank} of 2: HEALTHY" in said
    with np.load(uninterrupted.saved()) as expected, np.load(cluster.saved()) as received:
        assert expected.keys() == received.keys() and len(expected) > 15
        for name in expected:
            np.testing.assert_array_equal(received[name], expected[name], err_msg=name)
