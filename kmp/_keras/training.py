"""What Keras's training loop keeps to itself: the average of the loss, counters, a layer's state.

The buffers of PyTorch modules are among the state, though Keras has them in no list of variables.

Each function names the private attributes that it reads or sets.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
from keras import Layer, Model, ops
from keras.layers import RNN
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.backend.common.stateless_scope import in_stateless_scope

from kmp._keras import own_state, path_of


def state_of(layer: keras.Layer) -> list[Any]:
    """The variables that a layer itself updates in training: moving statistics, counters.

    Neither weights, frozen or not, nor the seeds of random generators. A stateful RNN keeps the
    states that it goes on from apart from all its variables. On PyTorch a layer may have buffers,
    and modules with some in it.
    """
    states = layer.states if isinstance(layer, RNN) and layer.stateful else None
    found = [*own_state(layer), *(keras.tree.flatten(states) if states is not None else ())]
    return [*found, *buffers_of(layer)]


@contextlib.contextmanager
def noting_calls(variables: Sequence[Any]) -> Iterator[set[int]]:
    """Within, note which of the variables are assigned in a call, and not by a train step itself.

    On JAX a train step itself assigns none: it returns new values. Private: `current_call_ctx`,
    which is there during the calls of layers.

    Yields:
        The ids of those that have been assigned in a call so far.
    """
    noted: set[int] = set()

    def note(variable: Any) -> Callable[[Any], Any]:
        assign = variable.assign

        def noting(value: Any) -> Any:
            if in_stateless_scope() or get_global_attribute("current_call_ctx") is not None:
                noted.add(id(variable))
            return assign(value)

        return noting

    for each in variables:
        each.assign = note(each)
    try:
        yield noted
    finally:
        for each in variables:
            vars(each).pop("assign", None)


class Guard:
    """What protects a model: its method stands in the place of `model.make_train_function`."""


def guard_of(model: Any) -> Any:
    """The `Guard` of a model, or None."""
    guard = getattr(vars(model).get("make_train_function"), "__self__", None)
    return guard if isinstance(guard, Guard) else None


def is_traced(model: Any) -> bool:
    """Whether Keras traces the model's steps, and runs the program or graph that it has traced."""
    traced = {"jax": model.jit_compile, "tensorflow": not model.run_eagerly}
    return traced.get(keras.backend.backend(), False)


def adds_up_in_float32(model: Any) -> bool:
    """Whether the model's steps add up half precision in float32: protected and traced ones."""
    return guard_of(model) is not None and is_traced(model)


class Buffer:
    """A buffer, such as the running variance of PyTorch's BatchNorm, as a variable.

    Args:
        module: `torch.nn.Module`.
        name: of the buffer in it.
        path: of the module in the model.
    """

    def __init__(self, module: Any, name: str, path: str):
        self._module, self._name, self.path = module, name, f"{path}/{name}"
        self.key = id(module), name  # the same in the next step, which has another `Buffer`
        self.dtype = keras.backend.standardize_dtype(self.value.dtype)
        self.shape = tuple(self.value.shape)

    @property
    def value(self) -> Any:
        """The tensor; a module may put another one in its place."""
        return getattr(self._module, self._name)

    @property
    def is_there(self) -> bool:
        """Whether the module has a tensor of this shape still: a cache may have grown."""
        return self.value is not None and tuple(self.value.shape) == self.shape

    def holds(self, value: Any) -> bool:
        """Whether it has these numbers; waits for the device. NaN differs from itself."""
        return bool((self.value == value).all())

    def assign(self, value: Any) -> None:
        """Write into the tensor."""
        self.value.copy_(ops.convert_to_tensor(value))


