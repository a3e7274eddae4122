"""Which tensors are in which precision: policies, casts, float formats, autocast scopes."""

from kmp.precision.autocasting import autocast
from kmp.precision.float_formats import Format, formats
from kmp.precision.policy import Policy, get_policy, set_policy
from kmp.precision.trees import cast_to_full, cast_to_half, half_dtype

__all__ = [
    "Format",
    "Policy",
    "autocast",
    "cast_to_full",
    "cast_to_half",
    "formats",
    "get_policy",
    "half_dtype",
    "set_policy",
]
