"""What this machine is good at: the command `doctor`."""

import importlib
import os
import platform
import time
from typing import NamedTuple, TypeAlias

import keras
from keras import ops

from kmp._backend import backend
from kmp._backend.types import Device, DType
from kmp.precision.trees import HALF_DTYPES, half_dtype

Times: TypeAlias = dict[DType, float | None]  # seconds of a product; None where there is none

_SIZE = 1024  # rows and columns of the matrices that are multiplied


class Advice(NamedTuple):
    """Which policy to train with on a device.

    Attributes:
        policy: str, what to pass to `kmp.set_policy`.
        why: str.
        warnings: tuple of str, what will be slower or will not work.
    """

    policy: str
    why: str
    warnings: tuple[str, ...]


def advise(device: Device, times: Times) -> Advice:
    """Say which policy a device is good at.

    Accelerators are known by their hardware. CPUs differ too much for that: their advice follows
    from what was measured.

    Args:
        device: `(platform, name, compute_capability)`.
        times: what `product_times` returns.

    Example:

    >>> from kmp._backend.types import Device
    >>> advise(Device("gpu", "Tesla V100", (7, 0)), {"float32": 1e-3}).policy
    'mixed_float16'

    Source: NVIDIA, "CUDA C++ Programming Guide" (tensor cores from 7.0, bfloat16 from 8.0).
    """
    capability = device.compute_capability
    if device.platform == "tpu":
        why = "TPUs multiply in bfloat16, which has float32's range and needs no loss scaling."
        return Advice("mixed_bfloat16", why, ("float16 does not compile for TPUs.",))
    if device.platform == "cpu":
        return _advise_cpu(times)
    if capability is None:
        why = "not an NVIDIA GPU; bfloat16 has float32's range and needs no loss scaling."
        return Advice("mixed_bfloat16", why, ("Not known to kmp: measure before you rely on it.",))
    if capability < (7, 0):
        slow = "Half precision will be slower than float32 or no faster: no tensor cores."
        return Advice("float32", "tensor cores came with compute capability 7.0.", (slow,))
    if capability < (8, 0):
        why = "its tensor cores multiply float16, but not bfloat16."
        slow = "bfloat16 will be slower than float32: this GPU emulates it."
        return Advice("mixed_float16", why, (slow,))
    why = "its tensor cores are as fast in bfloat16 as in float16, without loss scaling."
    return Advice("mixed_bfloat16", why, ())


def _advise_cpu(times: Times) -> Advice:
    """The half precision that is clearly faster here; bfloat16 unless float16 is faster still."""
    full = times.get("float32") or 0.0
    fast = {dtype: t for dtype in HALF_DTYPES if (t := times.get(dtype)) and t < 0.8 * full}
    if not fast:
        why = "neither bfloat16 nor float16 is clearly faster than float32 on this CPU."
        return Advice("float32", why, ())
    dtype = min(fast, key=lambda name: fast[name])
    if fast.get("bfloat16", full) <= 1.1 * fast[dtype]:
        dtype = "bfloat16"
    why = f"{dtype} was {full / fast[dtype]:.1f} times as fast as float32 on this CPU."
    other = "Other operations may be slower in half precision on a CPU, or missing."
    return Advice(f"mixed_{dtype}", why, (other,))


def what_xla_will_do(framework: str, platform: str) -> str:
    """Say which of the trainer's functions XLA compiles, in Keras's default `jit_compile="auto"`.

    Example:

    >>> what_xla_will_do("torch", "gpu")
    'nothing: PyTorch runs eagerly unless jit_compile=True, which means torch.compile'
    """
    if framework == "torch":
        return "nothing: PyTorch runs eagerly unless jit_compile=True, which means torch.compile"
    if framework == "tensorflow" and platform == "cpu":
        return 'nothing: on CPUs Keras reads jit_compile="auto" as False on TensorFlow'
    return "compile the whole step of fit, evaluate and predict"


def product_times(dtypes: tuple[DType, ...], repeats: int = 5) -> Times:
    """Time a product of two 1024 x 1024 matrices in each dtype.

    Args:
        dtypes: what to measure; they take turns, so that other load affects all of them alike.
        repeats: how many products are timed in each dtype, after one to warm up; the shortest time
            is taken.

    Returns:
        Seconds of a product, or None where the backend has none in the dtype.

    Example:

    >>> product_times(("float32",), repeats=1)["float32"] > 0
    True
    """
    matrices = {dtype: ops.ones((_SIZE, _SIZE), dtype) for dtype in dtypes}
    times: dict[DType, list[float]] = {dtype: [] for dtype in dtypes}
    for _ in range(repeats + 1):
        for dtype, x in list(matrices.items()):
            try:
                times[dtype].append(_seconds(x))
            except Exception:  # whatever a backend raises for a product that it does not have
                del matrices[dtype]
    return {dtype: min(times[dtype][1:]) if dtype in matrices else None for dtype in dtypes}


