"""The version of kmp; read by the packaging too, so it imports nothing."""

__version__ = "0.1.0"
