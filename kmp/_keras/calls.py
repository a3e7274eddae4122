"""Record the calls of a model's layers from outside, without changing what they compute.

`recording` replaces two methods of Keras for a while: `Layer.__call__`, which gets the arguments as
the caller passed them, and `Operation.__call__`, which gets the inputs of a layer cast to its
compute dtype, and which Functional models call for their operations. Keras has no other `__call__`
for layers: subclassed, nested and shared layers all pass through these two.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
from keras import Layer, Operation

from kmp._keras import is_preprocessing, path_of
from kmp._keras.recompute import calling_plainly

Tree: TypeAlias = Any  # nested lists, tuples and dicts of tensors


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a layer, or of an operation of a Functional model.

    Attributes:
        layer: the layer or operation.
        parent: the call that made this one; None for the outermost.
        key: str, its place in the tree of calls, the same each time the model runs.
        passed: args and kwargs as the caller passed them.
        received: args and kwargs as `call` got them, cast to the compute dtype; None if the layer
            raised before.
        outputs: what `call` returned.
        span: the times at which it began and ended.
        children: the calls that it made.
        dtype: str, what it computed in; for an operation, the dtype of its first float output.
    """

    layer: Any
    parent: "Call | None"
    key: str
    passed: Tree
    received: Tree = None
    outputs: Tree = None
    span: list[int] = dataclasses.field(default_factory=list)
    children: list["Call"] = dataclasses.field(default_factory=list)
    dtype: str = ""

    @property
    def path(self) -> str:
        """The layer's path; with a number if its parent called that name before."""
        path = path_of(self.layer)
        _, _, repeat = self.key.rpartition("#")
        return path if repeat == "1" else f"{path} (call {repeat})"


class Kept(NamedTuple):
    """What one block or segment that is computed again would keep for the gradient.

    Attributes:
        path: of the block, or the name of the segment.
        inputs: the tensors that it keeps: its inputs and their masks.
        outputs: what it returns.
        span: the times at which it began and ended.
    """

    path: str
    inputs: Sequence[Any]
    outputs: Tree
    span: tuple[int, int]


