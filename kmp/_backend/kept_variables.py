"""The values of variables, kept aside and put back."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from keras import Variable as KerasVariable
from keras import ops

from kmp._backend import backend
from kmp._backend.types import Tensor, Variable


class KeptVariables:
    """The values of variables, to go back to.

    A value is copied on its device, for each replica that has its own, or to the host. Private:
    `keras.Variable._value`, because `value` would initialize a variable that is not yet, and
    `keras.Variable._direct_assign`, through which every assignment passes.

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
        self._kept: dict[int, tuple[Variable, Callable[[], None]]] = {}
        self._assign = KerasVariable._direct_assign
        self._keep(variables)

    def restore(self) -> None:
        """Put all values back."""
        noted, KerasVariable._direct_assign = KerasVariable._direct_assign, self._assign
        try:
            for _, put_back in self._kept.values():
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
        copy = _copied_to_host if self._on_host else backend.preserved
        new = {id(v): v for v in variables if getattr(v, "_value", None) is not None}
        for key in new.keys() - self._kept.keys():
            self._kept[key] = (new[key], copy(new[key]))


def _copied_to_host(variable: Variable) -> Callable[[], None]:
    # A copy: the next step may write into the buffer that NumPy looks at.
    return functools.partial(variable.assign, np.array(ops.convert_to_numpy(variable)))
