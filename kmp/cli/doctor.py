"""What this machine is good at: the advice of `python -m kmp doctor`."""

import os
import platform
import time
from importlib import metadata
from typing import NamedTuple

import keras
from keras import ops

from kmp import __version__, _backend
from kmp._backend.types import Device, DType
from kmp.precision.trees import half_dtype

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


def advise(device: Device) -> Advice:
    """Say which policy a device is good at.

    Args:
        device: `(platform, name, compute_capability)`.

    Example:

    >>> from kmp._backend.types import Device
    >>> advise(Device("gpu", "Tesla V100", (7, 0))).policy
    'mixed_float16'

    Source: NVIDIA, "CUDA C++ Programming Guide" (tensor cores from 7.0, bfloat16 from 8.0).
    """
    capability = device.compute_capability
    if device.platform == "tpu":
        why = "TPUs multiply in bfloat16, whose range is float32's: no loss scaling is needed."
        return Advice("mixed_bfloat16", why, ("float16 does not compile for TPUs.",))
    if device.platform == "cpu":
        why = "most CPUs compute half precision by way of float32."
        slow = "Half precision is for trying things out here; float16 above all is emulated."
        return Advice("float32", why, (slow,))
    if capability is None:
        why = "not an NVIDIA GPU; bfloat16 has float32's range and needs no loss scaling."
        return Advice("mixed_bfloat16", why, ("Not known to kmp: measure before you rely on it.",))
    if capability < (7, 0):
        slow = "Half precision will be slower than float32 or no faster: no tensor cores."
        return Advice("float32", "tensor cores came with compute capability 7.0.", (slow,))
    if capability < (8, 0):
        why = "its tensor cores multiply float16 and know no bfloat16; use kmp.scaled."
        slow = "bfloat16 will be slower than float32: this GPU emulates it."
        return Advice("mixed_float16", why, (slow,))
    why = "its tensor cores are as fast in bfloat16 as in float16, without loss scaling."
    return Advice("mixed_bfloat16", why, ())


def what_xla_will_do(backend: str, platform: str) -> str:
    """Say which of the trainer's functions XLA compiles, in Keras's default `jit_compile="auto"`.

    Example:

    >>> what_xla_will_do("torch", "gpu")
    'nothing: PyTorch runs eagerly unless jit_compile=True, which means torch.compile'
    """
    if backend == "torch":
        return "nothing: PyTorch runs eagerly unless jit_compile=True, which means torch.compile"
    if backend == "tensorflow" and platform == "cpu":
        return 'nothing: on CPUs Keras reads jit_compile="auto" as False on TensorFlow'
    return "compile the whole step of fit, evaluate and predict"


def product_times(dtypes: tuple[DType, ...], repeats: int = 5) -> dict[DType, float | None]:
    """Time a product of two 1024 x 1024 matrices in each dtype.

    Args:
        dtypes: what to measure, in turn.
        repeats: the shortest of so many is taken, after one to warm up.

    Returns:
        Seconds a product, or None where the backend has none in the dtype.

    Example:

    >>> product_times(("float32",), repeats=1)["float32"] > 0
    True
    """
    times: dict[DType, float | None] = {}
    for dtype in dtypes:
        x = ops.ones((_SIZE, _SIZE), dtype)
        try:
            times[dtype] = min([_seconds(x) for _ in range(repeats + 1)][1:])
        except Exception:  # whatever a backend raises for a product that it does not have
            times[dtype] = None
    return times


def _seconds(x) -> float:
    start = time.perf_counter()
    ops.convert_to_numpy(ops.cast(ops.matmul(x, x), "float32"))  # waits for the device
    return time.perf_counter() - start


def report() -> str:
    """What `python -m kmp doctor` prints."""
    device, backend = _backend.device(), keras.backend.backend()
    advice = advise(device)
    capability = device.compute_capability
    times = product_times(("float32", "bfloat16", "float16"))
    lines = [
        f"device              {device.name} ({device.platform})",
        "compute capability  " + (".".join(map(str, capability)) if capability else "none"),
        f"backend             {backend}, Keras {keras.__version__}",
        f"XLA will            {what_xla_will_do(backend, device.platform)}",
        f"half precision      {half_dtype()}",
        f"advised policy      {advice.policy}: {advice.why}",
        f"measured here       {_SIZE} x {_SIZE} matrix product: "
        + ", ".join(
            f"{dtype} {'not available' if t is None else f'{t * 1e3:.3g} ms'}"
            for dtype, t in times.items()
        ),
    ]
    warnings = [f"warning             {each}" for each in (*advice.warnings, *slower(times))]
    return "\n".join(lines + warnings)


def slower(times: dict[DType, float | None]) -> tuple[str, ...]:
    """Say which half precision took clearly longer than float32 (a tenth, above the noise).

    Example:

    >>> slower({"float32": 1e-3, "bfloat16": 5e-4, "float16": 3e-3})
    ('float16 took 3.0 times as long as float32.',)
    """
    full = times["float32"] or 0.0
    return tuple(
        f"{dtype} took {t / full:.1f} times as long as float32."
        for dtype, t in times.items()
        if t is not None and full and t > 1.1 * full
    )


def environment() -> dict[str, str]:
    """Name the device and the versions, for whoever reads the numbers.

    Example:

    >>> environment()["keras"] == keras.__version__
    True
    """
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
    """Write `environment()` as the two lines above a table.

    Example:

    >>> print(environment_line({"device": "TPU", "backend": "jax", "XLA will": "do", "kmp": "1"}))
    TPU; jax; XLA: do
    kmp 1
    """
    facts = dict(facts)
    device, backend, xla = (facts.pop(name) for name in ("device", "backend", "XLA will"))
    versions = ", ".join(f"{name} {version}" for name, version in facts.items())
    return f"{device}; {backend}; XLA: {xla}\n{versions}"
