"""What stands for srun, scontrol, gcloud and kubectl in test_starting_hosts.py.

    python pretended_cluster.py PROGRAM ARGUMENTS...

Both hosts are this machine. HOSTS in the environment is a directory for what each process says
(`said_RANK`), its process id (`pid_RANK`), and the job that was put into the queue again
(`requeued`). As srun does with --kill-on-bad-exit, the end of one process ends the other.
"""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time


def srun(arguments):
    """Two tasks on two hosts."""
    while arguments[0].startswith("--"):
        arguments = arguments[1:]
    assert os.environ["SLURM_JOB_ID"] and os.environ["SLURM_JOB_NODELIST"]
    return start_two(
        arguments,
        lambda rank: {
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": "0",
            "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        },
    )


def scontrol(arguments):
    """The names of the hosts, one a line; or the job into the queue."""
    if arguments[:2] == ["show", "hostnames"]:
        print("\n".join(arguments[2].split(",")))
    else:
        assert arguments == ["requeue", os.environ["SLURM_JOB_ID"]]
        (HOSTS / "requeued").touch()
    return 0


def gcloud(arguments):
    """The shell of two hosts of a TPU pod, as JAX knows one in Kubernetes.

    What it asks a pod of virtual machines, it asks Google's metadata server for, which is not here.
    """
    assert arguments[:4] == ["compute", "tpus", "tpu-vm", "ssh"] and "--worker=all" in arguments
    (command,) = (x.removeprefix("--command=") for x in arguments if x.startswith("--command="))
    return start_two(
        ["bash", "-c", command],
        lambda rank: {
            "JAX_FORCE_TPU_INIT": "1",
            "TPU_WORKER_HOSTNAMES": "localhost,localhost",
            "TPU_WORKER_ID": str(rank),
            "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
            "MEGASCALE_NUM_SLICES": "1",
            "MEGASCALE_SLICE_ID": "0",
        },
    )


def kubectl(arguments):
    """The pods of kubernetes.yaml, given the repository and a port of this machine.

    All have one container, and process 0 is known by a name that nobody resolves here.
    """
    root, port = arguments
    text = pathlib.Path(root, "examples", "hosts", "kubernetes.yaml").read_text()
    values = dict(re.findall(r'- name: ([A-Z_]+)\n +value: "?([^"\n]+)"?', text))
    values["KERAS_BACKEND"] = os.environ["KERAS_BACKEND"]
    assert values["KERAS_DISTRIBUTION_JOB_ADDRESSES"].startswith("train-0.train:")
    values["KERAS_DISTRIBUTION_JOB_ADDRESSES"] = f"localhost:{port}"
    (index,) = re.findall(r"- name: (\w+)\n +valueFrom:", text)
    (command,) = re.findall(r"^ +command: \[(.*)\]$", text, re.MULTILINE)
    command = [x.replace("/shared/run", os.environ["RUN"]) for x in command.split(", ")]
    return start_two(command, lambda rank: {**values, index: str(rank)})


def start_two(command, variables):
    """Run a command twice, each with the `variables(rank)`; 0 if both end well."""
    processes = []
    for rank in range(2):
        with open(HOSTS / f"said_{rank}", "w") as said:
            processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **variables(rank)},
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        (HOSTS / f"pid_{rank}").write_text(str(processes[-1].pid))
    while None in (codes := [p.poll() for p in processes]) and not any(codes):
        time.sleep(0.02)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return int(any(p.wait() for p in processes))


HOSTS = pathlib.Path(os.environ.get("HOSTS", "."))

if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](sys.argv[2:]))
