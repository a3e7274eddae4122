"""The `kmp.autocast` scopes that are open, for the policy that follows them."""

import contextvars
from typing import Any, NamedTuple


class Scope(NamedTuple):
    """An open `kmp.autocast` scope."""

    policy: Any  # Policy
    enabled: bool
    policy_before: Any  # the global policy when this scope was opened
    policy_outside: Any  # the global policy when the outermost scope was opened
    parent: Any  # Scope or None


# Each thread starts without a scope, as it starts with a global policy of its own in Keras.
current_scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar(
    "kmp_autocast_scope", default=None
)
