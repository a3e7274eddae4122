"""How a step runs on one device, and what it holds there: all of it.

`tensorflow/distribute.py` replaces `OneReplica` on several devices, and `jax/pieces.py` `Pieces`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from kmp._backend.types import Gradient, Tensor, Variable


class OneReplica:
    """How the parts of a step run where its gradients are already the sum over all devices.

    Args:
        update_if: the backend's way to update variables under a condition; see the method.
        knows_loss: whether it would know of a loss that is not finite, wherever that is computed.
            If not, nothing but the gradients may move the scale: all processes have the same.
    """

    def __init__(
        self,
        update_if: Callable[[Tensor, Any, list[Gradient], list[Variable]], None],
        knows_loss: bool = True,
    ):
        self._update_if, self.knows_loss = update_if, knows_loss

    def on_each(self, function: Callable, *args: Any) -> Any:
        """Call a function of gradients on each replica."""
        return function(*args)

    def local(self, gradients: list[Gradient]) -> list[Gradient]:
        """The gradients of the first replica in this process."""
        return gradients

    def loss_nonfinite(self, variable: Variable) -> Tensor:
        """float32[], above 0 if the loss is known not to be finite, as `note_loss` has noted."""
        return ops.convert_to_tensor(variable)

    def update_if(
        self, keep: Tensor, inner: Any, gradients: list[Gradient], variables: list[Variable]
    ) -> None:
        """Let a Keras optimizer update the variables on each replica, or leave all as it is.

        Args:
            keep: bool[], whether the update happens.
            inner: the optimizer. Its own variables stay too unless `keep`.
            gradients: what it is given; from `on_each`.
            variables: the variables to update.
        """
        self._update_if(keep, inner, gradients, variables)


class Pieces:
    """What a device holds of each variable: the whole. `keras.distribution` splits some on JAX.

    Variables are named by their place among those that the optimizer was built with.
    """

    APART = "apart"  # what the devices have returned `apart`
    number = 1  # how many devices hold pieces

    def shape(self, place: int, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the piece on one device of a variable of this shape."""
        return tuple(shape)

    def laid_out(self, place: int, x: Tensor) -> Tensor:
        """A tensor of a variable's shape, lying on the devices as the variable does."""
        return x

    def each(
        self, function: Callable[..., Any], of: Sequence[int | str | None], apart: bool = False
    ) -> Callable[..., Any]:
        """A function for `per_target` that each device calls with the pieces that it holds.

        Args:
            function: what each device calls.
            of: of each tensor, the place of the variable that it lies as; None if all of it is
                everywhere; or `APART`.
            apart: whether each device returns a part of its own, one after the other in the first
                axis. Otherwise all return the same.
        """
        return function

    def eagerly(self) -> "Pieces":
        """Of whole variables: an eager step would trace each time what it does with pieces."""
        return self

    def everywhere(self, x: Tensor) -> Tensor:
        """A tensor that is whole on every device, also where an eager step has it in pieces."""
        return x

    def reduced(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Sum and maximum over the pieces, of `[num_variables, ...]`. Inside `each`."""
        return table, table


WHOLE = Pieces()
