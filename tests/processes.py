"""Python programs in processes of their own, none of which outlives its test."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

TESTS = pathlib.Path(__file__).parent
OPTIONAL = ("matplotlib", "sklearn", "tensorflow")
DEVICES = "--xla_force_host_platform_device_count=8"  # of the tests' own processes alone


def environment(*, needs=(), **changes):
    """This process's environment, from which the programs import what the tests import.

    What Keras imports where it is installed is absent, unless they need it: scikit-learn and
    matplotlib, which take a second, and TensorFlow on other backends.
    """
    needs = {*needs, changes.get("KERAS_BACKEND", os.environ["KERAS_BACKEND"])}
    absent = [TESTS / "absent" / name for name in OPTIONAL if name not in needs]
    path = os.pathsep.join(map(str, [TESTS.parent, TESTS, *absent]))
    inherited = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "TF_CONFIG")}
    if flags := os.environ["XLA_FLAGS"].replace(DEVICES, "").strip():
        inherited["XLA_FLAGS"] = flags
    return {**inherited, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2", **changes}


@contextlib.contextmanager
def started(commands, environments, directory):
    """Start a Python program for each list of arguments; kill what still runs at the end.

    Yields the processes. What each says goes to `directory/process_<i>.log`.
    """
    processes = []
    try:
        for i, (command, variables) in enumerate(zip(commands, environments, strict=True)):
            with open(directory / f"process_{i}.log", "w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *map(str, command)],
                        env=variables,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def run_all(commands, environments, directory, timeout, expected=None):
    """Run the programs side by side to their end; fail with their words if one fails or hangs.

    `expected` are their exit codes, 0 if left out; -9 is SIGKILL.
    """
    expected = expected or [0] * len(commands)
    deadline = time.monotonic() + timeout
    with started(commands, environments, directory) as processes:
        codes = [p.poll() for p in processes]
        while None in codes and time.monotonic() < deadline:
            if any(c not in (None, wanted) for c, wanted in zip(codes, expected, strict=True)):
                break  # the others would wait for the one that failed
            time.sleep(0.05)
            codes = [p.poll() for p in processes]
    said = "\n".join(
        f"-- process {i}: {'still running' if code is None else f'exit code {code}'}\n"
        + (directory / f"process_{i}.log").read_text()[-3000:]
        for i, code in enumerate(codes)
    )
    assert codes == expected, said


def free_ports(number):
    """Ports of the loopback address on which nobody listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
