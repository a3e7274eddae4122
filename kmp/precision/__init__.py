"""Which numbers go where: policies, casts, float formats, autocast scopes."""

from kmp.precision.autocasting import autocast
from kmp.precision.casts import cast_to_full, cast_to_half, half_dtype
from kmp.precision.float_formats import Format, formats
from kmp.precision.policy import Policy, get_policy, set_policy

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
