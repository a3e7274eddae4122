"""What `bench` and `certify` share: one model under several policies, and where it runs."""

import importlib
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import keras

from kmp import _backend
from kmp._types import DeviceMemory, Tree
from kmp._version import __version__
from kmp.convert import to_mixed_precision
from kmp.doctor import what_xla_will_do
from kmp.optimizer import LossScaleOptimizer
from kmp.policy import Policy, get_policy, set_policy


class Spread(NamedTuple):
    """The middle of repeated measurements, and where the middle half of them lies.

    Attributes:
        median: float.
        low: float, the first quartile.
        high: float, the third one.
    """

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """The `Spread` of at least two numbers."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def load(path: str) -> Callable:
    """Import the function that `module:function` names.

    Raises:
        ValueError: there is no such module, or no such function in it.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name, None) if name else None
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path!r} cannot be imported: {error}. Run the command in the directory that holds "
            "the module, or set PYTHONPATH."
        ) from error
    if not callable(function):
        raise ValueError(
            "A model is named by a module and a function in it that builds the model. Received: "
            f"{path!r}. Write for example my_package.train:build."
        )
    return function


def build_under(build: Callable[[], tuple], policy: Any, seed: int) -> tuple:
    """Call `build` and put its model under a policy, with the weights that `seed` gives in float32.

    A policy with float32 parameters is what `kmp.to_mixed_precision` converts to. Under any other
    the model is built anew, and its weights are those of float32, rounded. The loss is scaled under
    float16 with float32 parameters, by kmp; nowhere else.

    Args:
        build: takes nothing and returns a tuple, a compiled model first. Whatever it sets globally
            (a dtype policy) is put back.
        policy: what `kmp.get_policy` takes.
        seed: int, for all random numbers.

    Returns:
        What `build` returns.
    """
    policy = get_policy(policy)
    before = keras.config.dtype_policy()
    try:
        model, *rest = _build(build, Policy("float32"), seed)
        if policy.param_dtype != "float32":
            reference = model
            model, *rest = _build(build, policy, seed)
            for variable, weight in zip(model.weights, reference.weights, strict=True):
                variable.assign(keras.ops.cast(weight.value, variable.dtype))
    finally:
        keras.config.set_dtype_policy(before)
    optimizer = model.optimizer
    if policy.param_dtype == "float32" and policy.compute_dtype == "float16":
        if not isinstance(optimizer, LossScaleOptimizer):
            optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # out of Keras's own
            optimizer = LossScaleOptimizer(optimizer)
    else:
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    model.optimizer = optimizer
    if policy.param_dtype == "float32":
        to_mixed_precision(model, policy)
    return model, *rest


def _build(build: Callable[[], tuple], policy: Policy, seed: int) -> tuple:
    keras.utils.set_random_seed(seed)
    set_policy(policy)
    built = build()
    model: Any = built[0] if isinstance(built, tuple) and built else built
    if not isinstance(built, tuple) or not isinstance(model, keras.Model):
        raise ValueError(
            "The function that builds must return a tuple, a Keras model first and then its data. "
            f"Received: {type(built).__name__} from {getattr(build, '__name__', build)}. Write for "
            "example return model, x, y."
        )
    if not model.compiled:
        raise ValueError(
            f"The model that is built must be compiled. Received: {model.name!r}, which is not. "
            "Call model.compile(optimizer, loss) before returning it."
        )
    return built


class StepMemory(NamedTuple):
    """The most that a training step holds at once.

    Attributes:
        bytes: int, or None where nobody knows.
        source: str, who says so.
    """

    bytes: int | None
    source: str


def step_memory(model: Any, x: Tree, y: Tree, before: DeviceMemory | None) -> StepMemory:
    """Ask who knows it for a model that has trained.

    Args:
        model: compiled, and trained.
        x: one batch.
        y: its targets.
        before: `_backend.device_memory()` before the model was built.
    """
    after = _backend.device_memory()
    if before is not None and after is not None:
        return StepMemory(after.peak - before.in_use, "peak of the device's allocator")
    counted = _backend.compiled_step_bytes(model, x, y)
    if counted is not None:
        return StepMemory(counted, "XLA's analysis of the compiled step")
    return StepMemory(None, "not available on this backend and device")


def mebibytes(memory: StepMemory) -> str:
    """The same for a table."""
    return "-" if memory.bytes is None else f"{memory.bytes / 2**20:.1f}"


def skipped_steps(model: Any) -> int:
    """How many steps were skipped; 0 where the loss is not scaled."""
    counter = getattr(model.optimizer, "skipped_steps", None)
    return 0 if counter is None else int(keras.ops.convert_to_numpy(counter.value))


def environment() -> dict[str, str]:
    """The device and the versions, for whoever reads the numbers."""
    device, backend = _backend.device(), keras.backend.backend()
    packages = {"tensorflow": ["tensorflow"], "jax": ["jax", "jaxlib"], "torch": ["torch"]}[backend]
    return {
        "device": f"{device.name} ({device.platform}), {platform.machine()}, "
        f"{os.cpu_count()} CPU cores",
        "backend": backend,
        "XLA will": what_xla_will_do(backend, device.platform),
        "kmp": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("keras", "numpy", *packages)},
    }


def environment_line(facts: dict[str, str]) -> str:
    """The same for a table's heading: two lines."""
    facts = dict(facts)
    device, backend, xla = (facts.pop(name) for name in ("device", "backend", "XLA will"))
    versions = ", ".join(f"{name} {version}" for name, version in facts.items())
    return f"{device}; {backend}, XLA will {xla}\n{versions}"
