"""`kmp.autocast`: half precision inside a `with` block or a decorated function."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from kmp.precision.policy import Scope, current_scope, get_policy
from kmp.precision.trees import half_dtype


class autocast:
    """Compute in half precision while the scope is open.

    It has three effects:

    - a layer with `Policy("autocast")` computes in the scope's compute dtype when called inside
      the scope, and in float32 when called outside;
    - a layer *created* inside takes the scope's policy and keeps it, unless the global policy is
      `"autocast"`;
    - a decorated function receives its float arguments in the scope's compute dtype, and its
      result is cast to the scope's output dtype.

    Raw operations, and layers with any other policy, are not affected.

    Scopes nest, and the innermost one applies. An exception closes the scope. Scopes belong to one
    thread; a new thread starts without one.

    A layer looks for the scope when Python calls it, and in compiled code that is while tracing:
    `jax.jit`, `tf.function`, `fit`, `evaluate` and `predict` keep the dtypes of their first call,
    whatever scope is open later. Open the scope inside the compiled function, or trace a new one.

    Args:
        policy: anything that `kmp.get_policy` takes; defaults to `"mixed_"` + `kmp.half_dtype()`.
            Only its compute and output dtypes matter to existing layers.
        enabled: bool; with False it is as if no scope were open.

    Raises:
        ValueError: if `policy` describes no policy, or is `"autocast"` itself.

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

    Source: `torch.autocast`, which chooses dtypes per operation; this one does so per layer.
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
                "policy of layers that take their dtype from a scope. Write for example "
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

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def cast(*args: Any, **kwargs: Any) -> Any:
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