def _seconds(x) -> float:
    start = time.perf_counter()
    ops.convert_to_numpy(ops.cast(ops.matmul(x, x), "float32"))  # waits for the device
    return time.perf_counter() - start


def report() -> str:
    """What `doctor` prints: the facts, the advice, and what follows from it."""
    device = backend.device()
    framework = keras.backend.backend()
    times = product_times(("float32", *HALF_DTYPES))
    advice = advise(device, times)
    capability = device.compute_capability
    measured = ", ".join(
        f"{dtype} {'not available' if t is None else f'{t * 1e3:.3g} ms'}"
        for dtype, t in times.items()
    )
    rows = {
        "device": f"{device.name} ({device.platform})",
        "compute capability": ".".join(map(str, capability)) if capability else "none",
        "backend": f"{framework}, Keras {keras.__version__}",
        "XLA will": what_xla_will_do(framework, device.platform),
        "half_dtype()": half_dtype(),
        "measured here": f"{_SIZE} x {_SIZE} matrix product: {measured}",
        "advised policy": f"{advice.policy}: {advice.why}",
        **conclusion(advice, times),
    }
    return "\n".join(f"{name:20}{text}" for name, text in rows.items())


def conclusion(advice: Advice, times: Times) -> dict[str, str]:
    """What to write, what that gains, and what to watch.

    Example:

    >>> advice = Advice("mixed_bfloat16", "it is fast.", ())
    >>> conclusion(advice, {"float32": 4e-3, "bfloat16": 1e-3})["gain"]
    'activations take half the memory; a matrix product takes 0.25 times as long'
    """
    halves = {dtype: share for dtype in HALF_DTYPES if (share := _share(times, dtype))}
    if advice.policy == "float32":
        parts = [f"{share:.2f} times as long in {dtype}" for dtype, share in halves.items()]
        write = "nothing: Keras trains in float32"
        gain = "no conversions"
        gain += f"; a matrix product would take {' and '.join(parts)}" if parts else ""
    else:
        share = halves.get(advice.policy.removeprefix("mixed_"))
        write = f'kmp.set_policy("{advice.policy}") before you build the model'
        if advice.policy == "mixed_float16":
            write += ', then model.compile(kmp.scaled("adam"), ...)'
        gain = "activations take half the memory"
        gain += f"; a matrix product takes {share:.2f} times as long" if share else ""
    watch = [*advice.warnings]
    if advice.policy != "float32":  # else `gain` has said it
        watch += slower(times)
    if advice.policy == "mixed_float16":
        watch.append("kmp.callbacks.GradientHealth() in fit shows loss scale and skipped steps.")
    watch.append("Measure your own model: kmp bench --model my_package.train:build")
    return {"write": write, "gain": gain, "watch": " ".join(watch)}


def _share(times: Times, dtype: DType) -> float | None:
    """A dtype's time as a share of float32's; None if either was not measured."""
    full, half = times.get("float32"), times.get(dtype)
    return half / full if full and half else None


def slower(times: Times) -> tuple[str, ...]:
    """Say which half precision took clearly longer than float32 (a tenth, above the noise).

    Example:

    >>> slower({"float32": 1e-3, "bfloat16": 5e-4, "float16": 3e-3})
    ('float16 took 3.0 times as long as float32.',)
    """
    shares = {dtype: _share(times, dtype) or 0.0 for dtype in times}
    return tuple(
        f"{dtype} took {share:.1f} times as long as float32."
        for dtype, share in shares.items()
        if share > 1.1
    )


def environment() -> dict[str, str]:
    """The device and the versions that numbers were measured with.

    Example:

    >>> environment()["keras"] == keras.__version__
    True
    """
    device = backend.device()
    framework = keras.backend.backend()
    packages = {"tensorflow": ["tensorflow"], "jax": ["jax", "jaxlib"], "torch": ["torch"]}[
        framework
    ]
    return {
        "device": f"{device.name} ({device.platform}), {platform.machine()}, "
        f"{os.cpu_count()} CPU cores",
        "backend": framework,
        "XLA will": what_xla_will_do(framework, device.platform),
        "kmp": version_of("kmp"),
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("keras", "numpy", *packages)},
    }


def version_of(package: str) -> str:
    """The version that a package states itself.

    A distribution may have another name than its package (tensorflow-cpu, keras-nightly), so its
    metadata cannot be found by the name of the package.

    Example:

    >>> version_of("keras") == keras.__version__
    True
    """
    return str(importlib.import_module(package).__version__)


def environment_line(facts: dict[str, str]) -> str:
    """Write `environment()` as the two lines above a table.

    Example:

    >>> print(environment_line({"device": "TPU", "backend": "jax", "XLA will": "do", "kmp": "1"}))
    TPU; jax; XLA: do
    kmp 1
    """
    facts = dict(facts)
    device, framework, xla = (facts.pop(name) for name in ("device", "backend", "XLA will"))
    versions = ", ".join(f"{name} {version}" for name, version in facts.items())
    return f"{device}; {framework}; XLA: {xla}\n{versions}"
