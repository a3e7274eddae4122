"""The private parts of Keras that kmp needs, each behind a function that names them.

Only this package and `_backend/` may import `keras.src` or read an attribute of a Keras object that
begins with an underscore. `tests/test_house.py` lists the names, and since when Keras has them.
"""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from keras import Layer, Model, Sequential, ops
from keras.layers import CategoryEncoding, Discretization
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.variables import AutocastScope

from kmp._keras.building import casting_inputs

# Layers


def layers_of(model: Layer) -> list[Layer]:
    """`model` and all layers in it, each once: nested models, wrapped layers and RNN cells too.

    A layer stands before those inside it. Private: `_flatten_layers`; `model.layers` lists neither
    wrapped layers nor those that a layer's own code creates.
    """
    return model._flatten_layers()


def parts_of(layer: Layer) -> list[Layer]:
    """The layers directly inside a layer. Private: `_flatten_layers`."""
    return layer._flatten_layers(include_self=False, recursive=False)


def own_weights(layer: Layer) -> list[Any]:
    """The trainable variables of a layer itself, frozen or not.

    Private: `_trainable_variables`; `trainable_variables` includes those of the layers inside, and
    is empty for a frozen layer.
    """
    return layer._trainable_variables


def cast_variables(layer: Layer) -> list[Any]:
    """The variables of a layer itself that are rounded where Keras casts variables.

    Private: `_trainable_variables` as above, `_non_trainable_variables` and `_autocast`, which is
    false for those of `add_weight(..., autocast=False)`.
    """
    variables = layer._trainable_variables + layer._non_trainable_variables
    return [v for v in variables if v._autocast and v.dtype == "float32"]


def own_state(layer: Layer) -> list[Any]:
    """The variables of a layer itself that are no weights. Private: `_non_trainable_variables`.

    `non_trainable_variables` includes frozen weights.
    """
    return layer._non_trainable_variables


def is_inner_layer(thing: Any) -> bool:
    """Whether it is a layer, and neither a model nor an operation of a Functional model."""
    return isinstance(thing, Layer) and not isinstance(thing, Model)


def is_kerass_own(thing: Any) -> bool:
    """Whether Keras itself defines the class of a layer, an optimizer, a loss or a metric."""
    return type(thing).__module__.partition(".")[0] == "keras"


def path_of(layer: Any) -> str:
    """The path of a layer, or its name where Keras gives no path.

    Operations have no path, nor have layers that are built when they are made (pooling,
    activations).
    """
    return getattr(layer, "path", None) or layer.name


def give_policies(policies: Iterable[tuple[Layer, keras.DTypePolicy]]) -> None:
    """Set the dtype policies of built layers.

    Private: `_dtype_policy`. The setter of `layer.dtype_policy` writes into a `DTypePolicyMap` that
    several layers share.
    """
    for layer, policy in policies:
        layer._dtype_policy = policy


def function_of(metric: Any) -> Any:
    """The function that a loss or a metric evaluates, or its class. Private: `_fn`."""
    return getattr(metric, "_fn", type(metric))


def is_preprocessing(layer: Layer) -> bool:
    """Whether a layer is, or derives from, one of Keras's for raw inputs."""
    return any(".preprocessing." in each.__module__ for each in type(layer).__mro__)


def rounds_raw_inputs(layer: Layer) -> bool:
    """Whether a preprocessing layer gets its inputs in its compute dtype.

    Keras hands bins and tokens on as they are, but where a graph of TensorFlow's calls the layer.
    """
    as_they_are = isinstance(layer, (CategoryEncoding, Discretization))
    return keras.backend.backend() == "tensorflow" or not as_they_are


@contextlib.contextmanager
def unlocked(layer: Layer) -> Iterator[None]:
    """Within, a built layer may get and lose variables.

    Private: `_tracker`, which Keras locks when a layer is built; on PyTorch `_track_variables`,
    which registers the variables with the `torch.nn.Module`.
    """
    layer._tracker.unlock()
    try:
        yield
    finally:
        layer._tracker.lock()
        if hasattr(layer, "_track_variables"):
            layer._track_variables()


