"""kmp: mixed precision for Keras 3 that never loses a run."""

from kmp._version import __version__

__all__ = ["__version__"]
