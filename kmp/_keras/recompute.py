"""Calls of a layer that are computed again for the gradient, so that what is inside is not kept.

Such a call runs twice, and the second run has to do what the first one did: with the same weights,
states, dropout masks and `training`. So the call is made a pure function of its input tensors. What
it assigns, and what it adds to the losses, is held back and done once, after the first run.
"""

import contextlib
import contextvars
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
from keras import StatelessScope, Variable, ops
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from kmp._keras import without_autocast
from kmp._keras.training import kept_buffers

Tensor: TypeAlias = Any
Tree: TypeAlias = Any  # nested lists, tuples and dicts of tensors

# What a call reads of the state that Keras keeps for each thread. The backward pass has left the
# scopes of the forward pass, and on CUDA PyTorch runs it in a thread of its own.
_STATE = ("autocast_scope", "current_call_ctx", "distribution", "name_scope_stack", "torch_device")

_plainly: contextvars.ContextVar[Callable[..., Tree] | None] = contextvars.ContextVar(
    "kmp_calls_plainly", default=None
)


def _call(path: str, tensors: Sequence[Tensor], function: Callable[[], Tree]) -> Tree:
    return function()


@contextlib.contextmanager
def calling_plainly(through: Callable[..., Tree] = _call) -> Iterator[None]:
    """Within, in this thread, no call is made a pure function: each layer sees its own tensors.

    Args:
        through: runs what would be computed again: called with the name of the block or segment,
            the tensors that it would keep, and a function without arguments, whose outputs it
            returns.
    """
    token = _plainly.set(through)
    try:
        yield
    finally:
        _plainly.reset(token)


def call_again(
    path: str,
    function: Callable[..., Tree],
    args: Any,
    kwargs: Any,
    layers: Sequence[Any],
    backend: Any,
    policy: Any = None,
) -> Tree:
    """Call a function once now, and once more for the gradient.

    Args:
        path: of the block, or the name of the segment.
        function: what is computed twice.
        args, kwargs: its arguments, with tensors in them.
        layers: all that it calls. The first owns the losses that none of them has added.
        backend: the `Backend`.
        policy: what inside is kept all the same, as `Backend.recompute` takes it.
    """
    if in_symbolic_scope():
        return function(*args, **kwargs)
    tensors, masks, fill = _taken_apart((args, kwargs))
    if (through := _plainly.get()) is not None:
        return through(path, tensors + masks, lambda: function(*args, **kwargs))
    pure = _PureCall(layers, function, (len(tensors), len(masks)), fill, backend)
    return pure.finish(*backend.recompute(pure, tensors + masks, pure.read_weights, policy))


