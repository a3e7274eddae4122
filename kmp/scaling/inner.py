"""What the loss-scaling wrapper does not decide itself, the inner optimizer answers."""

import contextlib
from typing import Any

from keras import ops

# What Keras's base class would answer for itself although the inner optimizer decides it.
_INNER_SETTINGS = (
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "gradient_accumulation_steps",
)


class ForwardsToInner:
    """Mixin of an optimizer with an `inner_optimizer`: unknown attributes and settings are its.

    Keras's LossScaleOptimizer answers `clipnorm` with None and `use_ema` with False whatever the
    inner optimizer does, and ignores `exclude_from_weight_decay`.
    """

    inner_optimizer: Any

    def _forward_settings(self) -> None:
        for setting in _INNER_SETTINGS:
            self.__dict__.pop(setting, None)  # from here on __getattr__ answers

    @contextlib.contextmanager
    def _settings_of_a_bare_base(self):
        """Within, Keras's `build` makes no averages and accumulators: they are the inner's."""
        self.__dict__.update(use_ema=False, gradient_accumulation_steps=None)
        try:
            yield
        finally:
            self._forward_settings()

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("inner_optimizer")
        if inner is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _INNER_SETTINGS and "inner_optimizer" in self.__dict__:
            setattr(self.inner_optimizer, name, value)
        else:
            super().__setattr__(name, value)

    def finalize_variable_values(self, var_list: list[Any]) -> None:
        """At the end of `fit`: write the moving averages of the weights, if any, into them."""
        self.inner_optimizer.finalize_variable_values(var_list)
        if self.inner_optimizer.use_ema:
            # On JAX both would share one buffer, which the next `fit` cannot donate twice.
            for average in self.inner_optimizer._model_variables_moving_average:
                if average is not None:
                    average.assign(ops.copy(average.value))

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Keep variables from weight decay; see `keras.optimizers.Optimizer`."""
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)
