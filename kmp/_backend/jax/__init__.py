"""The JAX side of `kmp._backend`."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import keras
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from keras import ops

from kmp._backend.base import Backend
from kmp._backend.jax.cards import NAMES, compiled_for, device_of
from kmp._backend.jax.programs import operations
from kmp._backend.jax.sharding import MeshSharding
from kmp._backend.jax.sums import sums_in_float32
from kmp._backend.jax.updates import decision, update_by_mask
from kmp._backend.sharding import UNSHARDED, Sharding
from kmp._backend.types import (
    Device,
    Gradient,
    Operation,
    PlannedProgram,
    Tensor,
    Tree,
    TwoLists,
    Variable,
)

_LOOPS = ("fori_loop", "map", "scan", "while_loop")


def _values(variables: Sequence[Variable]) -> list[Tensor]:
    """What variables hold.

    Raises:
        RuntimeError: if they are empty, because `fit` holds what they held.
    """
    try:
        return [v.value for v in variables]
    except TypeError:
        if all(v._value is not None for v in variables):
            raise
        raise RuntimeError(
            "The optimizer is empty while JAX's fit runs: its state is an argument of train_step. "
            f"Received: a train_step that reads {variables[0].path!r} of the optimizer. Write "
            "self.optimizer.stateless_scale_loss(optimizer_variables, loss) in place of "
            "scale_loss(loss), and stateless_apply in place of apply."
        ) from None


class JaxBackend(Backend):
    """What differs on JAX."""

    SEES_LOSS = False  # the loss is scaled inside the differentiated function, which is pure
    IS_PURE = True

    def platform(self) -> str:
        return jax.default_backend()

    def device(self) -> Device:
        first = jax.local_devices()[0]
        major, _, minor = str(getattr(first, "compute_capability", "")).partition(".")
        nvidia = major.isdigit() and minor.isdigit()  # AMD's are called gfx90a and the like
        return Device(
            self.platform(), first.device_kind, (int(major), int(minor)) if nvidia else None
        )

    def inside_xla(self) -> bool:
        # JAX compiles each operation that it does not trace.
        return True

    def per_target(
        self,
        function: Callable[..., Sequence[Tensor]],
        shapes: Sequence[tuple[int, ...]],
        *tensors: Tensor,
    ) -> Sequence[Tensor]:
        if not any(isinstance(x, jax.core.Tracer) for x in tensors):
            return function(jax.default_backend(), *tensors)
        tensors = tuple(map(jnp.asarray, tensors))
        return _PER_TARGET.bind(*tensors, function=function, shapes=tuple(shapes))

    def sharding(self, layouts: Sequence[Any]) -> Sharding:
        return MeshSharding(layouts) if layouts else UNSHARDED

    def placements(self, variables: Sequence[Variable]) -> Sequence[Any]:
        layouts = [x.sharding for x in self.present_values(variables)]
        meshes = {getattr(each, "mesh", None) for each in layouts}
        is_split = not all(each.is_fully_replicated for each in layouts)
        return layouts if is_split and len(meshes) == 1 and None not in meshes else []

    def compiled(self, function: Callable, static: Sequence[int] = ()) -> Callable:
        # JAX would compile each of its operations.
        return jax.jit(function, static_argnums=tuple(static))

    def writes_logs(self, model: Any) -> bool:
        # Process 0 writes for all that train one model together.
        alone = keras.distribution.distribution() is None  # then each process has its own model
        return alone or jax.process_index() == 0

    def assigns_together(self, model: Any) -> bool:
        # To lay a value on the devices of all processes, JAX asks whether they all have the same.
        return keras.distribution.distribution() is not None and jax.process_count() > 1

    def gradient_sample(self, gradient: Gradient, strides: Sequence[int], target: str) -> Tensor:
        # XLA cannot compile a slice of bfloat16 with two strides for TPUs, so it is taken axis by
        # axis there. On GPUs that would be a kernel an axis, where one kernel serves all variables.
        if target != "tpu":
            return super().gradient_sample(gradient, strides, target)
        for axis, stride in enumerate(strides):
            if stride > 1:
                x = jax.lax.slice_in_dim(gradient, 0, None, stride, axis)
                gradient = jax.lax.optimization_barrier(x)
        return gradient

    def reduce_columns(
        self, columns: tuple[Tensor, ...], axes: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        # XLA's CPU compiler splits a reduction of one column in two, and writes the column between
        # them. Nor does it vectorize a maximum of floats, which takes ten times as long as one of
        # their bits; those of positive floats have the same order.
        bits = tuple(_bits(x) if i == 1 else x for i, x in enumerate(columns))
        zeros = tuple(jnp.zeros((), x.dtype) for x in bits)
        found = jax.lax.reduce(bits, zeros, _combine, axes)
        pairs = zip(found, columns, strict=True)
        return tuple(
            x if x.dtype == c.dtype else jax.lax.bitcast_convert_type(x, c.dtype) for x, c in pairs
        )

    def maxima(self, tensors: Sequence[Tensor], axis: int) -> Sequence[Tensor]:
        bits = tuple(_bits(x) for x in tensors)  # as above
        zeros = (np.int32(0),) * len(bits)
        found = jax.lax.reduce(bits, zeros, lambda x, y: tuple(map(jnp.maximum, x, y)), (axis,))
        return [jax.lax.bitcast_convert_type(x, "float32") for x in found]

    def read_numbers(
        self, measured: Sequence[Tensor], others: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        # The barrier keeps XLA from copying the reductions of all gradients into each masked
        # update, with which the compile time would grow as the square of the number of variables.
        # The CPU compiler removes it too early, but these numbers come from a reduction of two
        # results, which it does not copy. Outside compiled code the host reads the numbers in any
        # case, and acts on them.
        if not any(isinstance(x, jax.core.Tracer) for x in (*measured, *others)):
            return jax.device_get((list(measured), list(others)))
        return jax.lax.optimization_barrier(list(measured)), others

    def together(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return jax.lax.optimization_barrier(list(tensors))

    def once_decided(self, x: Tensor) -> Tensor:
        # Not on a GPU, where it saves nothing and takes a kernel for some weights.
        applies = decision() if self.platform() != "gpu" else None
        return x if applies is None else jax.lax.optimization_barrier((x, applies))[0]

    def order_after(self, finite: Tensor, sample: Tensor) -> Tensor:
        # By a dot product, which XLA's CPU compiler copies into no update.
        if self.is_concrete(finite):
            return finite
        flags = jnp.stack([jnp.logical_not(finite), jnp.dot(sample, sample) < 0])
        flags = flags.astype("float32")
        return jax.lax.optimization_barrier(jnp.dot(flags, flags)) == 0

    def update_if(
        self, applies: Tensor, inner: Any, gradients: list[Tensor], variables: list[Variable]
    ) -> None:
        if self.is_concrete(applies):
            super().update_if(applies, inner, gradients, variables)
        else:
            update_by_mask(applies, inner, gradients, variables)

    def branch(self, pred: Tensor, then: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
        if self.is_concrete(pred):
            return super().branch(pred, then, otherwise)
        return jax.lax.cond(pred, then, lambda: otherwise)

    def record_loss_finite(self, variable: Variable, is_finite: Callable[[], Tensor]) -> None:
        # The loss is scaled inside the differentiated function, which is pure.
        return

    def around_train_step(
        self,
        model: Any,
        train_step: Callable[..., Any],
        before: Callable[[], Any],
        after: Callable[[Any, Any], Any],
    ) -> Callable[..., Any]:
        # In each of the two the variables have the values of the state that the step takes or
        # returns, and what `after` assigns becomes part of that.

        def owned() -> tuple[list[Variable], ...]:  # in the order of the trainer's state
            return (
                model.trainable_variables,
                model.non_trainable_variables,
                model.optimizer.variables,
                model.metrics_variables,
            )

        def holding(state: Any) -> keras.StatelessScope:
            pairs = zip(owned(), state, strict=True)
            mapping = [pair for part in pairs for pair in zip(*part, strict=True)]
            return keras.StatelessScope(mapping, initialize_variables=False)

        def step(state: Any, data: Any) -> tuple[Any, Any]:
            with holding(state):
                kept = before()
            logs, state = train_step(state, data)
            with holding(state) as scope:
                logs = after(kept, logs)
            return logs, tuple([scope.get_current_value(v) for v in part] for part in owned())

        return step

    def sums_in_float32(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        exact = sums_in_float32(train_step)

        def step(state: Any, data: Any) -> tuple[Any, Any]:
            is_eager = all(map(self.is_concrete, jax.tree.leaves(state)))
            return train_step(state, data) if is_eager else exact(state, data)

        return step

    def settle(self, model: Any) -> None:
        model.jax_state_sync()

    def matmul_float32(self, x: Tensor, kernel: Tensor) -> Tensor:
        return jnp.matmul(x, kernel, preferred_element_type="float32")

    def custom_gradient(
        self,
        forward: Callable[..., Sequence[Tensor]],
        backward: Callable[..., Sequence[Tensor | None]],
        inputs: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        def run(*inputs):
            outputs = tuple(forward(*inputs))
            return outputs, (inputs, outputs[1:])

        function = jax.custom_vjp(lambda *inputs: run(*inputs)[0])
        function.defvjp(run, lambda kept, gradients: tuple(backward(*kept, gradients)))
        return function(*inputs)

    def recompute(
        self,
        function: Callable[..., TwoLists],
        inputs: Sequence[Tensor],
        weights: Callable[[], Sequence[Tensor]],
        policy: Any = None,
    ) -> TwoLists:
        return jax.checkpoint(function, policy=policy)(*inputs)

    def recompute_policy(self, policy: Any) -> Any:
        policies = jax.checkpoint_policies
        names = [name for name in dir(policies) if name.endswith("_saveable")]
        if callable(policy) or policy in names:
            return policy if callable(policy) else getattr(policies, policy)
        raise ValueError(
            "`policy` of recompute must be a function as in jax.checkpoint_policies, or one of "
            f'{", ".join(names)}. Received: policy={policy!r}. Write policy="dots_saveable".'
        )

    def constant(self, values: Any) -> Tensor:
        return jax.device_put(values)  # `jnp.asarray` and Keras's conversion are programs

    def bitcast(self, x: Tensor, dtype: str) -> Tensor:
        return jax.lax.bitcast_convert_type(x, dtype)

    def read(self, model: Any, variables: list[Variable], each: bool = False) -> list[Tensor]:
        state = getattr(model, "_jax_state", None)
        if not state or model._jax_state_synced:
            return _values(variables)
        live: dict[int, Tensor] = {}
        for key, owned in (
            ("optimizer_variables", lambda: model.optimizer.variables),
            ("metrics_variables", lambda: model.metrics_variables),
            ("trainable_variables", lambda: model.trainable_variables),
            ("non_trainable_variables", lambda: model.non_trainable_variables),
        ):
            if all(id(v) in live for v in variables):
                break  # collecting a large model's variables takes milliseconds
            values = state.get(key)
            if values:
                live |= {id(v): x for v, x in zip(owned(), values, strict=True)}
        # The loop does not hold variables that the model does not list, such as those of a metric
        # that its own `metrics` leaves out.
        live |= {id(v): v.value for v in variables if id(v) not in live}
        return [live[id(v)] for v in variables]

    def to_host(self, x: Tensor | Variable) -> Any:
        # Of an array across processes, the shards that this process holds.
        x = ops.convert_to_tensor(x)
        if x.is_fully_addressable:
            return super().to_host(x)
        try:
            held = x.addressable_shards
        except ValueError:  # of what Keras has just initialised JAX 0.10 cannot tell
            held = jnp.copy(x).addressable_shards
        shards = {_place(shard.index): shard.data for shard in held}
        by_place = {place: np.array(shard) for place, shard in shards.items()}
        return _HostShards(x.shape, x.sharding, by_place)

    def from_host(self, variable: Variable, value: Any) -> None:
        # Shards are assigned without asking the other processes. A whole array would be compared
        # with theirs, and JAX takes NaN for a difference.
        if isinstance(value, _HostShards):
            shape, sharding, by_place = value
            value = jax.make_array_from_callback(shape, sharding, lambda i: by_place[_place(i)])
        variable.assign(value)

    def random_state(self) -> Callable[[], None]:
        # JAX's random functions have no state.
        return lambda: None

    def watch_gradient(self, x: Tensor, record: Callable[[Tensor], None]) -> Tensor:
        @jax.custom_vjp
        def identity(x):
            return x

        def backward(_, gradient):
            if self.is_concrete(gradient) and gradient.dtype != jax.dtypes.float0:
                record(gradient)
            return (gradient,)

        identity.defvjp(lambda x: (x, None), backward)
        return identity(x)

    def gradients(
        self, loss: Callable[[], Tensor], variables: list[Variable]
    ) -> tuple[Tensor, list[Gradient]]:
        def function(values):
            mapping = list(zip(variables, values, strict=True))
            with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
                return loss()

        value, pull_back = jax.vjp(function, [v.value for v in variables])
        return value, pull_back(jnp.ones_like(value))[0]

    def present_values(self, variables: Sequence[Variable]) -> Sequence[Tensor]:
        values = [v._value for v in variables]
        return values if all(x is not None and self.is_concrete(x) for x in values) else []

    def outside_functions(self) -> contextlib.AbstractContextManager[Any]:
        return jax.ensure_compile_time_eval()

    def is_concrete(self, x: Any) -> bool:
        return not isinstance(x, jax.core.Tracer)

    @contextlib.contextmanager
    def without_functions(self) -> Iterator[None]:
        # Loops stay compiled, since eagerly each of their steps is a dispatch of its own.
        loops = {name: getattr(jax.lax, name) for name in _LOOPS}
        try:
            for name, loop in loops.items():
                setattr(jax.lax, name, jax.disable_jit(False)(loop))
            with jax.disable_jit():
                yield
        finally:
            for name, loop in loops.items():
                setattr(jax.lax, name, loop)

    def compiled_bytes(
        self, model: Any, specs: list, loss: Callable[[list[Tensor]], Tensor]
    ) -> int | None:
        def step(trained, others, inputs):
            def function(values):
                mapping = list(zip(model.trainable_variables, values, strict=True))
                mapping += list(zip(model.non_trainable_variables, others, strict=True))
                with keras.StatelessScope(state_mapping=mapping):
                    return loss(inputs)

            return jax.grad(function)(trained)

        def spec(shape, dtype):
            return jax.ShapeDtypeStruct(shape, dtype)

        arguments = (
            [spec(v.shape, v.dtype) for v in model.trainable_variables],
            [spec(v.shape, v.dtype) for v in model.non_trainable_variables],
            [spec(*each) for each in specs],
        )
        analysis = jax.jit(step).lower(*arguments).compile().memory_analysis()
        return None if analysis is None else int(analysis.temp_size_in_bytes)

    planned_devices = NAMES

    def planned_step(
        self, model: Any, x: Tree, y: Tree, device: Any = None
    ) -> PlannedProgram | None:
        device = device_of(device) if isinstance(device, str) else device
        mesh = None if device is None else jax.sharding.Mesh([device], ["device"])
        here = mesh and jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        batch = keras.utils.pack_x_y_sample_weight(x, y)

        def lowered(where):
            def spec(x):
                dtype = jax.dtypes.canonicalize_dtype(x.dtype)
                return jax.ShapeDtypeStruct(tuple(x.shape), dtype, sharding=where)

            owners = (
                model.trainable_variables,
                model.non_trainable_variables,
                model.optimizer.variables,
                model.metrics_variables,
            )
            state = tuple(list(map(spec, variables)) for variables in owners)
            return step.lower(state, jax.tree.map(spec, batch))

        step = jax.jit(model.train_step, donate_argnums=0)
        program = lowered(here)
        analysis = compiled_for(program, device).memory_analysis()
        if analysis is None:
            return None
        results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes  # written in place
        total = analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes
        # The compiler of a device that is not here does not count.
        costs = (program if here is None else lowered(None)).cost_analysis() or {}
        return PlannedProgram(int(total), float(costs.get("flops", math.nan)))

    def operations(self, function: Callable[..., Any], inputs: Sequence[Tree]) -> list[Operation]:
        return operations(function, inputs)


# One function for all reductions: in eager code JAX compiles again for each function that is new.
def _combine(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    pairs = enumerate(zip(a, b, strict=True))
    return tuple(jnp.maximum(x, y) if i == 1 else x + y for i, (x, y) in pairs)


def _bits(x: Tensor) -> Tensor:
    """int32 of the same shape for float32; else `x`."""
    return jax.lax.bitcast_convert_type(x, "int32") if x.dtype == "float32" else x


class _HostShards(NamedTuple):
    """What this process holds of an array that lies across processes, by place in the whole."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    by_place: dict[tuple, np.ndarray]


