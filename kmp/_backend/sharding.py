"""How variables lie on devices. On JAX `keras.distribution` may split them."""

from collections.abc import Callable, Sequence
from typing import Any

from kmp._backend.types import Tensor


class Sharding:
    """Every device holds all of every variable. `jax/sharding.py` has a subclass for split ones.

    Variables are named by their place among those that the optimizer was built with.

    Attributes:
        num_devices: how many devices hold shards.
        APART: stands for the layout of a tensor that the devices have returned `apart`.
    """

    APART = "apart"
    num_devices = 1

    def shard_shapes(self, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the shape of each variable's shard on one device, given their whole shapes."""
        return list(shapes)

    def constrain(self, place: int, x: Tensor) -> Tensor:
        """Lay a tensor of a variable's shape out on the devices as the variable is."""
        return x

    def each(
        self, function: Callable[..., Any], of: Sequence[int | str | None], apart: bool = False
    ) -> Callable[..., Any]:
        """Make each device call a function for `per_target` with the shards that it holds.

        Args:
            function: takes the target and tensors.
            of: the layout of each tensor: the place of the variable that it is laid out like; None
                if every device has all of it; or `APART`.
            apart: whether each device returns something else. The results are concatenated along
                their first axis. Otherwise all devices must return the same.

        Returns:
            A function that takes the target and whole tensors.
        """
        return function

    def eagerly(self) -> "Sharding":
        """Return an unsharded one for eager steps; they would trace sharded code at every step."""
        return self

    def replicate(self, x: Tensor) -> Tensor:
        """Bring all of a tensor to every device. Only eager steps of split variables need that."""
        return x

    def reduced(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Sum a table over the shards of each variable, and take its maximum. Only within `each`.

        Args:
            table: [num_variables, ...], from one device.

        Returns:
            The sums and the maxima, both of the table's shape.
        """
        return table, table


UNSHARDED = Sharding()
