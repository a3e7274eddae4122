"""What a device holds of each variable: all of it, or as `jax/sharding.py` says."""

from collections.abc import Callable, Sequence
from typing import Any

from kmp._backend.types import Tensor


class Sharding:
    """What a device holds of each variable: the whole. `keras.distribution` splits some on JAX.

    Variables are named by their place among those that the optimizer was built with.
    """

    APART = "apart"  # what the devices have returned `apart`
    num_devices = 1  # how many hold shards

    def shard_shapes(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """The shape of the shard on one device of each variable, given the shapes of them all."""
        return list(shapes)

    def constrain(self, place: int, x: Tensor) -> Tensor:
        """A tensor of a variable's shape, lying on the devices as the variable does."""
        return x

    def each(
        self, function: Callable[..., Any], of: Sequence[int | str | None], apart: bool = False
    ) -> Callable[..., Any]:
        """A function for `per_target` that each device calls with the shards that it holds.

        Args:
            function: what each device calls.
            of: of each tensor, the place of the variable that it lies as; None if all of it is
                everywhere; or `APART`.
            apart: whether each device returns a part of its own, one after the other in the first
                axis. Otherwise all return the same.
        """
        return function

    def eagerly(self) -> "Sharding":
        """Of whole variables: an eager step would trace each time what it does with shards."""
        return self

    def replicate(self, x: Tensor) -> Tensor:
        """A tensor that is whole on every device, also where an eager step has it in shards."""
        return x

    def reduced(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Sum and maximum over the shards, of `[num_variables, ...]`. Inside `each`."""
        return table, table


UNSHARDED = Sharding()
