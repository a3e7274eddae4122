"""Half precision for a stretch of code: a context and a decorator."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from kmp.precision.policy import get_policy
from kmp.precision.scope import Scope, current_scope
from kmp.precision.trees import half_dtype


class autocast:
    """Compute in half precision while the scope is open.

    Three things happen, and only these:

    - a layer under `Policy("autocast")` computes in the scope's compute dtype when it is called
      inside, in float32 when it is called outside;
    - a layer *built* inside takes the scope's policy for good, unless the global policy is
      `"autocast"`;
    - a decorated function gets its float arguments in the scope's compute dtype and returns in its
      output dtype.

    Raw operations, and layers with another policy, compute in the dtypes that they are given.

    Scopes nest; the inner one rules. `enabled=False` is as if no scope were open. An exception
    closes the scope. Each thread has scopes of its own and starts with none.

    What is decided, is decided when a layer is called. A compiled function is called once, when it
    is traced: `jax.jit`, `tf.function`, `fit`, `evaluate` and `predict` go on with the dtypes of
    their first call, whatever scope is open later. Open the scope inside such a function, or trace
    another one.

    Args:
        policy: what `kmp.get_policy` takes; `"mixed_"` + `kmp.half_dtype()` if left out. Only its
            compute and output dtypes matter to layers that exist already.
        enabled: bool.

    Raises:
        ValueError: if `policy` describes none, or is `"autocast"` itself.

    Example:

    >>> dense = keras.layers.Dense(2, dtype=kmp.Policy("autocast"))
    >>> with autocast("mixed_bfloat16"):
    ...     hidden = dense(np.ones((1, 3), "float32"))
    >>> str(keras.backend.standardize_dtype(hidden.dtype)), dense.compute_dtype
    ('bfloat16', 'float32')
    >>> @autocast("p=f32,c=bf16,o=f32")
    ... def double(x):
    ...     return str(x.dtype), x + x
    >>> dtype, y = double(np.ones(2, "float32"))
    >>> dtype, str(y.dtype)
    ('bfloat16', 'float32')

    Source: `torch.autocast`, whose scope decides per operation; here it decides per layer.
    """

    def __new__(cls, policy: Any = None, enabled: bool = True) -> Any:
        if callable(policy) and not _is_dtype(policy):  # @autocast without arguments
            return cls(enabled=enabled)(policy)
        return super().__new__(cls)

    def __init__(self, policy: Any = None, enabled: bool = True):
        self.policy = get_policy(f"mixed_{half_dtype()}" if policy is None else policy)
        self.enabled = bool(enabled)
        if self.policy.adapts:
            raise ValueError(
                'The policy of a scope says which dtype to compute in. Received: "autocast", the '
                "policy of the layers that follow a scope. Write for example "
                'kmp.autocast("mixed_bfloat16").'
            )

    def __enter__(self) -> "autocast":
        outer, before = current_scope.get(), keras.config.dtype_policy()
        outside = outer.policy_outside if outer else before
        current_scope.set(Scope(self.policy, self.enabled, before, outside, outer))
        if not getattr(outside, "adapts", False):
            keras.config.set_dtype_policy(self.policy if self.enabled else outside)
        return self

    def __exit__(self, *exception: Any) -> None:
        scope: Any = current_scope.get()
        current_scope.set(scope.parent)
        keras.config.set_dtype_policy(scope.policy_before)

    def __call__(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def cast(*args, **kwargs):
            with self:
                if not self.enabled:
                    return function(*args, **kwargs)
                args, kwargs = self.policy.cast_to_compute((args, kwargs))
                return self.policy.cast_to_output(function(*args, **kwargs))

        return cast


def _is_dtype(x: Any) -> bool:
    try:
        keras.backend.standardize_dtype(x)
    except (ValueError, TypeError):
        return False
    return True
