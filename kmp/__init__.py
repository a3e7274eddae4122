"""kmp: mixed precision for Keras 3 that never loses a run."""

import importlib
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def _is_the_command() -> bool:
    """Whether this process is `kmp ...` or `python -m kmp ...`."""
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module to run
        return ("-m", "kmp") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return bool(sys.argv) and PurePath(sys.argv[0]).stem == "kmp"


# `kmp --help` runs without importing Keras; other commands reload this module to get the names.
if TYPE_CHECKING or "__all__" in globals() or not _is_the_command():
    globals().pop("__getattr__", None)
    from kmp import callbacks, debug, layers
    from kmp._common import PrecisionWarning
    from kmp.callbacks import protect
    from kmp.health import GradientReport
    from kmp.models import (
        audit,
        freeze_observers,
        quantize_aware,
        recompute,
        to_int8,
        to_mixed_precision,
    )
    from kmp.precision import (
        Policy,
        autocast,
        cast_to_full,
        cast_to_half,
        formats,
        get_policy,
        half_dtype,
        set_policy,
    )
    from kmp.scaling import (
        AmaxLossScale,
        DynamicLossScale,
        LossScale,
        LossScaleOptimizer,
        NoOpLossScale,
        ScaleState,
        SkipSpikes,
        StaticLossScale,
        all_finite,
        max_abs,
        scaled,
        select_tree,
    )
else:  # in the `kmp` command, or a subprocess of it: import the names at first use

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'kmp' has no attribute {name!r}")
        return getattr(importlib.reload(sys.modules[__name__]), name)


__all__ = [
    "AmaxLossScale",
    "DynamicLossScale",
    "GradientReport",
    "LossScale",
    "LossScaleOptimizer",
    "NoOpLossScale",
    "Policy",
    "PrecisionWarning",
    "ScaleState",
    "SkipSpikes",
    "StaticLossScale",
    "all_finite",
    "audit",
    "autocast",
    "callbacks",
    "cast_to_full",
    "cast_to_half",
    "debug",
    "formats",
    "freeze_observers",
    "get_policy",
    "half_dtype",
    "layers",
    "max_abs",
    "protect",
    "quantize_aware",
    "recompute",
    "scaled",
    "select_tree",
    "set_policy",
    "to_int8",
    "to_mixed_precision",
]