def drop_variable(layer: Layer, name: str) -> None:
    """Delete the variable that is the attribute `name` of a layer; within `unlocked`.

    Private: `_untrack_variable`. `delattr` collects garbage as well, which takes 0.2 s each time.
    """
    layer._untrack_variable(getattr(layer, name))
    super(Layer, layer).__delattr__(name)


def kernel_as_array(layer: Layer) -> None:
    """Let a layer have its kernel as an array in place of a variable; within `unlocked`.

    Private: `_kernel`. Keras's `quantize` deletes it, and collects garbage only for a variable.
    """
    kernel: Any = ops.convert_to_numpy(layer._kernel)
    drop_variable(layer, "_kernel")
    layer._kernel = kernel


def replace_kernel(layer: Any, make: Callable[[], Any]) -> None:
    """Give a layer the variable that `make` returns as its kernel; within `unlocked`.

    Private: `_kernel`, of which `layer.kernel` is the reading.
    """
    drop_variable(layer, "_kernel")
    layer._kernel = make()


def take_class(layer: Layer, cls: type) -> None:
    """Make a layer an instance of `cls`, with the arguments that the `call` of `cls` takes.

    Private: `_call_signature`, `_call_has_training_arg` and `_call_has_context_arg`, which Keras
    reads from `call` when the layer is made.
    """
    layer.__class__ = cls
    layer._call_signature = inspect.signature(layer.call)
    names = [each.name for each in layer._call_signature.parameters.values()]
    layer.call_signature_parameters = names
    layer._call_has_training_arg = "training" in names
    layer._call_has_context_arg = {"training": "training" in names}


def mark_quantized(layer: Layer) -> None:
    """Let `layer.quantize` refuse to quantize a layer again. Private: `_is_quantized`."""
    layer._is_quantized = True


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Within a layer's call, variables keep their dtype. Private: `AutocastScope`."""
    return AutocastScope(None)


# Models


def is_graph(model: Any) -> bool:
    """Whether a layer is a Functional or a built Sequential model: a graph of operations."""
    functional = isinstance(model, Sequential) or hasattr(model, "operations")
    return functional and hasattr(model, "outputs")


def made_by(tensor: keras.KerasTensor) -> tuple[Any, list[keras.KerasTensor]]:
    """The operation that made a tensor of a graph, and the tensors that it was given.

    Private: `_keras_history` and `_inbound_nodes`; `operation.input` is that of its first call.
    """
    operation, node_index, _ = tensor._keras_history
    return operation, operation._inbound_nodes[node_index].input_tensors


def symbolic_outputs(model: Any, call: Callable | None = None) -> Any:
    """What calling the model gives, as KerasTensors, or None if it cannot be called symbolically.

    No weight or random state is read or changed, and no node is added to any layer. Private:
    `compute_output_spec`; calling the model itself on KerasTensors would add nodes.
    """
    # Only a graph knows the dtypes of its inputs. On JAX, no code may compare an unknown size with
    # another number: then any size is tried in its place.
    dtypes = [None] if is_graph(model) else ["float32", "int32"]
    for size, dtype in itertools.product((None, 2), dtypes):
        try:
            inputs = _inputs_of(model, dtype, size)
            with contextlib.nullcontext() if is_graph(model) else casting_inputs(model):
                return keras.src.backend.compute_output_spec(call or model.call, *inputs)
        except Exception:  # whatever the user's code raises
            continue
    return None


def _inputs_of(model: Any, dtype: str | None, size: int | None) -> list[Any]:
    """What a model is called with, as KerasTensors, with `size` in place of unknown ones."""
    if dtype is None:
        inputs = [model.inputs[0] if isinstance(model, Sequential) else model.input]
    else:
        shapes = model.get_build_config() or {}
        shapes = shapes.get("shapes_dict") or {"inputs": shapes.get("input_shape")}
        inputs = [_specs(shape, dtype) for shape in shapes.values()]
    return inputs if size is None else keras.tree.map_structure(_sized(size), inputs)