class Recorder:
    """Holds the calls that `recording` sees.

    Args:
        watch: called as `watch(time, call, role, tree)` with the inputs (role `"input"`) and
            outputs (`"output"`) of each watched call; what it returns takes their place.
        keys: `Call.key` of the calls that are watched; None for all of them.

    Attributes:
        calls: list of `Call`, in the order in which they began.
        kept: list of `Kept`, of what `kmp.recompute` has chosen, in the order in which it ran.
        clock: int, the time: how often something was seen.
    """

    def __init__(
        self,
        watch: Callable[[int, Call, str, Tree], Tree] | None = None,
        keys: Collection[str] | None = None,
    ):
        self.calls: list[Call] = []
        self.kept: list[Kept] = []
        self.clock = 0
        self._watch, self._keys = watch, keys
        self._stack: list[Call] = []
        self._counts: dict[tuple[int, str], int] = {}
        self._thread = threading.get_ident()

    def _tick(self) -> int:
        """Advance the clock and return the time."""
        self.clock += 1
        return self.clock

    def begin(self, layer: Any, passed: Tree) -> None:
        """Note that a call begins, inside those that are under way."""
        parent = self._stack[-1] if self._stack else None
        place = (id(parent), layer.name)  # layers of a subclassed model may share a name
        self._counts[place] = self._counts.get(place, 0) + 1
        above = parent.key if parent else ""
        key = f"{above}/{layer.name}#{self._counts[place]}"
        call = Call(layer, parent, key, passed, span=[self._tick()])
        if parent is not None:
            parent.children.append(call)
        self._stack.append(call)
        self.calls.append(call)

    def end(self) -> None:
        """Note that the innermost call ends."""
        self._stack.pop().span.append(self._tick())

    @property
    def innermost(self) -> Call | None:
        """The innermost call that is under way.

        None outside of calls, and in other threads, which call models of their own.
        """
        return self._stack[-1] if self._stack and self.is_on() else None

    def raised(self) -> Call | None:
        """The innermost call that raised, where the recorded code did."""
        return next((call for call in reversed(self.calls) if call.outputs is None), None)

    def is_on(self) -> bool:
        """Whether this is the recorded thread: other threads call models of their own."""
        return threading.get_ident() == self._thread

    def awaits(self, layer: Any) -> bool:
        """Whether `layer` is the innermost call, on its way from `__call__` to `call`."""
        return bool(self._stack) and self._stack[-1].layer is layer and not self._stack[-1].received

    def run(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Let the innermost call compute, and return its outputs."""
        call = self._stack[-1]
        args, kwargs = call.received = self._seen(call, "input", (args, kwargs))
        call.outputs = self._seen(call, "output", function(call.layer, *args, **kwargs))
        call.dtype = getattr(call.layer, "compute_dtype", None) or _dtype_of(call.outputs)
        return call.outputs

    def keep(self, path: str, inputs: Sequence[Any], function: Callable[[], Tree]) -> Tree:
        """Call what would be computed again, and return its outputs."""
        if not self.is_on():
            return function()
        start = self._tick()
        outputs = function()
        self.kept.append(Kept(path, inputs, outputs, (start, self._tick())))
        return outputs

    def _seen(self, call: Call, role: str, tree: Tree) -> Tree:
        time = self._tick()
        if self._watch is None or (self._keys is not None and call.key not in self._keys):
            return tree
        return self._watch(time, call, role, tree)


class SymbolicRecorder(Recorder):
    """Records symbolic calls, also of preprocessing layers that can only compute with numbers.

    On JAX and PyTorch, layers that hash or look up do so in TensorFlow. Such a layer returns zeros
    instead.
    """

    def run(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Let the innermost call compute, and return its outputs."""
        call = self._stack[-1]
        try:
            return super().run(function, args, kwargs)
        except Exception:
            if not is_preprocessing(call.layer):
                raise
        spec = keras.tree.map_structure(_spec_of, call.received)
        specs = call.layer.compute_output_spec(*spec[0], **spec[1])
        call.outputs = keras.tree.map_structure(_zeros, specs)
        return call.outputs


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Within, `recorder` sees every call of a layer in its thread.

    Example:

    >>> recorder = Recorder()
    >>> with recording(recorder):
    ...     y = keras.layers.Dense(2, name="dense")(np.ones((1, 3)))
    >>> [(call.path, call.dtype) for call in recorder.calls]
    [('dense', 'float32')]
    """
    layer_call, operation_call = Layer.__call__, Operation.__call__

    def call_layer(self, *args, **kwargs):
        if not recorder.is_on():
            return layer_call(self, *args, **kwargs)
        recorder.begin(self, (args, kwargs))
        try:
            return layer_call(self, *args, **kwargs)
        finally:
            recorder.end()

    def call_operation(self, *args, **kwargs):
        if not recorder.is_on():
            return operation_call(self, *args, **kwargs)
        if recorder.awaits(self):
            return recorder.run(operation_call, args, kwargs)
        if isinstance(self, Layer):
            return operation_call(self, *args, **kwargs)
        recorder.begin(self, (args, kwargs))
        try:
            return recorder.run(operation_call, args, kwargs)
        finally:
            recorder.end()

    Layer.__call__, Operation.__call__ = call_layer, call_operation
    try:
        # Inside a pure function there are tracers instead of numbers.
        with calling_plainly(recorder.keep):
            yield
    finally:
        Layer.__call__, Operation.__call__ = layer_call, operation_call


def _spec_of(x: Any) -> Any:
    if not keras.ops.is_tensor(x):
        return x
    shape = [n if isinstance(n, int) else None for n in x.shape]
    return keras.KerasTensor(shape, keras.backend.standardize_dtype(x.dtype))


def _zeros(spec: keras.KerasTensor) -> Any:
    """A tensor that a symbolic call goes on with; any size stands for an unknown one."""
    dtype = "int32" if spec.dtype == "int64" else spec.dtype  # JAX may have no int64
    return keras.ops.zeros([n or 1 for n in spec.shape], dtype)


def _dtype_of(outputs: Tree) -> str:
    """The dtype of the first float tensor in a structure; empty if there is none."""
    tensors = [
        x for x in keras.tree.flatten(outputs) if hasattr(x, "shape") and hasattr(x, "dtype")
    ]
    dtypes = [keras.backend.standardize_dtype(x.dtype) for x in tensors]
    return next(filter(keras.backend.is_float_dtype, dtypes), "")
