"""kmp: mixed precision for Keras 3 that never loses a run."""

import importlib
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING

__version__ = "0.1.0"


def _is_the_command() -> bool:
    """Whether this process is `kmp ...` or `python -m kmp ...`."""
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module to run
        return ("-m", "kmp") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return bool(sys.argv) and PurePath(sys.argv[0]).stem == "kmp"


if TYPE_CHECKING or not _is_the_command():
    from kmp._api import *  # noqa: F403
    from kmp._api import __all__ as __all__
else:  # `--help` answers without importing Keras

    def __getattr__(name):
        public = None if name.startswith("_") else importlib.import_module("kmp._api")
        if name not in getattr(public, "__all__", ()):  # or being imported at this moment
            raise AttributeError(f"module 'kmp' has no attribute {name!r}")
        return getattr(public, name)