def _is_state(tensor: Any) -> bool:
    """Whether a buffer can be written, and is of a dtype that Keras knows.

    An expanded mask cannot be written, nor can a tensor that PyTorch's inference mode made.
    """
    try:
        keras.backend.standardize_dtype(tensor.dtype)
    except ValueError:
        return False
    if str(tensor.layout) != "torch.strided" or tensor.requires_grad or tensor.is_inference():
        return False
    return all(
        stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def buffers_of(layer: Any) -> list[Buffer]:
    """The buffers of a layer, and of the modules in it that are no layers. None but on PyTorch."""
    found: list[Buffer] = []
    modules = [(path_of(layer), layer)] if keras.backend.backend() == "torch" else []
    for path, module in modules:
        named = [(name, x) for name, x in module.named_buffers(recurse=False) if _is_state(x)]
        found += [Buffer(module, name, path) for name, _ in named]
        children = ((f"{path}/{name}", x) for name, x in module.named_children())
        modules += [(name, x) for name, x in children if not isinstance(x, Layer)]
    return found


def still_there(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The pairs of a variable and a value that can be written back: all but a cache that grew."""
    return [(v, x) for v, x in pairs if not isinstance(v, Buffer) or v.is_there]


def kept_buffers(layers: Sequence[Layer]) -> Callable[[], None]:
    """Keep the buffers of layers; call the result to put them back."""
    kept = [(x, x.value.clone()) for layer in layers for x in buffers_of(layer)]

    def restore() -> None:
        for buffer, value in still_there(kept):
            buffer.assign(value)

    return restore


def loss_tracker(model: Any) -> Any:
    """The metric in which the trainer averages the loss of an epoch. Private: `_loss_tracker`."""
    return model._loss_tracker


def set_loss_tracker(model: Any, tracker: Any) -> None:
    """Let the trainer average the loss of an epoch in another metric. Private: `_loss_tracker`."""
    vars(model)["_loss_tracker"] = tracker  # `setattr` would list it among the metrics twice


def metrics_of(model: Any) -> list[Any]:
    """The metrics of a model, each on its own.

    Those given to `compile` are in one, which may be built later. Private: `_compile_metrics`.
    """
    compiled = model._compile_metrics
    found = [metric.metrics if metric is compiled else [metric] for metric in model.metrics]
    return [metric for group in found for metric in group]


def build_for_training(model: Any, x: Any, y: Any) -> None:
    """Make the variables of the optimizer and of the metrics, as `fit` does before it traces.

    Private: `_symbolic_build`.

    Args:
        model: built and compiled.
        x: one batch, of which only shapes and dtypes count.
        y: its targets, or None.
    """
    model._symbolic_build(data_batch=(x, y))


def note_placements(model: Any) -> None:
    """Let the loop of `fit` know that the model has other variables than when it began.

    Before Keras 3.12 the loop notes on JAX where each of them lies, and every step goes by that.
    Private: `_record_training_state_sharding_spec`.
    """
    if notes_placements(model):
        model._record_training_state_sharding_spec()


def notes_placements(model: Any) -> bool:
    """Whether a model's steps say where each variable lies. Private: as above."""
    return hasattr(model, "_record_training_state_sharding_spec")


def called_by_train_on_batch() -> bool:
    """Whether Keras's `train_on_batch` has called the function that asks this."""
    frame = inspect.currentframe()
    caller = frame and frame.f_back and frame.f_back.f_back
    return caller is not None and caller.f_code.co_name == "train_on_batch"


def strategy_scope(model: Any) -> contextlib.AbstractContextManager[Any]:
    """The scope in which the variables of a model are made, where TensorFlow distributes it."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy.scope() if strategy else contextlib.nullcontext()


def is_replicated(model: Any) -> bool:
    """Whether TensorFlow distributes the model over replicas. Private: `_distribute_strategy`."""
    return getattr(model, "_distribute_strategy", None) is not None


def check_compiled(model: Any, owner: str) -> None:
    """Check that `owner` was given a compiled model.

    Raises:
        TypeError: if `model` is not a Keras model.
        ValueError: if it is not compiled.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"`model` of {owner} must be a keras.Model. Received: {model!r} (of type "
            f"{type(model).__name__}). Write keras.Sequential([layer]) for one layer."
        )
    if not model.compiled:
        raise ValueError(
            f"`model` of {owner} must be compiled. Received: {model.name!r}, which is not. Write "
            'model.compile(kmp.scaled("adam"), ...) first.'
        )
