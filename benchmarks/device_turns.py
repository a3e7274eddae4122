"""Benchmarks that run at the same time share a device: all may compile, one is timed.

with device_turns.compiling():
    ...  # as many processes as like; XLA's autotuning uses the device
with device_turns.timing():
    ...  # one process, while no other compiles or is timed
"""

import contextlib
import fcntl
import pathlib
import tempfile
from collections.abc import Iterator

_LOCK = pathlib.Path(tempfile.gettempdir()) / "kmp-benchmarks.lock"


def compiling() -> contextlib.AbstractContextManager[None]:
    """Wait until no process is timed; none is until this ends."""
    return _hold(fcntl.LOCK_SH)


def timing() -> contextlib.AbstractContextManager[None]:
    """Wait until no process compiles or is timed; none does until this ends."""
    return _hold(fcntl.LOCK_EX)


@contextlib.contextmanager
def _hold(kind: int) -> Iterator[None]:
    with _LOCK.open("a") as file:
        fcntl.flock(file, kind)
        yield  # closing the file gives the lock back