def _sized(size: int) -> Callable[[keras.KerasTensor], keras.KerasTensor]:
    def with_size(spec):
        shape = [size if n is None else n for n in spec.shape]
        return keras.KerasTensor(shape, dtype=spec.dtype, sparse=spec.sparse)

    return with_size


def _specs(shape: Any, dtype: str) -> Any:
    if isinstance(shape, dict):
        return {key: _specs(each, dtype) for key, each in shape.items()}
    if shape and isinstance(shape[0], (list, tuple, dict)):
        return [_specs(each, dtype) for each in shape]
    return keras.KerasTensor(shape, dtype=dtype)


def call_in_training(model: Any, *inputs: Any) -> Any:
    """Call a model as the trainer of `fit` does: on JAX without its `__call__`."""
    arguments = {"training": True} if takes_training(model) else {}
    if keras.backend.backend() != "jax":
        return model(*inputs, **arguments)
    weights = model.trainable_variables, model.non_trainable_variables
    state = [[v.value for v in variables] for variables in weights]
    return model.stateless_call(*state, *inputs, **arguments)[0]


def takes_training(layer: Any) -> bool:
    """Whether the `call` of a layer or model takes `training`."""
    return "training" in inspect.signature(layer.call).parameters


def has_weights(model: Any) -> bool:
    """Whether all weights of `model` are there.

    A model whose own train step calls its layers one by one is never built itself. A model that is
    built may still have layers that nothing calls.
    """
    return model.built or (bool(model.weights) and not awaits_weights(model))


def awaits_weights(model: Any) -> bool:
    """Whether a layer of `model` was never built.

    In a class without a `build` of its own, `model.build(shape)` builds no layer, and still marks
    the model as built. Private: `_is_default`.
    """

    def is_complete(layer: Any) -> bool:  # or has no weights but those of the layers in it
        return layer.built or getattr(layer.build, "_is_default", False)

    return not all(map(is_complete, layers_of(model)))


def check_model(model: Any, owner: str) -> None:
    """Check that a model is one, and has its weights.

    Args:
        model: what the user passed.
        owner: name of the function that the user called.

    Raises:
        TypeError: if `model` is not a Keras model.
        ValueError: if it, or one of its layers, is not built.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"`model` of {owner} must be a keras.Model. Received: {model!r} (of type "
            f"{type(model).__name__}). Write keras.Sequential([layer]) for one layer; its policy "
            "alone is set by layer.dtype_policy = kmp.Policy(...)."
        )
    if not has_weights(model):
        raise ValueError(
            f"`model` of {owner} must be built, so that its weights are there. Received: "
            f"{type(model).__name__} {model.name!r}, which is not. Call it on a batch, or "
            "model.build(input_shape), first; a model without `call` has its layers built one by "
            "one."
        )


def forget_functions(model: Layer) -> None:
    """Drop the compiled functions of `model` and of the models in it.

    `fit`, `evaluate` and `predict` would go on with the dtypes that they were traced with.
    """
    for layer in layers_of(model):
        if isinstance(layer, Model):
            functions: Any = layer
            functions.train_function = functions.test_function = functions.predict_function = None


def compile_arguments(model: Any) -> dict[str, Any]:
    """The arguments that `model.compile` got, as objects; empty if it was not compiled.

    Private: `_compile_config`; `get_compile_config` raises where one of them cannot be serialized.
    """
    return getattr(getattr(model, "_compile_config", None), "config", {})


def replace_optimizer(model: Any, optimizer: keras.optimizers.Optimizer) -> None:
    """Give a compiled model another optimizer, in its saved files as well.

    Private: `_compile_config`, from which a loaded model is compiled.
    """
    model.optimizer = optimizer
    if "optimizer" in compile_arguments(model):
        model._compile_config.config["optimizer"] = optimizer


# Tensors


def with_mask_of(x: Any, y: Any) -> Any:
    """`y`, with the mask that `x` has, if any. Private: `get_keras_mask`, `set_keras_mask`."""
    mask = get_keras_mask(x)
    if mask is not None:
        set_keras_mask(y, mask)
    return y