class _PureCall:
    """One call of a layer, or of a part of a graph, as a pure function of tensors.

    It takes the tensors of the arguments, their masks, and after them what `read_weights` returned,
    if that was called. It returns a list with the outputs and the losses that the call adds, and a
    list of what has no gradient: the masks of the outputs, and the values of the variables that the
    call assigns.

    Args:
        layers: all that is called; the first owns the losses that none of them has added.
        plain_call: what is called.
        numbers: of tensors and of masks in the arguments.
        fill: makes the args and kwargs from the tensors and the masks.
        backend: the `Backend`.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        plain_call: Callable[..., Tree],
        numbers: tuple[int, int],
        fill: Callable[[Sequence[Tensor], Sequence[Tensor]], Tree],
        backend: Any,
    ):
        self._layers, self._plain_call = layers, plain_call
        self._numbers, self._fill = numbers, fill
        self._backend = backend
        self._weights: list[int] = []  # ids of variables whose values are handed to each run
        outer = global_state.get_global_attribute("stateless_scope")
        self._values = dict(outer.state_mapping) if outer else {}  # of variables, by their ids
        self._assigns_for_good = outer is None
        self._state = {name: copy.copy(global_state.get_global_attribute(name)) for name in _STATE}
        self._context = contextvars.copy_context()  # `kmp.autocast` is in it
        self._put_buffers_back = kept_buffers(layers)
        self._fill_outputs: Callable[..., Tree] | None = None  # after the first run
        self._assigned: list[Any] = []
        self._before: list[tuple[Any, Tensor]] = []  # the variables, and what they had been
        self._owners: list[Any] = []

    def __call__(self, *tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        if self._fill_outputs is None:
            return self._compute(tensors)
        put_buffers_back = kept_buffers(self._layers)
        self._put_buffers_back()
        try:
            return self._context.copy().run(self._compute_again, tensors)
        finally:
            put_buffers_back()

    def read_weights(self) -> list[Tensor]:
        """The values of the layers' trainable variables; each run has to be given them then."""
        found = {id(v): v for layer in self._layers for v in layer.trainable_variables}
        self._weights = list(found)
        with without_autocast():
            return [v.value for v in found.values()]

    def finish(self, outputs: Sequence[Tensor], others: Sequence[Tensor]) -> Tree:
        """After the first run: assign, add the losses, and return the outputs of the call.

        Args:
            outputs, others: what the first run returned.
        """
        variables, owners, fill = self._assigned, self._owners, self._fill_outputs
        assert fill is not None
        outputs, losses = _split(outputs, len(outputs) - len(owners))
        masks, values = _split(others, len(others) - len(variables))
        with without_autocast():
            before = self._backend.copied_values(variables)  # what the second run begins with
            self._before = list(zip(variables, before, strict=True))
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
        for owner, loss in zip(owners, losses, strict=True):
            owner.add_loss(loss)
        return fill(outputs, masks)

    def _compute(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        number, masks_number = self._numbers
        tensors, rest = _split(tensors, number)
        masks, weights = _split(rest, masks_number)
        args, kwargs = self._fill(tensors, masks)
        values = {**self._values, **dict(zip(self._weights, weights, strict=True))}
        with _Scope(values, self._backend if self._assigns_for_good else None) as scope:
            for pair in self._before:
                scope.add_update(pair)
            try:
                outputs = self._plain_call(*args, **kwargs)
            finally:  # PyTorch stops the second run once it has what it needs
                owners = _owners_of(scope.losses, self._layers)
        found, masks, fill = _taken_apart(outputs)
        if self._fill_outputs is None:
            self._fill_outputs, self._assigned, self._owners = fill, scope.assigned, owners
        assigned = [scope.get_current_value(v) for v in scope.assigned]
        return found + scope.losses, masks + assigned

    def _compute_again(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        before = {name: global_state.get_global_attribute(name) for name in _STATE}
        try:
            for name, value in self._state.items():
                global_state.set_global_attribute(name, copy.copy(value))
            return self._compute(tensors)
        finally:
            for name, value in before.items():
                global_state.set_global_attribute(name, value)


class _Scope(StatelessScope):
    """Holds back what is assigned within, and lists the variables in the order of assignment.

    Args:
        values: of variables by their ids; the others have the values that they have outside.
        backend: the `Backend` if the variables are assigned outside of any other scope. Then no
            gradient flows through what is assigned, and the gradient of a weight that has been
            assigned is that of its new value.
    """

    def __init__(self, values: dict[int, Tensor], backend: Any):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.state_mapping.update(values)
        self.assigned: list[Any] = []
        self._backend = backend

    def add_update(self, update: tuple[Any, Tensor]) -> None:
        variable, value = update
        if all(v is not variable for v in self.assigned):
            self.assigned.append(variable)
        if self._backend is not None:
            value = ops.stop_gradient(value)
            if variable.trainable:
                with without_autocast():
                    value = self._backend.in_place_of(variable.value, value)
        super().add_update((variable, value))


def _taken_apart(tree: Tree) -> tuple[list[Tensor], list[Tensor], Callable[..., Tree]]:
    """The tensors of a structure, their masks, and a function that puts others in their place."""
    leaves = keras.tree.flatten(tree)
    structure = keras.tree.map_structure(lambda _: None, tree)
    places = [i for i, x in enumerate(leaves) if ops.is_tensor(x) and not isinstance(x, Variable)]
    masks = {i: get_keras_mask(leaves[i]) for i in places}
    masked = [i for i, mask in masks.items() if mask is not None]
    others = [None if i in masks else x for i, x in enumerate(leaves)]

    def fill(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> Tree:
        filled = list(others)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        for place, mask in zip(masked, masks, strict=True):
            set_keras_mask(filled[place], mask)
        return keras.tree.pack_sequence_as(structure, filled)

    return [leaves[i] for i in places], [masks[i] for i in masked], fill


def _split(tensors: Sequence[Tensor], number: int) -> tuple[list[Tensor], list[Tensor]]:
    return list(tensors[:number]), list(tensors[number:])


def _owners_of(losses: Sequence[Tensor], layers: Sequence[Any]) -> list[Any]:
    """The layers that have added losses; each of them forgets that it has.

    Private: `_loss_ids`. The id of a tensor that is gone may become that of another loss.
    """
    owners = [next((x for x in layers if id(loss) in x._loss_ids), layers[0]) for loss in losses]
    for owner, loss in zip(owners, losses, strict=True):
        owner._loss_ids.discard(id(loss))
    return owners
