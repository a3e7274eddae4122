"""The values of variables, kept aside and put back."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from keras import Variable as KerasVariable
from keras import ops

from kmp._backend import backend
from kmp._backend.types import Tensor, Variable


class KeptVariables:
    """The values of variables, to go back to.

    A value is copied on its device, for each replica that has its own, or to the host. Private:
    `keras.Variable._value`, because `value` would initialize a variable that is not initialized
    yet, and `keras.Variable._direct_assign`, through which every assignment passes.

    Args:
        variables: an iterable of `keras.Variable`; each is kept once.
        on_host: bool, whether to copy to the host.

    Example:

    >>> variable = keras.Variable([1.0, 2.0])
    >>> kept = KeptVariables([variable])
    >>> _ = variable.assign([0.0, 0.0])
    >>> kept.restore()
    >>> variable.numpy().tolist()
    [1.0, 2.0]
    """

    def __init__(self, variables: Iterable[Variable], on_host: bool = False):
        self._on_host = on_host
        self._kept: dict[int, Variable] = {}  # by their ids, which stay theirs while they are here
        self._put_back: list[Callable[[], None]] = []
        self._assign = KerasVariable._direct_assign
        self._keep(variables)

    def restore(self) -> None:
        """Put all values back."""
        noted, KerasVariable._direct_assign = KerasVariable._direct_assign, self._assign
        try:
            for put_back in self._put_back:
                put_back()
        finally:
            KerasVariable._direct_assign = noted

    @contextlib.contextmanager
    def with_assigned(self) -> Iterator[None]:
        """Within, also keep each other variable that this thread assigns to, before it does."""
        assign, thread = self._assign, threading.get_ident()

        def noted_assign(variable: Variable, value: Tensor) -> Any:
            if threading.get_ident() == thread:
                self._keep([variable])
            return assign(variable, value)

        KerasVariable._direct_assign = noted_assign
        try:
            yield
        finally:
            KerasVariable._direct_assign = assign

    def _keep(self, variables: Iterable[Variable]) -> None:
        copied = _copied_to_host if self._on_host else backend.preserved
        found = {id(v): v for v in variables if getattr(v, "_value", None) is not None}
        new = {key: v for key, v in found.items() if key not in self._kept}
        if new:
            self._put_back.append(copied(list(new.values())))
            self._kept.update(new)


def _copied_to_host(variables: Sequence[Variable]) -> Callable[[], None]:
    # Copies: the next step may write into the buffers that NumPy looks at.
    kept = [(v, np.array(ops.convert_to_numpy(v))) for v in variables]

    def restore() -> None:
        for variable, value in kept:
            variable.assign(value)

    return restore