def _place(index: Any) -> tuple:
    return tuple((s.start, s.stop) for s in index)


# A primitive for functions that are traced once the target of a program is known

# By JAX's name of a compiler, the target that it compiles for.
_TARGETS = {"cpu": "cpu", "tpu": "tpu", "cuda": "gpu", "rocm": "gpu"}

# `jax.lax.platform_dependent` would trace the function for each target in every program.
_PER_TARGET = Primitive("kmp_per_target")
_PER_TARGET.multiple_results = True


@_PER_TARGET.def_abstract_eval
def _(*_: Any, function: Callable, shapes: tuple) -> list:
    return [jax.core.ShapedArray(shape, jax.numpy.dtype("float32")) for shape in shapes]


@_PER_TARGET.def_impl
def _(*tensors: Tensor, function: Callable, shapes: tuple) -> Sequence[Tensor]:
    """Run at once: `jax.grad` or `jax.vmap` of an eager step."""
    return function(jax.default_backend(), *tensors)


def _lower(context: Any, *operands: Any, function: Callable, shapes: tuple, target: str) -> Any:
    lowered = mlir.lower_fun(functools.partial(function, target), multiple_results=True)
    return lowered(context, *operands)


def _batch(
    tensors: Sequence[Tensor], axes: Sequence[Any], *, function: Callable, shapes: tuple
) -> tuple[Sequence[Tensor], Sequence[int]]:
    """Support `jax.vmap` over steps, as for an ensemble."""

    def each(target: str, *tensors: Tensor) -> Sequence[Tensor]:
        return jax.vmap(functools.partial(function, target), tuple(axes))(*tensors)

    pairs = zip(tensors, axes, strict=True)
    size = next(x.shape[axis] for x, axis in pairs if axis is not None)
    found = _PER_TARGET.bind(
        *tensors, function=each, shapes=tuple((size, *shape) for shape in shapes)
    )
    return found, [0] * len(shapes)


def _jvp(primals: Sequence[Tensor], _: Any, **parameters: Any) -> tuple[list, list]:
    """Support `jax.grad` through a step, as in meta-learning; measurements count as constants."""
    found = _PER_TARGET.bind(*primals, **parameters)
    return found, [jnp.zeros_like(x) for x in found]


batching.primitive_batchers[_PER_TARGET] = _batch
ad.primitive_jvps[_PER_TARGET] = _jvp

for _platform, _target in _TARGETS.items():
    mlir.register_lowering(
        _PER_TARGET, functools.partial(_lower, target=_target), platform=_platform
    )


backend = JaxBackend()
